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


def _wan_inputs(frames, height, width, text):
    return {
        "hidden_states": randn(2, 2, frames, 2 * height, 2 * width),
        "timestep": tensor([3, 700]),
        "encoder_hidden_states": randn(2, text, 6),
    }


def _flux_inputs(frames, height, width, text):
    grid = torch.cartesian_prod(*map(torch.arange, (frames, height, width)))
    return {
        "hidden_states": randn(2, len(grid), 4),
        "encoder_hidden_states": randn(2, text, 6),
        "pooled_projections": randn(2, 5),
        "timestep": tensor([0.3, 0.7]),
        "img_ids": grid.float(),
        "txt_ids": torch.zeros(text, 3),
    }


def _qwen_image_inputs(frames, height, width, text):
    return {
        "hidden_states": randn(2, frames * height * width, 4),
        "encoder_hidden_states": randn(2, text, 6),
        "encoder_hidden_states_mask": _padded(text),
        "timestep": tensor([0.3, 0.7]),
        "img_shapes": [[(frames, height, width)]] * 2,
    }


def _hunyuan_video_inputs(frames, height, width, text):
    return {
        "hidden_states": randn(2, 2, frames, height, width),
        "timestep": tensor([3, 700]),
        "encoder_hidden_states": randn(2, text, 6),
        "encoder_attention_mask": _padded(text),
        "pooled_projections": randn(2, 5),
        "guidance": tensor([1.0, 2.0]),
    }


def _ltx_inputs(frames, height, width, text):
    return {
        "hidden_states": randn(2, frames * height * width, 4),
        "encoder_hidden_states": randn(2, text, 6),
        "timestep": tensor([3, 700]),
        "encoder_attention_mask": _padded(text).long(),
        "num_frames": frames,
        "height": height,
        "width": width,
    }


def _cogvideox_inputs(frames, height, width, text):
    angles = randn(frames * height * width, HEAD_DIM // 2).repeat_interleave(2, 1)
    return {
        "hidden_states": randn(2, frames, 2, 2 * height, 2 * width),
        "encoder_hidden_states": randn(2, text, 6),
        "timestep": tensor([3, 700]),
        "image_rotary_emb": (angles.cos(), angles.sin()),
    }


def _z_image_inputs(frames, height, width, text):
    """Captions and images are padded to multiples of 32, and to those of the whole batch."""
    return {
        "x": [randn(2, frames, 2 * height, 2 * width), randn(2, 1, 2, 2)],
        "t": tensor([0.3, 0.7]),
        "cap_feats": [randn(text, 6), randn(text + 32, 6)],
    }


FAMILIES = {
    "Wan": _wan_inputs,
    "Flux": _flux_inputs,
    "QwenImage": _qwen_image_inputs,
    "HunyuanVideo": _hunyuan_video_inputs,
    "LTX": _ltx_inputs,
    "CogVideoX": _cogvideox_inputs,
    "ZImage": _z_image_inputs,
}
"""Beginning of the name of a model -> function that makes its inputs."""

SIZES = {
    "3 heads, 45 tokens, 7 of text": (3, (3, 3, 5, 7)),
    "4 heads, 11 tokens, 2 of text": (4, (1, 1, 11, 2)),
}
"""Number of heads; frames, height, width and text of the inputs."""


def _padded(text):
    """The second element of the batch has one token of text less."""
    return torch.arange(text) < tensor([[text], [text - 1]])


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
    torch.manual_seed(1)
    return FAMILIES[family](*sizes)


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
