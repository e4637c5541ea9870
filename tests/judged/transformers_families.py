"""Which families of transformers cqs computes: ``python -m tests.judged.transformers_families``.

A family is a folder of ``transformers.models`` with a model. Its models are made with
``attn_implementation="cqs"``, tiny and random, and outputs and gradients of all parameters
compared with those of "eager", with padding on the left where a model has a padding mask. One row
per family goes to ``benchmarks/results/transformers-families.jsonl``, of its first model that is
computed.
"""

import argparse
import inspect
import json
import re
import signal
import sys
import warnings
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from unittest import mock

import torch
import transformers
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, PreTrainedModel
from transformers.utils import logging

from cqs.integrations.transformers import register

from .framework import NUM_TASKS, replace_row
from .tiny_configs import batches, make_config

ROWS = Path(__file__).parents[2] / "benchmarks" / "results" / "transformers-families.jsonl"
_LARGEST = 20_000_000
"""Number of parameters above which a model is not made."""
_NUM_MODELS = 5
"""Models of a family that are tried."""
_SECONDS = 30
"""CPU time of a model."""
OUTCOMES = ("differs", "fails", "computed", "refused", "own attention", "not made", "no attention")
"""From what is reported even if another model of the family is computed."""
_REFUSED = re.compile(r"^\w+ of layer \w+: ")
"""Errors by which cqs names the layer and the reason."""


