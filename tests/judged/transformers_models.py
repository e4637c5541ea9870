"""transformers: every family of models that uses its attention interface, tiny and random.

Sizes are those of transformers' ``CausalLMModelTester``. The expected results are those of
``attn_implementation="eager"``, in outputs and gradients of all parameters.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import SkipTest, mock

import torch
from torch import Tensor

from .framework import NUM_TASKS, Case, Suite, assert_close

TINY = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "d_model": 32,
    "num_layers": 2,
    "num_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "image_size": 16,
    "patch_size": 4,
    "num_channels": 3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Option of a configuration -> value, for configurations that have it."""
LENGTH = 17
_PADDINGS = {"whole": None, "padded on the right": (0, 6), "padded on the left": (5, 0)}


def suite() -> Suite:
    """Return the models of the installed transformers, without padding and with it."""
    import transformers

    return Suite("transformers models", f"transformers {transformers.__version__}", _cases())


def _cases() -> Iterator[Case]:
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.utils import logging

    from cqs.integrations.transformers import register

    logging.set_verbosity(logging.CRITICAL)
    register("cqs", num_tasks=NUM_TASKS)
    for kind in ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "MODEL_MAPPING_NAMES"):
        for family, name in getattr(modeling_auto, kind).items():
            if family not in CONFIG_MAPPING or not isinstance(name, str):
                continue
            for padding, sides in _PADDINGS.items():
                check = partial(_check, family, name, sides)
                yield Case(f"{name} {padding}", check)


def _check(family: str, name: str, sides: tuple[int, int] | None) -> None:
    model, batch = _make(family, name, sides)
    expected = _pass(model, "eager", batch)
    found, num_calls = _pass_by_cqs(model, batch)
    if not num_calls:
        raise SkipTest("the model has attention of its own")
    assert found.keys() == expected.keys()
    gradients = [each for key, each in expected.items() if key != "output" and each.numel()]
    largest = max(float(each.abs().max()) for each in gradients)
    for key, want in expected.items():
        # The tolerance of transformers between its own implementations, in float32. Gradients of
        # a mean are small, and those of queries and keys a thousand times smaller than others.
        atol = 1e-5 if key == "output" else 1e-5 * min(largest, 1)
        assert_close([found[key]], [want], rtol=1e-4, atol=atol)


def _make(family: str, name: str, sides: tuple[int, int] | None) -> tuple[Any, dict[str, Any]]:
    """Return a model and a batch, or raise SkipTest if these sizes do not make a valid one."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        kind = CONFIG_MAPPING[family]
        default = kind()
        config = kind(**{key: each for key, each in TINY.items() if hasattr(default, key)})
        torch.manual_seed(0)
        config._attn_implementation = "eager"
        model_class = getattr(transformers, name)
        with torch.device("meta"):  # default sizes may exceed the memory
            weights = model_class._from_config(config).parameters()
        if sum(weight.numel() for weight in weights) > 3e6:
            raise SkipTest("these options do not make it small")
        model = model_class._from_config(config).eval()
        batch = _make_batch(model, config, sides)
        with torch.no_grad():
            model(**batch)
    except Exception as error:
        raise SkipTest(f"{type(error).__name__}: {error}") from error
    return model, batch


def _make_batch(model: Any, config: Any, sides: tuple[int, int] | None) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    if model.main_input_name == "pixel_values":
        if sides is not None:
            raise SkipTest("images have no padding")
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator)}
    ids = torch.randint(3, 99, (2, LENGTH), generator=generator)
    batch: dict[str, Any] = {"input_ids": ids}
    if sides is not None:
        mask = torch.ones_like(ids)
        mask[0, : sides[0]] = mask[0, LENGTH - sides[1] :] = 0
        batch["attention_mask"] = mask
    if getattr(config, "is_encoder_decoder", False):
        batch["decoder_input_ids"] = ids[:, :9]
    else:
        batch["use_cache"] = False
    return batch


def _pass_by_cqs(model: Any, batch: dict[str, Any]) -> tuple[dict[str, Tensor], int]:
    """Return output and gradients, and the number of calls of cqs."""
    from transformers import AttentionInterface

    function = AttentionInterface._global_mapping["cqs"]
    spy = mock.Mock(side_effect=function)
    with mock.patch.dict(AttentionInterface._global_mapping, {"cqs": spy}):
        return _pass(model, "cqs", batch), spy.call_count


def _pass(model: Any, implementation: str, batch: dict[str, Any]) -> dict[str, Tensor]:
    """Return the output where there is no padding, and the gradients of all parameters."""
    model.set_attn_implementation(implementation)
    model.zero_grad()
    torch.manual_seed(2)
    output = model(**batch)[0]
    mask = batch.get("attention_mask")
    if mask is not None and output.shape[:2] == mask.shape:
        output = output[mask.bool()]
    (
        output * torch.randn(output.shape, generator=torch.Generator().manual_seed(3))
    ).mean().backward()
    gradients = {
        key: each.grad.clone() for key, each in model.named_parameters() if each.grad is not None
    }
    return {"output": output.detach(), **gradients}
