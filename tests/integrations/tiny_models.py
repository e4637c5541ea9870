"""Small models of transformers from their configurations, and batches for them."""

import torch
import transformers

TOKENS, VOCABULARY = 33, 99
_OPTIONS = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
}
FAMILIES = {
    "Llama": {},
    "Mistral": {"sliding_window": 7},
    "Qwen2": {"num_key_value_heads": 2, "sliding_window": 9, "max_window_layers": 1}
    | {"use_sliding_window": True},
    "GptOss": {"head_dim": 8, "num_local_experts": 4, "sliding_window": 7}
    | {"experts_implementation": "eager"},
    "Gemma2": {"head_dim": 8, "sliding_window": 7, "attn_logit_softcapping": 1.0}
    | {"initializer_range": 0.3},  # scores beyond the cap
    "Bert": {},
}
"""Family -> options that differ from those of all."""


def kind_of(family):
    name = "BertModel" if family == "Bert" else f"{family}ForCausalLM"
    return getattr(transformers, name)


def config_of(family, **options):
    return kind_of(family).config_class(**_OPTIONS | FAMILIES[family] | options)


def make_model(family, **options):
    """Return a model with random weights, the same in every call, in float64."""
    torch.manual_seed(0)
    return kind_of(family)(config_of(family, **options)).double().eval()


def reference_of(family):
    """Name of the attention of transformers with which results are compared, in float64."""
    return "eager" if family in ("GptOss", "Gemma2") else "sdpa"  # without sinks and caps


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


def packed_rows(*rows):
    """Return a batch whose rows are packed sequences of these lengths."""
    positions = [torch.cat([torch.arange(length) for length in lengths]) for lengths in rows]
    positions = torch.stack(positions)
    return {"input_ids": token_ids(len(rows)), "position_ids": positions, "use_cache": False}


BATCHES = {
    "whole": lambda: {"input_ids": token_ids()},
    "padded on the left": lambda: _padded((5, 0), (0, 0), (20, 0)),
    "padded on the right": lambda: _padded((0, 0), (0, 3), (0, 30)),
    "packed": lambda: packed_rows((10, 1, 22), (10, 1, 22)),
}


def passes(model, weights=None, **batch):
    """Return the outputs of what is no padding, and the gradient of every parameter.

    The gradients are those of a sum of the outputs, with random signs or with weights.
    """
    model.zero_grad()
    output = model(**batch)[0]
    mask = batch.get("attention_mask")
    if weights is None and mask is not None and mask.ndim == 2:
        output = output[mask.bool()]
    if weights is None:
        weights = 2 * torch.randint(2, output.shape, generator=torch.manual_seed(2)) - 1
    (output * weights.to(output)).sum().backward()
    gradients = {
        name: torch.zeros_like(each) if each.grad is None else each.grad.clone()
        for name, each in model.named_parameters()  # compiled models have zeros, too
    }
    return {"output": output.detach().clone(), **gradients}


def assert_alike(found, expected, tolerance=1e-10):
    assert found.keys() >= expected.keys()
    for name, want in expected.items():
        error = (found[name] - want).abs().max()
        assert error <= tolerance * max(1, want.abs().max()), f"{name}: {error:.3e}"
