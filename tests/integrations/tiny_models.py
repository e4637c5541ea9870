"""Small models of transformers from their configurations, and batches for them."""

import torch
from transformers import (
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
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
    "Bert": (BertModel, BertConfig, _ENCODER),
}


def config_of(family, **options):
    _, config, arguments = FAMILIES[family]
    return config(**arguments | options)


def make_model(family, **options):
    """Return a model with random weights, the same in every call, in float64."""
    torch.manual_seed(0)
    return FAMILIES[family][0](config_of(family, **options)).double().eval()


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
