"""Masks of Hugging Face transformers in graphs of ``torch.compile``.

A mask in a graph is the boolean tensor of transformers' ``sdpa_mask``, with an attribute for the
pattern that attention reads. The compiler removes the operations of a tensor that nothing reads.
"""

from collections.abc import Callable
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from cqs.executors.operators import TRACED, made_once, traced
from cqs.integrations import masks
from cqs.integrations.pattern_mask import KnownMask
from cqs.patterns import Pattern, from_mask, sliding_window
from cqs.patterns.arrays import as_array
from cqs.patterns.pattern import InGraph, named_in_graphs


def with_pattern(
    dense: Tensor,
    *,
    mask_function: Callable[..., Tensor],
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Return a mask with its pattern as the attribute ``cqs``.

    Patterns of transformers' own functions take memory linear in the length. The pattern of another
    function, or of queries at positions that only a run of the graph knows, is read from ``dense``.

    Args:
        dense: The boolean mask, ``[batch, 1, q_length, kv_length]``.
        mask_function: Function of transformers that returns whether a query sees a key.
        q_offset: Position of the first query.
        kv_offset: Position of the first key.
        attention_mask: ``[batch, positions]``, False at padding; ``None`` without padding.
    """
    batch, q_length, kv_length = dense.shape[0], *dense.shape[2:]
    name = ""
    if isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length:
        from torch._dynamo.comptime import comptime

        comptime(_recognise)
        name = traced("name")
    if not name:
        known = KnownMask(made_once(from_mask, dense), False, False)
        dense.cqs = known  # type: ignore[attr-defined]
        return dense
    visible = joined = None
    if attention_mask is not None:
        visible = attention_mask[:, kv_offset : kv_offset + kv_length].bool()
        visible = pad(visible, (0, kv_length - visible.shape[1]))
    if traced("packs"):
        device = dense.device
        later = torch.arange(1, q_length, device=device)
        element = torch.arange(batch, device=device)[:, None]
        joined = mask_function(element, element.new_zeros(()), later, later - 1)
    pattern = made_once(_make_mask, traced("pattern"), visible, joined, q_length, kv_length, batch)
    is_plain = visible is None and joined is None
    dense.cqs = KnownMask(  # type: ignore[attr-defined]
        pattern, batch > 1 and not is_plain, is_plain and name == "causal()"
    )
    return dense


@named_in_graphs
def _make_mask(
    pattern: Pattern,
    visible: Tensor | None,
    joined: Tensor | None,
    q_length: int,
    kv_length: int,
    batch: int,
) -> Pattern:
    """Return the pattern of a mask, of the batch as one sequence if rows may differ.

    Args:
        pattern: Pattern of the mask function, without packed sequences.
        visible: True for keys that are not padding, bool ``[batch, kv_length]``.
        joined: Whether token ``i + 1`` is in the sequence of token ``i``, bool
            ``[batch, q_length - 1]``; ``None`` if sequences are not packed.
        q_length: Number of queries.
        kv_length: Number of keys.
        batch: Number of batch elements.
    """
    if visible is None and joined is None:
        return pattern
    if joined is not None:
        pattern = pattern & masks.documents_between(~as_array(joined))
    if visible is not None:
        pattern = pattern & masks.mask_padding(as_array(visible))
    if batch == 1:
        return pattern
    rows = tuple(pattern.head(element, 0) for element in range(batch))
    return masks.Stacked(rows, q_length, kv_length)


@named_in_graphs
def unstacked(pattern: Pattern) -> Pattern:
    """Return the pattern of batch elements in place of that of the batch as one sequence."""
    if isinstance(pattern, InGraph):
        return made_once(unstacked, pattern)
    return masks.by_batch(pattern.rows) if isinstance(pattern, masks.Stacked) else pattern


def pattern_of(attention_mask: Tensor | None) -> KnownMask | None:
    """Return the pattern of a mask that this graph has made, unless an operation changed it."""
    known: KnownMask | None = getattr(attention_mask, "cqs", None)
    if known is None:
        return None
    from torch._dynamo.comptime import comptime

    comptime(_compare)
    return known if traced("intact") else None


def _compare(context: Any) -> None:
    """Check that the local variable ``attention_mask`` is of this graph and as it was made."""
    mask = context.get_local("attention_mask")
    is_made_here = mask._i_will_not_complain_if_bc_breaks_VariableTracker().source is None
    TRACED["intact"] = is_made_here and mask.as_fake()._version == 0


def _recognise(context: Any) -> None:
    """Find the pattern of the local variable ``mask_function`` while Dynamo traces."""
    load = context._i_will_not_complain_if_bc_breaks_InstructionTranslator().output.side_effects
    variable = context.get_local("mask_function")
    function = _rebuild(variable._i_will_not_complain_if_bc_breaks_VariableTracker(), load)
    packed = []

    def record_packed(numbers: Any) -> Pattern:
        packed.append(numbers)
        return sliding_window(None, None)

    pattern = None
    if isinstance(function, FunctionType):
        pattern = masks.recognise_pattern(function, 0, False, record_packed)
    name = "" if pattern is None else repr(pattern)
    TRACED.update(pattern=pattern, name=name, packs=bool(packed))


def _rebuild(variable: Any, side_effects: Any) -> Any:
    """Return the value of a variable of Dynamo; ``None`` in place of tensors and other values."""
    from torch._dynamo import variables

    variable = variable.realize()
    kind = type(variable)
    if kind is variables.NestedUserFunctionVariable:
        cells = () if variable.closure is None else variable.closure.items
        closure = (CellType(_rebuild(side_effects.load_cell(cell), side_effects)) for cell in cells)
        return FunctionType(variable.get_code(), variable.get_globals(), closure=tuple(closure))
    if kind is variables.UserFunctionVariable:
        return None if variable.fn.__closure__ else variable.fn
    if kind is variables.TupleVariable:
        return tuple(_rebuild(item, side_effects) for item in variable.items)
    return variable.as_python_constant() if variable.is_python_constant() else None
