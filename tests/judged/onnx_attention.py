"""ONNX: node tests of the operators Attention and FlexAttention."""

from functools import partial
from importlib import import_module

import numpy as np
import torch

import cqs
from cqs.integrations.flex import flex_attention
from cqs.patterns import from_mask

from .framework import NUM_TASKS, Case, Suite, as_tensor, assert_close

_WEIGHTS = 3
"""Value of qk_matmul_output_mode: attention weights; others are scores before the softmax."""
_INPUTS = "query", "key", "value", "mask", "past_key", "past_value", "lengths"


def suite():
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


def _check(test):
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
    if len(node.output) in (2, 4):  # the last one is a matrix of scores or of weights
        if options.get("qk_matmul_output_mode") == _WEIGHTS:
            _check_weights(tensors, options, outputs[-1], test)
        else:
            options["need_weights"] = True
    found = attend(tensors, options)
    expected = outputs[0]
    if found.dtype == torch.float16 and node.op_type == "Attention":
        # Its steps are rounded to float16, twice as far from exact as the tolerance.
        expected = _in_float64(inputs, node, options).astype(np.float16)
    # The runner of onnx allows two units in the last place of bfloat16.
    rtol = max(test.rtol, 2**-6) if found.dtype == torch.bfloat16 else test.rtol
    assert_close([found], [expected], rtol=rtol, atol=test.atol)


def _check_weights(tensors, options, expected, test):
    """Compare the attention weights, which are the output for an identity matrix of values."""
    is_flat = tensors["key"].ndim == 3
    key = tensors["key"]
    key = _split(key, options["kv_num_heads"]) if is_flat else key
    past = tensors["past_key"].shape[2] if "past_key" in tensors else 0
    unit = torch.eye(past + key.shape[2], dtype=key.dtype).expand(*key.shape[:2], -1, -1)
    values = {"value": unit[:, :, past:], "past_value": unit[:, :, :past]}
    if is_flat:
        values["value"] = values["value"].transpose(1, 2).flatten(2)
    found = _attend({**tensors, **{n: v for n, v in values.items() if n in tensors}}, options)
    if is_flat:
        found = _split(found, options["q_num_heads"])
    assert_close([found], [expected], rtol=test.rtol, atol=test.atol)


def _in_float64(inputs, node, options):
    """Compute a test by the reference of onnx, in float64."""
    from onnx.reference.ops.op_attention import _compute_attention

    given = iter(inputs)
    arrays = [np.asarray(next(given)) if used else None for used in node.input]
    arrays = [
        array.astype(float) if array is not None and array.dtype == np.float16 else array
        for array in arrays
    ]
    return _compute_attention(*arrays, **options)[0]


def _flex(tensors, options):
    """Compute FlexAttention, whose modifiers are graphs, by the function of cqs of that name."""
    operands = tensors["query"], tensors["key"], tensors["value"]
    mods = {"prob_mod": options["prob_mod"]} if "prob_mod" in options else {}
    if "score_mod" in options:
        mods["score_mod"] = _score_mod(options["score_mod"])
    return flex_attention(*operands, scale=options.get("scale"), num_tasks=NUM_TASKS, **mods)


_OPERATORS = {
    "Add": torch.add,
    "Cast": lambda value: value.float(),
    "Div": torch.div,
    "Gather": lambda sizes, dim: sizes[int(dim)],
    "GreaterOrEqual": torch.ge,
    "Mul": torch.mul,
    "Range": lambda start, size, step: size,
    "Reshape": lambda value, shape: value,
    "Sub": torch.sub,
    "Tanh": torch.tanh,
    "Where": torch.where,
}
"""Operator of a score graph -> the function of one score.

A graph makes indices of a dimension by a range of its size; the position of the score stands for
the size.
"""


def _score_mod(graph):
    """Return the function of one score that a graph of the whole score matrix computes."""
    from onnx.numpy_helper import to_array

    constants = {each.name: as_tensor(to_array(each)) for each in graph.initializer}

    def score_mod(score, *positions):
        values = {**constants, graph.input[0].name: score}
        for node in graph.node:
            operands = [values[name] for name in node.input]
            if node.op_type == "Shape":
                values[node.output[0]] = positions
            else:
                values[node.output[0]] = _OPERATORS[node.op_type](*operands)
        return values[graph.output[0].name]

    return score_mod


def _attend(tensors, options):
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
    given = {name: options[name] for name in ("need_weights",) if name in options}
    if options.get("softcap"):
        given["scores"] = cqs.Scores(softcap=options["softcap"])
    output = cqs.attention(
        query,
        key,
        value,
        _mask(tensors, key.shape[2]),
        pattern=_pattern(tensors, options, past, (query.shape[2], key.shape[2])),
        scale=options.get("scale"),
        num_tasks=NUM_TASKS,
        **given,
    )
    return output.transpose(1, 2).flatten(2) if is_flat else output


def _mask(tensors, seqlen_kv):
    """Return the mask of a test with all keys: those beyond it are masked out."""
    if "mask" not in tensors:
        return None
    mask = tensors["mask"]
    masked_out = False if mask.dtype == torch.bool else -torch.inf
    return torch.nn.functional.pad(mask, (0, seqlen_kv - mask.shape[-1]), value=masked_out)


def _split(rows, num_heads):
    return rows.unflatten(2, (num_heads, -1)).transpose(1, 2)


def _pattern(tensors, options, past, lengths):
    """Return the pairs within the causal mask, the window and the lengths of a test.

    Args:
        tensors: The inputs of the operator.
        options: Its attributes.
        past: Number of cached keys, which precede the first query.
        lengths: Number of queries, and of keys with those of the cache.
    """
    query, key = np.ogrid[: lengths[0], : lengths[1]]
    ends = lengths[1]
    if "lengths" in tensors:
        ends = tensors["lengths"].numpy()[:, None, None, None]
        past = ends - lengths[0]
    ahead = key - query - past
    left = options.get("left_window_size", -1)
    right = 0 if options.get("is_causal") else options.get("right_window_size", -1)
    visible = (key < ends) & (query >= 0)
    if left >= 0:
        visible = visible & (ahead >= -left)
    if right >= 0:
        visible = visible & (ahead <= right)
    return from_mask(visible)
