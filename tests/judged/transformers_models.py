"""transformers: models of every family with its attention interface, whole and padded.

Outputs and gradients of all parameters are compared with those of ``attn_implementation="eager"``.
"""

from functools import partial
from unittest import SkipTest

import torch
import transformers
from transformers.modeling_utils import local_torch_dtype
from transformers.models.auto import modeling_auto

from . import transformers_families as tiny
from .framework import Case, Suite

_PADDINGS = {"whole": (0, 0), "padded on the right": (0, 6), "padded on the left": (5, 0)}


def suite():
    """Return the models of the installed transformers, without padding and with it."""
    return Suite("transformers models", f"transformers {transformers.__version__}", _cases())


def _cases():
    tiny.prepare()
    for kind in ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "MODEL_MAPPING_NAMES"):
        for name in getattr(modeling_auto, kind).values():
            for padding, sides in _PADDINGS.items():
                # Eager attention of Grounding DINO adds a boolean mask as 0 and 1.
                if isinstance(name, str) and "GroundingDino" not in name:
                    yield Case(f"{name} {padding}", partial(_check, name, sides))


def _check(name, sides):
    try:
        model, batch, expected = tiny.make_model(getattr(transformers, name), sides)
    except Exception as error:
        raise SkipTest(f"no tiny model: {error}") from error
    if sides != (0, 0) and "attention_mask" not in batch:
        raise SkipTest("the inputs have no padding")
    results, spy = tiny.results_of_cqs(model, batch)
    if not spy.call_count:
        raise SkipTest("the model has attention of its own")
    if "Blt" in name:  # its own code reads padding
        expected = tiny.results_of(tiny.with_attention(model, "sdpa"), batch)
    if tiny.deviation(results, expected) > 1:  # rounding does not explain it in float64
        with local_torch_dtype(torch.float64):
            model, batch, expected = tiny.make_model(getattr(transformers, name), sides)
            results, _ = tiny.results_of_cqs(model, batch)
    assert tiny.deviation(results, expected) <= 1
