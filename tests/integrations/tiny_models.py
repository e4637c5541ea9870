"""Small models of transformers from their configurations, and batches for them."""

import torch
from transformers import (
    BertConfig,
    BertModel,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Siglip2VisionConfig,
    Siglip2VisionModel,
    T5Gemma2Config,
    T5Gemma2Model,
)

TOKENS, VOCABULARY = 33, 99
_DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
}
_ENCODER = {key: value for key, value in _DECODER.items() if key != "num_key_value_heads"}
FAMILIES = {
    "Llama": (LlamaForCausalLM, LlamaConfig, _DECODER),
    "Mistral": (MistralForCausalLM, MistralConfig, _DECODER | {"sliding_window": 7}),
    "Qwen2": (
        Qwen2ForCausalLM,
        Qwen2Config,
        _DECODER
        | {"num_key_value_heads": 2, "sliding_window": 9, "max_window_layers": 1}
        | {"use_sliding_window": True},
    ),
    "GptOss": (
        GptOssForCausalLM,
        GptOssConfig,
        _DECODER
        | {"head_dim": 8, "num_local_experts": 4, "sliding_window": 7}
        | {"experts_implementation": "eager"},
    ),
    "Bert": (BertModel, BertConfig, _ENCODER),
}


def config_of(family, **options):
    _, config, arguments = FAMILIES[family]
    return config(**arguments | options)


def make_model(family, **options):
    """Return a model with random weights, the same in every call, in float64."""
    torch.manual_seed(0)
    return FAMILIES[family][0](config_of(family, **options)).double().eval()


def reference_of(family):
    """Name of the attention of transformers with which results are compared, in float64."""
    return "eager" if family == "GptOss" else "sdpa"  # which has no sinks


def with_attention(model, implementation):
    model.set_attn_implementation(implementation)
    return model


def token_ids(batch=3, tokens=TOKENS):
    return torch.randint(1, VOCABULARY, (batch, tokens), generator=torch.manual_seed(1))


def _padded(*paddings):
    mask = torch.ones(len(paddings), TOKENS, dtype=torch.int64)
    for row, (left, right) in zip(mask, paddings, strict=True):
        row[:left] = row[TOKENS - right :] = 0
    return {"input_ids": token_ids(len(paddings)), "attention_mask": mask}


def _packed():
    """Three sequences of unequal lengths in each row."""
    lengths = (10, 1, 22)
    positions = torch.cat([torch.arange(length) for length in lengths])
    return {
        "input_ids": token_ids(2),
        "position_ids": positions.expand(2, -1),
        "use_cache": False,
    }


BATCHES = {
    "whole": lambda: {"input_ids": token_ids()},
    "padded on the left": lambda: _padded((5, 0), (0, 0), (20, 0)),
    "padded on the right": lambda: _padded((0, 0), (0, 3), (0, 30)),
    "packed": _packed,
}


def passes(model, **batch):
    """Return the outputs of what is no padding, and the gradient of every parameter."""
    model.zero_grad()
    output = model(**batch)[0]
    mask = batch.get("attention_mask")
    if mask is not None and mask.ndim == 2:
        output = output[mask.bool()]
    signs = 2 * torch.randint(2, output.shape, generator=torch.manual_seed(2)) - 1
    (output * signs.to(output)).sum().backward()
    gradients = {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return {"output": output.detach()} | {name: grad.clone() for name, grad in gradients.items()}


def _of_t5_gemma2():
    """Its decoder concatenates the masks of its own tokens and of the encoder's."""
    text = _DECODER | {"head_dim": 8, "sliding_window": 4}
    text["layer_types"] = ["sliding_attention", "full_attention"]
    vision = {key: _ENCODER[key] for key in ("hidden_size", "intermediate_size")}
    vision |= {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16, "patch_size": 8}
    encoder = {"text_config": text, "vision_config": vision}
    config = T5Gemma2Config(encoder=encoder, decoder=text, image_token_index=VOCABULARY - 1)
    return T5Gemma2Model(config), _padded((5, 0), (0, 3)) | {"decoder_input_ids": token_ids(2, 9)}


def _of_siglip2():
    """Its pooling layer repeats the mask for every head and turns it into numbers."""
    options = {key: _ENCODER[key] for key in ("hidden_size", "intermediate_size")}
    options |= {"num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4}
    batch = {
        "pixel_values": torch.randn(2, 16, 48, generator=torch.manual_seed(1)).double(),
        "pixel_attention_mask": (torch.arange(16) < torch.tensor([[16], [4]])).long(),
        "spatial_shapes": torch.tensor([[4, 4], [2, 2]]),
    }
    return Siglip2VisionModel(Siglip2VisionConfig(num_patches=16, **options)), batch


def _of_gemma4():
    """Its last layers compute for the last tokens only, with the last rows of the mask."""
    options = _DECODER | {"num_hidden_layers": 4, "head_dim": 8, "global_head_dim": 8}
    options |= {"num_kv_shared_layers": 2, "sliding_window": 4, "hidden_size_per_layer_input": 8}
    options |= {"vocab_size_per_layer_input": VOCABULARY, "num_global_key_value_heads": 4}
    options["layer_types"] = ["sliding_attention", "full_attention"] * 2
    batch = _padded((5, 0), (0, 0)) | {"logits_to_keep": 3}
    return Gemma4ForCausalLM(Gemma4TextConfig(**options)), batch


def _of_qwen2_moe():
    """Its default window is 0, of a mask that no layer uses."""
    options = _DECODER | {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
    config = Qwen2MoeConfig(num_experts=4, **options)
    config._experts_implementation = "eager"
    return Qwen2MoeForCausalLM(config), _padded((5, 0), (0, 3))


THAT_READ_THE_MASK = {
    "T5Gemma2": _of_t5_gemma2,
    "Siglip2": _of_siglip2,
    "Gemma4": _of_gemma4,
    "Qwen2Moe": _of_qwen2_moe,
}


def make_model_that_reads_the_mask(family):
    """Return a model with random weights in float64, and a batch for it."""
    torch.manual_seed(0)
    model, batch = THAT_READ_THE_MASK[family]()
    return model.double().eval(), batch