def main():
    """Return 1 if a family fails or differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="default: all")
    parser.add_argument("--out", type=Path, default=ROWS)
    options = parser.parse_args()
    prepare()
    is_bad = False
    for family in options.families or find_families():
        row = judge_family(family)
        is_bad |= row["outcome"] in OUTCOMES[:2]
        print(json.dumps(row), flush=True)
        replace_row(options.out, "family", row | {"version": transformers.__version__})
    return int(is_bad)


def prepare():
    """Register cqs, on one thread and without what transformers logs."""
    logging.set_verbosity(logging.CRITICAL)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    register("cqs", num_tasks=NUM_TASKS)


def find_families():
    """Return the names of the families of the installed transformers."""
    folder = Path(transformers.__file__).parent / "models"
    found = {path.parent.name for path in folder.glob("*/modeling_*.py")}
    return sorted(found - {"auto"})


def judge_family(family):
    """Return the row of a family: its outcome, and the model that shows it."""
    best = {}
    try:
        models = _models_of(family)
    except ImportError as error:
        return {"family": family, "outcome": "not made", "reason": _text_of(error)}
    for number, model in enumerate(sorted(models, key=_rank)):
        if number == _NUM_MODELS or best.get("outcome") in OUTCOMES[:4]:
            break
        row = {"model": model.__name__, **_judge_in_time(model)}
        if not best or OUTCOMES.index(row["outcome"]) < OUTCOMES.index(best["outcome"]):
            best = row
    if best.get("outcome", "not made") == "not made":
        best |= _by_code(family)
    return {"family": family, **best}


def _by_code(family):
    """Return what the code of a family tells of one of which no model was made."""
    code = "".join(path.read_text() for path in _files_of(family))
    if "ALL_ATTENTION_FUNCTIONS" in code:
        return {}
    layers = sorted(
        re.match(r"\w+", part)[0]
        for part in re.split(r"^class (?=\w+)", code, flags=re.MULTILINE)[1:]
        if re.match(r"\w*Attention\w*\(nn\.Module\)", part) and "get_interface" not in part
    )
    if layers:
        return {"outcome": "own attention", "layers": layers, "reason": "by its code"}
    if re.search("AutoModel|AutoBackbone|load_backbone", code):
        return {}
    return {"outcome": "no attention", "reason": "by its code"}


def _files_of(family):
    folder = Path(transformers.__file__).parent / "models" / family
    return sorted(folder.glob("modeling_*.py"))


def _models_of(family):
    found = []
    for path in _files_of(family):
        module = import_module(f"transformers.models.{family}.{path.stem}")
        found += [
            each
            for each in vars(module).values()
            if inspect.isclass(each)
            and issubclass(each, PreTrainedModel)
            and each.__module__ == module.__name__
            and not each.__name__.endswith("PreTrainedModel")
            and getattr(each, "config_class", None) is not None
        ]
    return found


def _rank(model):
    """Order models: whole ones with a head, whole ones, and parts."""
    name = model.__name__
    is_part = re.search("Text|Vision|Audio|Encoder|Decoder", name) is not None
    endings = ("ForConditionalGeneration", "ForCausalLM", "LMHeadModel", "Model")
    first = next((i for i, ending in enumerate(endings) if name.endswith(ending)), 6)
    return (4 if first == 3 and is_part else first), len(name)


def _judge_in_time(model):
    def stop(*_):
        raise TimeoutError(f"more than {_SECONDS} s")

    signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, _SECONDS)
    try:
        return _judge(model)
    except Exception as error:
        return {"outcome": "not made", "reason": _text_of(error)}
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def _text_of(error):
    return " ".join(f"{type(error).__name__}: {error}".split())[:160]


def _judge(model_class):
    model, batch, expected = make_model(model_class, (5, 0))
    layers = sorted({type(each).__name__ for each in model.modules() if _is_own(each)})
    try:
        found, spy = results_of_cqs(model, batch)
    except Exception as error:
        text = str(error)
        if _REFUSED.search(text):
            return {"outcome": "refused", "reason": text}
        return {"outcome": "fails", "reason": _text_of(error)}
    row = {"features": _features_of(spy)} if spy.call_count else {}
    if layers:
        row["layers"] = layers
    if deviation(found, expected) > 1:
        # Padding that the model's own code reads: "sdpa" too has other values there than "eager".
        if deviation(found, results_of(with_attention(model, "sdpa"), batch)) > 1:
            return {"outcome": "differs", "reason": f"{deviation(found, expected):.3g} x tolerance"}
        row["reference"] = "sdpa"
    if not layers and not spy.call_count:
        raise ValueError("no layer of attention with these options")
    return {"outcome": "computed" if spy.call_count else "own attention", **row}


@contextmanager
def counted(name):
    """Give a mock that computes the layers of an attention implementation."""
    mapping = AttentionInterface._global_mapping
    calls = {name: (spy := mock.Mock(side_effect=mapping[name]))}
    with mock.patch.dict(mapping, calls):
        with mock.patch.dict("cqs.integrations.own_attention._attend_of", calls):
            yield spy


def results_of_cqs(model, batch):
    """Return the results of a model with attention by cqs, and a mock with its calls."""
    with counted("cqs") as spy:
        return results_of(with_attention(model, "cqs"), batch), spy


def _new_model(model_class, are_sizes_ruled, implementation):
    config = make_config(model_class.config_class, are_sizes_ruled)
    config._attn_implementation = implementation
    return model_class(config).eval()


def make_model(model_class, padding):
    """Return a model, a valid batch and the results of "eager", or raise the first error."""
    errors = []
    for are_sizes_ruled in (True, False):
        try:
            with torch.device("meta"):
                model = _new_model(model_class, are_sizes_ruled, "eager")
            number = sum(each.numel() for each in model.parameters())
            if number > _LARGEST:
                raise ValueError(f"{number:,} parameters with these options")
            torch.manual_seed(0)
            model = _new_model(model_class, are_sizes_ruled, "eager")
            for parameter in model.parameters():
                if not parameter.isfinite().all():
                    torch.nn.init.normal_(parameter, std=0.02)
            for batch in batches(model, padding):
                try:
                    results = results_of(model, batch)
                    if not results["output"].isfinite().all():
                        raise ValueError("outputs of eager attention are not finite")
                    model.cqs_ruled = are_sizes_ruled
                    return model, batch, results
                except TimeoutError:
                    raise
                except Exception as error:
                    errors.append(error)
        except TimeoutError:
            raise
        except Exception as error:
            errors.append(error)
    raise errors[0]


def with_attention(model, implementation):
    """Return the same model, made with another implementation of attention."""
    other = _new_model(type(model), model.cqs_ruled, implementation)
    other.load_state_dict(model.state_dict())
    return other


def results_of(model, batch):
    """Return the first output where there is no padding, and the gradients of all parameters."""
    model.zero_grad()
    torch.manual_seed(2)
    output = model(**batch)
    leaves = tree_leaves(dict(output) if hasattr(output, "keys") else output)
    first = next(
        each
        for each in leaves
        if isinstance(each, Tensor) and each.is_floating_point() and each.requires_grad
    )
    mask = batch.get("attention_mask")
    if mask is not None and first.shape[:2] == mask.shape:
        first = first[mask.bool()]
    signs = torch.randn(first.shape, generator=torch.Generator().manual_seed(3))
    (first * signs).mean().backward()
    gradients = {
        name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None
    }
    return {"output": first.detach(), **gradients}


def deviation(found, expected):
    """Return the largest error in units of the tolerance of the suite of transformers' models."""
    if found.keys() != expected.keys():
        return float("inf")
    gradients = [each for key, each in expected.items() if key != "output" and each.numel()]
    largest = min(max((float(each.abs().max()) for each in gradients), default=0), 1)
    errors = [0.0]
    for key, want in expected.items():
        atol = 1e-5 if key == "output" else max(1e-5 * largest, 1e-12)
        if want.numel():
            errors.append(float(((found[key] - want).abs() / (atol + 1e-4 * want.abs())).max()))
    return max(errors) if all(map(torch.isfinite, map(torch.tensor, errors))) else float("inf")


_FEATURES = {
    "s_aux": "sinks",
    "softcap": "soft cap",
    "position_bias": "bias",
    "indices": "sparse indices",
}
"""Argument of an attention function -> what a layer asks for by it."""


def _features_of(spy):
    """Return what layers asked for, beyond a mask."""
    found = set()
    for call in spy.call_args_list:
        mask = call.args[4] if len(call.args) > 4 else call.kwargs.get("attention_mask")
        if mask is not None and mask.is_floating_point() and _has_bias(mask):
            found.add("bias")
        found |= {_FEATURES[name] for name in _FEATURES if call.kwargs.get(name) is not None}
    return sorted(found)


def _has_bias(mask):
    return mask.requires_grad or not bool(((mask == 0) | (mask <= -9984)).all())


def _is_own(layer):
    """Return whether a layer of attention has a softmax of its own."""
    kind = type(layer)
    if kind is torch.nn.MultiheadAttention:
        return True
    if not kind.__module__.startswith("transformers.") or "tten" not in kind.__name__:
        return False
    if kind.__name__ in ("BloomAttention", "MptAttention", "FalconAttention"):
        return False
    code = inspect.getsource(kind)
    return bool(re.search(r"softmax\(|Softmax\(|dot_product", code)) and "get_interface" not in code


if __name__ == "__main__":
    sys.exit(main())
