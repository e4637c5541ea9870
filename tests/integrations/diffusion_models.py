"""Tiny models of diffusers, and inputs that a number of ranks does not divide."""

import diffusers
import torch
from torch import randn, tensor

HEAD_DIM = 8
_TEXT = {"joint_attention_dim": 6}
_ROPE = {"axes_dims_rope": (2, 2, 4)}
_OPTIONS = {
    "WanTransformer3DModel": {"patch_size": (1, 2, 2), "in_channels": 2, "out_channels": 2}
    | {"text_dim": 6, "freq_dim": 8, "ffn_dim": 10, "num_layers": 2, "rope_max_seq_len": 16},
    "FluxTransformer2DModel": {"in_channels": 4, "num_layers": 1, "num_single_layers": 1}
    | {"pooled_projection_dim": 5, **_TEXT, **_ROPE},
    "QwenImageTransformer2DModel": {"in_channels": 4, "out_channels": 1, "num_layers": 2}
    | {**_TEXT, **_ROPE},
    "HunyuanVideoTransformer3DModel": {"in_channels": 2, "out_channels": 2, "patch_size": 1}
    | {"num_layers": 1, "num_single_layers": 1, "num_refiner_layers": 1}
    | {"text_embed_dim": 6, "pooled_projection_dim": 5, "rope_axes_dim": (2, 2, 4)},
    "LTXVideoTransformer3DModel": {"in_channels": 4, "out_channels": 4, "num_layers": 2}
    | {"caption_channels": 6},
    "CogVideoXTransformer3DModel": {"in_channels": 2, "out_channels": 2, "num_layers": 2}
    | {"time_embed_dim": 4, "text_embed_dim": 6, "use_rotary_positional_embeddings": True}
    | {"sample_width": 8, "sample_height": 8, "sample_frames": 9},
    "ZImageTransformer2DModel": {"in_channels": 2, "n_layers": 2, "n_refiner_layers": 1}
    | {"cap_feat_dim": 6, "axes_dims": [2, 2, 4], "axes_lens": [128, 16, 16]},
}
"""Model -> options of its configuration, except the heads."""


FAMILIES = "Wan", "Flux", "QwenImage", "HunyuanVideo", "LTX", "CogVideoX", "ZImage"
"""Beginnings of the names of the models."""

SIZES = {
    "3 heads, 45 tokens, 7 of text": (3, (3, 3, 5, 7)),
    "4 heads, 11 tokens, 2 of text": (4, (1, 1, 11, 2)),
}
"""Number of heads; frames, height, width and text of the inputs."""


def make_model(family, heads):
    (name,) = (name for name in _OPTIONS if name.startswith(family))
    names = ("n_heads", "n_kv_heads") if family == "ZImage" else ("num_attention_heads",)
    options = _OPTIONS[name] | dict.fromkeys(names, heads)
    if family == "ZImage":
        options["dim"] = heads * HEAD_DIM
    else:
        options["attention_head_dim"] = HEAD_DIM
    if family == "LTX":
        options["cross_attention_dim"] = heads * HEAD_DIM
    torch.manual_seed(0)
    model = getattr(diffusers, name)(**options)
    for parameter in model.parameters():  # some begin with zeros, which hides what is before
        torch.nn.init.normal_(parameter, std=0.1)
    return model


def make_inputs(family, sizes):
    """Return inputs for two samples; the second has one token of text less, if there is a mask."""
    frames, height, width, text = sizes
    torch.manual_seed(1)
    if family == "ZImage":  # pads captions and images, also to those of the whole batch
        return {
            "x": [randn(2, frames, 2 * height, 2 * width), randn(2, 1, 2, 2)],
            "t": tensor([0.3, 0.7]),
            "cap_feats": [randn(text, 6), randn(text + 32, 6)],
        }
    latents = {
        "Wan": (2, 2, frames, 2 * height, 2 * width),
        "HunyuanVideo": (2, 2, frames, height, width),
        "CogVideoX": (2, frames, 2, 2 * height, 2 * width),
    }
    grid = torch.cartesian_prod(*map(torch.arange, (frames, height, width)))
    mask = torch.arange(text) < tensor([[text], [text - 1]])
    inputs = {
        "hidden_states": randn(latents.get(family, (2, len(grid), 4))),
        "encoder_hidden_states": randn(2, text, 6),
        "timestep": tensor([0.3, 0.7] if family in ("Flux", "QwenImage") else [3, 700]),
    }
    if family == "Flux":
        inputs |= {"img_ids": grid.float(), "txt_ids": torch.zeros(text, 3)}
    if family == "QwenImage":
        inputs |= {"encoder_hidden_states_mask": mask, "img_shapes": [[sizes[:3]]] * 2}
    if family in ("Flux", "HunyuanVideo"):
        inputs["pooled_projections"] = randn(2, 5)
    if family == "HunyuanVideo":
        inputs |= {"encoder_attention_mask": mask, "guidance": tensor([1.0, 2.0])}
    if family == "LTX":
        inputs |= {"num_frames": frames, "height": height, "width": width}
        inputs["encoder_attention_mask"] = mask.long()
    if family == "CogVideoX":
        angles = randn(len(grid), HEAD_DIM // 2).repeat_interleave(2, 1)
        inputs["image_rotary_emb"] = (angles.cos(), angles.sin())
    return inputs


def as_list(tensors):
    return tensors if isinstance(tensors, list) else [tensors]


def passes(model, inputs):
    """Return the outputs, and the gradients of their weighted sum."""
    leaves = [
        each.requires_grad_()
        for name in ("hidden_states", "encoder_hidden_states", "x", "cap_feats")
        for each in as_list(inputs.get(name, []))
    ]
    outputs = as_list(model(**{"return_dict": False} | inputs)[0])
    weights = torch.manual_seed(2)
    sum((each * randn(each.shape, generator=weights)).sum() for each in outputs).backward()
    gradients = [each.grad for each in (*leaves, *model.parameters())]
    return [each.detach() for each in outputs], gradients
