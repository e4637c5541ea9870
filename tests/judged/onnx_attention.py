"""ONNX: node tests of the operators Attention and FlexAttention."""

from collections.abc import Sequence
from functools import partial, reduce
from importlib import import_module
from operator import and_
from typing import Any

import numpy as np
import torch
from torch import Tensor

import cqs
from cqs.integrations.flex import flex_attention
from cqs.patterns import Pattern, from_mask, sliding_window

from .framework import NUM_TASKS, Case, Suite, as_tensor, assert_close

_INPUTS = "query", "key", "value", "mask", "past_key", "past_value", "lengths"


def suite() -> Suite:
    """Return the tests of the installed onnx; expanded forms have the same data and are omitted."""
    import onnx
    from onnx.backend.test.case import node

    for module in ("attention", "flexattention"):
        import_module(f"{node.__name__}.{module}")  # its classes list their tests when made
    tests = [
        Case(test.name, partial(_check, test))
        for test in node._NodeTestCases
        if test.model.graph.node[0].op_type in ("Attention", "FlexAttention")
    ]
    return Suite("ONNX Attention", f"onnx {onnx.__version__}", tests)


def _check(test: Any) -> None:
    from onnx.helper import get_attribute_value

    ((inputs, outputs),) = test.data_sets
    (node,) = test.model.graph.node
    options = {each.name: get_attribute_value(each) for each in node.attribute}
    given = iter(inputs)
    tensors = {
        name: as_tensor(next(given))
        for name, used in zip(_INPUTS, node.input, strict=False)
        if used
    }
    attend = _flex if node.op_type == "FlexAttention" else _attend
    found = attend(tensors, {**options, "num_outputs": len(node.output)})
    expected = outputs[0]
    if found.dtype == torch.float16 and node.op_type == "Attention":
        # Its steps are rounded to float16, twice as far from exact as the tolerance.
        expected = _in_float64(inputs, node, options).astype(np.float16)
    # The runner of onnx allows two units in the last place of bfloat16.
    rtol = max(test.rtol, 2**-6) if found.dtype == torch.bfloat16 else test.rtol
    assert_close([found], [expected], rtol=rtol, atol=test.atol)


def _in_float64(inputs: Sequence[Any], node: Any, options: dict[str, Any]) -> Any:
    """Compute a test by the reference of onnx, in float64."""
    from onnx.reference.ops.op_attention import _compute_attention

    given = iter(inputs)
    arrays = [np.asarray(next(given)) if used else None for used in node.input]
    arrays = [
        array.astype(float) if array is not None and array.dtype == np.float16 else array
        for array in arrays
    ]
    return _compute_attention(*arrays, **options)[0]


def _flex(tensors: dict[str, Tensor], options: dict[str, Any]) -> Tensor:
    """Compute FlexAttention, whose modifiers are graphs, by the function of cqs of that name."""
    operands = tensors["query"], tensors["key"], tensors["value"]
    mods = {name: options[name] for name in ("score_mod", "prob_mod") if name in options}
    output = flex_attention(*operands, scale=options.get("scale"), num_tasks=NUM_TASKS, **mods)
    assert isinstance(output, Tensor)
    return output


def _attend(tensors: dict[str, Tensor], options: dict[str, Any]) -> Tensor:
    query, key, value = (tensors[name] for name in _INPUTS[:3])
    is_flat = query.ndim == 3
    if is_flat:
        query = _split(query, options["q_num_heads"])
        key, value = (_split(each, options["kv_num_heads"]) for each in (key, value))
    past = 0
    if "past_key" in tensors:
        past = tensors["past_key"].shape[2]
        key = torch.cat([tensors["past_key"], key], 2)
        value = torch.cat([tensors["past_value"], value], 2)
    given: dict[str, Any] = {}
    if options.get("softcap"):
        given["scores"] = cqs.Scores(softcap=options["softcap"])
    if options["num_outputs"] in (2, 4):  # the last one is scores or weights
        given["need_weights"] = True
    output = cqs.attention(
        query,
        key,
        value,
        pattern=_pattern(tensors, options, past, (query.shape[2], key.shape[2])),
        scale=options.get("scale"),
        num_tasks=NUM_TASKS,
        **given,
    )
    return output.transpose(1, 2).flatten(2) if is_flat else output


def _split(rows: Tensor, num_heads: int) -> Tensor:
    return rows.unflatten(2, (num_heads, -1)).transpose(1, 2)


def _pattern(
    tensors: dict[str, Tensor], options: dict[str, Any], past: int, lengths: tuple[int, int]
) -> Pattern | None:
    """Intersect the causal mask, the window, the mask and the lengths of a test.

    Args:
        tensors: The inputs of the operator.
        options: Its attributes.
        past: Number of cached keys, which precede the first query.
        lengths: Number of queries, and of keys with those of the cache.
    """
    seqlen_q, seqlen_kv = lengths
    sides = [options.get(f"{side}_window_size", -1) for side in ("left", "right")]
    left, right = (None if side < 0 else side for side in sides)
    right = 0 if options.get("is_causal") else right
    patterns: list[Pattern] = []
    if "lengths" in tensors:
        ends = tensors["lengths"].numpy()[:, None, None, None]
        patterns.append(from_mask(np.arange(seqlen_kv) < ends + np.zeros((seqlen_q, 1), int)))
        patterns += _windows(left, right, ends - seqlen_q, lengths)
    elif past == seqlen_kv - seqlen_q:
        patterns.append(sliding_window(left, right))
    else:
        patterns += _windows(left, right, np.array(past), lengths)
    if "mask" in tensors:
        mask = tensors["mask"]
        lacking = seqlen_kv - mask.shape[-1]  # keys beyond the mask are masked out
        masked_out = False if mask.dtype == torch.bool else -torch.inf
        mask = torch.nn.functional.pad(mask, (0, lacking), value=masked_out)
        mask = mask.expand(*mask.shape[:-2], *lengths)
        patterns.append(from_mask(mask.reshape((1,) * (4 - mask.ndim) + mask.shape)))
    return reduce(and_, patterns) if patterns else None


def _windows(
    left: int | None, right: int | None, offset: Any, lengths: Sequence[int]
) -> list[Pattern]:
    """Return the pattern in which query i is at position ``i + offset``, if it has limits."""
    if left is None and right is None:
        return []
    query, key = np.ogrid[: lengths[0], : lengths[1]]
    ahead = key - query - offset
    mask = np.ones(ahead.shape, bool)
    if left is not None:
        mask &= ahead >= -left
    if right is not None:
        mask &= ahead <= right
    return [from_mask(mask)]
