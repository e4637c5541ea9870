"""Share of attention in the forward time of one layer of a transformers model, by length."""

import argparse
import copy
import json
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import cqs
from benchmarks.clock import Clock
from benchmarks.options import add_common
from benchmarks.plots.bottleneck import plot_bottleneck
from benchmarks.publish import make_columns, make_row, publish
from cqs.patterns import Pattern
from cqs.patterns.text import PATTERN_HELP, parse_pattern
from cqs.plotting import check_picture
from cqs.plotting.figures import save_figure
from cqs.report.measurement import Measurement, append_rows

PARTS = "attention", "projections", "feed-forward", "norms", "rest"
"""Parts of a layer; projections are those of queries, keys, values and outputs of attention."""
_TOKENS_ON_CPU = 1024, 2048, 4096, 8192
_TOKENS_ON_GPU = tuple(1024 << i for i in range(8))
_NAME = "timed"
SHAPES = json.loads(Path(__file__).with_name("model_shapes.json").read_text())
"""Library -> name of a shape -> configuration, as in ``config.json``; those of transformers are
arguments of ``AutoConfig.for_model``. Models have fewer layers than those of their names."""
_SHAPES = SHAPES["transformers"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this benchmark."""
    add_common(parser, several_lengths=True)
    parser.add_argument(
        "--model", metavar="NAME",
        help=f"{', '.join(_SHAPES)}, a name on Hugging Face, or a directory with config.json; "
        "default: bert-base",
    )  # fmt: skip
    parser.add_argument("--pattern", metavar="CALL", help=f"{PATTERN_HELP}; default: dense")
    parser.add_argument("--picture", metavar="FILE", help="draw the shares")


def run(
    *,
    tokens: Sequence[int] | None = None,
    model: str = "bert-base",
    pattern: str | None = None,
    repeats: int = 3,
    out: str | None = None,
    picture: str | None = None,
) -> None:
    """Time the parts of one layer with random weights, without embeddings and output layer.

    Dense attention is that of ``attn_implementation="sdpa"``. On GPUs weights are bfloat16 and
    times are those of the device; on CPUs float32.

    Args:
        tokens: Sequence lengths; ``None`` means 1K to 128K on a GPU, 1K to 8K on a CPU.
        model: Name of a shape, or what ``AutoConfig.from_pretrained`` accepts.
        pattern: Expression of a pattern, see :func:`cqs.patterns.text.parse_pattern`.
        repeats: Number of repeats, of which medians are shown.
        out: File to append rows to, or ``None``.
        picture: File of a picture, or ``None``.

    Raises:
        ValueError: The pattern is not an expression of a pattern.
    """
    if picture is not None:
        check_picture(picture)
    chosen = None if pattern is None else parse_pattern(pattern)
    lengths = tokens or (_TOKENS_ON_GPU if torch.cuda.is_available() else _TOKENS_ON_CPU)
    config = load_config(model)
    name = model if model in _SHAPES else Path(model).name
    rows = []
    for length in lengths:
        rows.append(measure(config, length, chosen, name=name, repeats=repeats))
        append_rows(rows[-1:], out)
    publish(rows, make_columns(*PARTS), None)
    if picture is not None:
        save_figure(plot_bottleneck(list(map(asdict, rows))), picture, dpi=120)


def load_config(model: str) -> Any:
    """Return the transformers configuration of a shape, a directory or a published model."""
    from transformers import AutoConfig

    if model in _SHAPES:
        return AutoConfig.for_model(**_SHAPES[model])
    return AutoConfig.from_pretrained(model)


def measure(
    config: Any, tokens: int, pattern: Pattern | None = None, *, name: str, repeats: int = 3
) -> Measurement:
    """Measure one layer of a model.

    Args:
        config: Configuration of a transformers model.
        tokens: Sequence length.
        pattern: Pattern of attention, ``& causal()`` in causal layers; ``None`` means dense.
        name: Name of the model in the row.
        repeats: Number of repeats.

    Returns:
        A row with the milliseconds of each part in ``details``; its ratio is attention's share.
    """
    from transformers import AttentionInterface, AttentionMaskInterface, AutoModel
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    on_gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    config = _of_one_layer(config, tokens)
    if pattern is None:
        AttentionInterface.register(_NAME, sdpa_attention_forward)
        AttentionMaskInterface.register(_NAME, sdpa_mask)
    else:
        AttentionInterface.register(_NAME, partial(_attend, pattern=pattern))
        AttentionMaskInterface.register(_NAME, lambda *_, **__: None)
    torch.manual_seed(0)
    model = AutoModel.from_config(config, attn_implementation=_NAME).to(device, dtype).eval()
    inputs = torch.randn(1, tokens, model.get_input_embeddings().embedding_dim, device=device)
    call = partial(model, inputs_embeds=inputs.to(dtype))
    found: list[dict[str, float]] = []
    for _ in range(repeats + 1):  # the first call is warm-up
        clock = Clock(device, PARTS)
        with torch.inference_mode(), _marked(model, clock):
            clock.enter("rest")
            call()
            found.append(clock.stop())
    medians = {part: 1e3 * statistics.median(each[part] for each in found[1:]) for part in PARTS}
    totals = [sum(each.values()) for each in found[1:]]
    return make_row(
        totals,
        dtype,
        benchmark="bottleneck",
        case=f"{name}-{tokens}",
        baseline="layer",
        executor="dense" if pattern is None else repr(pattern),
        ratio=medians["attention"] / sum(medians.values()),
        details={"tokens": tokens, **medians},
    )


def _of_one_layer(config: Any, tokens: int) -> Any:
    """Return a copy of a configuration with one layer, for sequences of this length."""
    config = copy.deepcopy(config)
    config.num_hidden_layers = 1
    config.use_cache = False
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[-1:]
    if getattr(config, "max_position_embeddings", tokens) < tokens:
        config.max_position_embeddings = tokens
    return config


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    pattern: Pattern,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of a layer with a pattern, in the signature of transformers."""
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    output = cqs.attention(query, key, value, pattern=pattern, is_causal=is_causal, scale=scaling)
    assert isinstance(output, Tensor)  # no LSE is asked for
    return output.transpose(1, 2), None


@contextmanager
def _marked(model: nn.Module, clock: Clock) -> Iterator[None]:
    """Make the leaves of a model, and its attention function, enter their parts of a clock."""
    from transformers import AttentionInterface

    attend = AttentionInterface()[_NAME]
    with ExitStack() as stack:
        AttentionInterface.register(_NAME, clock.attributed(attend, "attention"))
        stack.callback(AttentionInterface.register, _NAME, attend)
        for name, module in model.named_modules():
            part = _part_of(name, module)
            if part is not None:
                begin = partial(_enter, clock, part)
                stack.callback(module.register_forward_pre_hook(begin).remove)
                stack.callback(module.register_forward_hook(partial(_enter, clock, "rest")).remove)
        yield


def _enter(clock: Clock, part: str, *_: Any) -> None:
    clock.enter(part)


def _part_of(name: str, module: nn.Module) -> str | None:
    """Return the part of a module by its name, ``None`` if it has none of its own."""
    if "norm" in type(module).__name__.lower():
        return "norms"
    is_outside = any(part in name.lower() for part in ("embedding", "pooler"))
    if is_outside or next(module.children(), None) is not None:
        return None
    kind = type(module).__name__.lower()
    is_linear = "linear" in kind or "conv1d" in kind
    words = name.lower().replace("_", ".").split(".")
    if any(word.startswith("att") for word in words):
        return "projections" if is_linear else None
    return "feed-forward" if is_linear or "act" in words or "activation" in words else None
