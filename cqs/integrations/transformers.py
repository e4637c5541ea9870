"""Hugging Face transformers: models with ``attn_implementation="cqs"``."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from operator import and_
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

import cqs.distributed
from cqs.api import attention
from cqs.patterns import (
    Axis,
    BoundPattern,
    Pattern,
    Piece,
    causal,
    documents,
    from_mask,
    per_head,
    sliding_window,
)
from cqs.patterns.masks import as_array
from cqs.patterns.pattern import Lengths
from cqs.patterns.regular import bind_pieces
from cqs.uncompiled import uncompiled
from cqs.worker.backends import check_backend_name

if TYPE_CHECKING:
    from cqs.executors.ray import Cluster

_NOT_HONOURED = (
    "block_indices",
    "cache",
    "head_mask",
    "indices",
    "output_attentions",
    "position_bias",
    "s_aux",
    "sinks",
    "softcap",
)
"""What layers may ask of attention, beyond a mask, that changes its result."""


def register(
    name: str = "cqs",
    *,
    executor: "str | Cluster | None" = None,
    group: "dist.ProcessGroup | None" = None,
    num_workers: int | None = None,
    backend: str | None = None,
) -> None:
    """Make ``attn_implementation=name`` mean attention by cqs, in every model of transformers.

    It works in models that take their attention from transformers' ``AttentionInterface``: causal
    or not, with grouped queries, sliding windows, padding, packed sequences, caches and dropout.
    Masks become patterns, of a few integers where transformers' rule is known, padding or not,
    otherwise exactly those of the mask. A query that sees no
    key, as in padding on the left, gives 0.

    What a layer asks for that cannot be honoured raises an error that names the layer when the
    model is called: scores that are capped or biased, attention sinks, sparse indices, a paged
    cache, attention weights as an output.

    Args:
        name: Several registrations may stand side by side; a name that is registered is replaced.
        executor: As for :func:`cqs.attention`: a :class:`cqs.Cluster` computes every layer.
        group: A process group, each rank of which calls the model with its contiguous part of
            every sequence, as for :func:`cqs.distributed.attention`, and with the ``position_ids``
            of the whole: ``torch.distributed.group.WORLD`` for all ranks. Masks of padding are cut
            like the sequence. Neither caches nor packed sequences.
        num_workers: As for :func:`cqs.attention`; not with a group.
        backend: As for :func:`cqs.attention`.

    Raises:
        ImportError: if transformers is not installed, or has not the interface.
        ValueError: for options that do not fit together.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> register()
        >>> config = BertConfig(hidden_size=32, num_attention_heads=2, num_hidden_layers=1)
        >>> config._attn_implementation = "cqs"
        >>> BertModel(config)(torch.tensor([[1, 2, 3]])).last_hidden_state.shape
        torch.Size([1, 3, 32])
    """
    attention_interface, mask_interface, dense_mask = _extension_points()
    check_backend_name(backend)
    compute: Callable[..., Any]
    if group is None:
        compute = partial(attention, executor=executor, num_workers=num_workers, backend=backend)
    elif executor is num_workers is None:
        compute = partial(cqs.distributed.attention, group=group, backend=backend)
    else:
        raise ValueError("a process group takes neither an executor nor a number of workers")
    implementation = _Implementation(compute, dense_mask, group)
    attention_interface.register(name, implementation.attend)
    mask_interface.register(name, implementation.mask)


def _extension_points() -> tuple[Any, Any, Any]:
    """Return transformers' registries of attention and of masks, and its maker of dense masks."""
    needed = 'pip install "cqs[transformers]"'
    try:
        import transformers
    except ImportError as error:
        raise ImportError(f"transformers is not installed: {needed}") from error
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask

        inspect.signature(sdpa_mask).bind_partial(q_offset=0)
    except (ImportError, TypeError) as error:
        raise ImportError(
            f"transformers {transformers.__version__} has not the interface for attention and "
            f"masks that cqs registers with: {needed}"
        ) from error
    return AttentionInterface, AttentionMaskInterface, sdpa_mask


@dataclass(frozen=True)
class _Implementation:
    """What a name stands for: the two functions that transformers calls."""

    compute: Callable[..., Any]
    """:func:`cqs.attention`, or that of :mod:`cqs.distributed`."""
    dense_mask: Callable[..., Tensor]
    """Makes transformers' own boolean mask ``[batch, 1, seqlen_q, seqlen_kv]``."""
    group: Any
    """The process group, if there is one."""

    @uncompiled
    def attend(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: "_Mask | Tensor | None",
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **asked: Any,
    ) -> tuple[Tensor, None]:
        """Compute one layer.

        Args:
            module: The layer.
            query: ``[batch, num_heads, seqlen_q, head_dim]``.
            key: ``[batch, num_kv_heads, seqlen_kv, head_dim]``.
            value: ``[batch, num_kv_heads, seqlen_kv, value_dim]``.
            attention_mask: What :meth:`mask` returned, a mask of the user's own, or ``None``.
            dropout: Chance that a probability is zeroed.
            scaling: Factor on the scores.
            is_causal: Whether attention without a mask is causal; ``None`` means what the layer
                says.
            asked: Whatever else the layer passes on.

        Returns:
            ``[batch, seqlen_q, num_heads, value_dim]``, and no weights.
        """
        try:
            for name in _NOT_HONOURED:
                if asked.get(name) is not None and asked[name] is not False:
                    raise NotImplementedError(f"{name} is not supported")
            if self.group is not None:
                _check_part(asked, dist.get_rank(self.group))
            lengths = query.shape[2], key.shape[2]
            if isinstance(attention_mask, Tensor):
                pattern = _of_tensor(attention_mask, *lengths)
            elif attention_mask is None:
                if is_causal is None:
                    is_causal = getattr(module, "is_causal", True)
                pattern = _without_mask(lengths, is_causal, asked.get("sliding_window"))
            else:
                pattern = attention_mask.of_layer(lengths, is_causal)
            if (ends := asked.get("cu_seq_lens_q")) is not None:
                pattern = pattern & documents(ends, is_causal=False)
            device = query.device.type
            if torch.is_autocast_enabled(device):
                dtype = torch.get_autocast_dtype(device)
                query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
            compute = partial(self.compute, scale=scaling, dropout_p=dropout)
            if isinstance(pattern, _Stacked):
                compute = partial(_compute_stacked, compute)
            output = compute(query, key, value, pattern=pattern)
        except (NotImplementedError, TypeError, ValueError) as error:
            raise type(error)(f"{_name_of(module)}: {error}") from error
        return output.transpose(1, 2).contiguous(), None

    @uncompiled
    def mask(
        self,
        *,
        batch_size: int,
        q_length: int,
        kv_length: int,
        mask_function: Callable[..., Tensor],
        q_offset: int | Tensor = 0,
        kv_offset: int = 0,
        attention_mask: "Tensor | _Mask | None" = None,
        **options: Any,
    ) -> "_Mask":
        """Return which queries see which keys.

        Args:
            batch_size: Number of sequences.
            q_length: Number of queries.
            kv_length: Number of keys.
            mask_function: Says whether a query sees a key, padding aside.
            q_offset: Position of the first query.
            kv_offset: Position of the first key.
            attention_mask: ``[batch, positions]``, False where there is padding; or what this
                returned before.
            options: Further arguments of transformers' own functions.
        """
        if isinstance(attention_mask, _Mask):
            return attention_mask
        q_offset = int(q_offset)
        visible = _visible_keys(attention_mask, kv_offset, kv_length)
        distance = kv_offset + kv_length - q_offset - q_length
        pattern = _of_function(mask_function, distance, self.group is not None)
        if self.group is not None:
            if visible is None:
                visible = np.ones((batch_size, kv_length), dtype=bool)
            return _Mask(_of_group(self.group, pattern, visible, q_offset))
        if pattern is None:
            mask = self.dense_mask(
                batch_size=batch_size,
                q_length=q_length,
                kv_length=kv_length,
                q_offset=q_offset,
                kv_offset=kv_offset,
                mask_function=mask_function,
                attention_mask=attention_mask,
                **options | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False},
            )
            pattern = _by_batch([from_mask(each[0]) for each in mask])
        elif visible is not None:
            pattern = pattern & _of_padding(visible)
        return _Mask(pattern, _stack(pattern, q_length, kv_length))


@dataclass(frozen=True)
class _Mask:
    """A pattern that stands where transformers has the tensor of a mask."""

    pattern: Pattern
    stacked: "_Stacked | None" = None
    """The same for a batch as one sequence."""
    ndim: int = 4
    """Transformers takes masks of two dimensions for padding, and hands others back."""

    def of_layer(self, lengths: tuple[int, int], is_causal: bool | None) -> Pattern:
        """Return the pattern of a layer with these numbers of queries and keys.

        What is causal and nothing else is so only where the layer does not say that it is not, as
        with transformers' own attention, which then has no mask.
        """
        if is_causal is False and self.pattern == causal() and lengths[0] == lengths[1]:
            return sliding_window(None, None)
        return self.stacked or self.pattern

    def contiguous(self) -> "_Mask":
        """Return itself: ``generate`` asks with caches of fixed size."""
        return self


def _of_function(
    mask_function: Callable[..., Tensor], distance: int, is_part: bool
) -> Pattern | None:
    """Return the pattern of a mask function of transformers, ``None`` for one not known.

    Args:
        mask_function: Of :mod:`transformers.masking_utils`; what it was made from is read from its
            closure.
        distance: From the position of the last query to that of the last key.
        is_part: Whether sequences go on elsewhere, so that packed ones are not known.
    """
    if mask_function.__module__ != "transformers.masking_utils":
        return None
    made_from = inspect.getclosurevars(mask_function).nonlocals
    maker = mask_function.__qualname__.split(".")[0]
    if maker == "bidirectional_mask_function":
        return sliding_window(None, None)
    if maker == "and_masks":
        patterns = [_of_function(each, distance, is_part) for each in made_from["mask_functions"]]
        known = [each for each in patterns if each is not None]
        return reduce(and_, known) if len(known) == len(patterns) else None
    if maker == "packed_sequence_mask_function" and not is_part:
        return _of_sequences(made_from["packed_sequence_mask"])
    if maker == "remap_positions_for_packed_sequence":  # within a sequence distances stay
        return _of_function(made_from["mask_function"], distance, is_part)
    if distance:
        return None
    if maker == "causal_mask_function":
        return causal()
    if maker == "sliding_window_overlay":
        return sliding_window(made_from["sliding_window"] - 1, None)
    if maker == "sliding_window_bidirectional_overlay":
        return sliding_window(made_from["sliding_window"], made_from["sliding_window"])
    return None


def _of_sequences(numbers: Tensor) -> Pattern:
    """Return the pattern of packed sequences.

    Args:
        numbers: Of the sequence that each token belongs to ``[batch, seqlen]``, ascending.
    """
    rows = []
    for row in as_array(numbers):
        starts = np.flatnonzero(np.diff(row)) + 1
        rows.append(documents([0, *starts, len(row)], is_causal=False))
    return _by_batch(rows)


def _visible_keys(
    attention_mask: Tensor | None, kv_offset: int, kv_length: int
) -> NDArray[np.bool_] | None:
    """Return which keys are no padding ``[batch, kv_length]``, ``None`` if all are.

    Positions beyond the mask are padding, as they are in transformers.
    """
    if attention_mask is None:
        return None
    visible = as_array(attention_mask)[:, kv_offset : kv_offset + kv_length]
    visible = np.pad(visible, ((0, 0), (0, kv_length - visible.shape[1])))
    return None if visible.all() else visible


def _of_padding(visible: NDArray[np.bool_]) -> Pattern:
    """Return the pattern of padding, given which keys are none ``[batch, kv_length]``."""
    edges = (np.flatnonzero(np.diff(row, prepend=False, append=False)) for row in visible)
    return _by_batch([_Visible(tuple(map(int, each))) for each in edges])


@dataclass(frozen=True)
class _Visible(Pattern):
    """Every query sees some runs of keys."""

    edges: tuple[int, ...]
    """First key and last + 1 of each run; ascending."""

    def _bind(self, lengths: Lengths) -> BoundPattern:
        queries, keys = lengths.queries(), lengths.keys()
        runs = zip(self.edges[::2], self.edges[1::2], strict=True)
        pieces = [Piece(queries, keys.within_cells(start, stop - 1)) for start, stop in runs]
        return bind_pieces(lengths, pieces)


def _by_batch(rows: Sequence[Pattern]) -> Pattern:
    """Return the pattern of ``rows[batch]`` for all heads."""
    return rows[0] if len(set(rows)) == 1 else per_head([[row] for row in rows])


def _of_tensor(mask: Tensor, q_length: int, kv_length: int) -> Pattern:
    """Return the pattern of a boolean mask, or of one to be added to the scores.

    Args:
        mask: ``[batch, heads, seqlen_q, seqlen_kv]``; 1 stands for all.
        q_length: Number of queries.
        kv_length: Number of keys.
    """
    if mask.ndim != 4:
        raise NotImplementedError(
            f"the mask must be [batch, heads, seqlen_q, seqlen_kv], got {list(mask.shape)}"
        )
    if mask.is_floating_point():
        hidden = mask <= torch.finfo(torch.float16).min
        if not (hidden | (mask == 0)).all():
            raise NotImplementedError(
                "the mask adds to scores more than 0 or the least number of its dtype: "
                "biases are not supported"
            )
        mask = ~hidden
    return from_mask(mask.expand(-1, -1, q_length, kv_length))


def _without_mask(lengths: tuple[int, int], is_causal: bool, window: int | None) -> Pattern:
    """Return the pattern of a layer that has no mask, for its numbers of queries and keys."""
    if window is not None:
        raise NotImplementedError(f"a sliding window of {window} without a mask is not supported")
    q_length, kv_length = lengths
    if not is_causal or q_length == 1:
        return sliding_window(None, None)
    if q_length != kv_length:
        raise NotImplementedError(
            f"causal attention of {q_length} queries to {kv_length} keys without a mask "
            "does not say at which keys the queries are"
        )
    return causal()


def _compute_stacked(
    compute: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: "_Stacked",
) -> Tensor:
    """Compute a batch as one sequence, its elements one after another: one call, not many."""
    stacked = (
        tensor.transpose(1, 2).flatten(0, 1).transpose(0, 1).unsqueeze(0)
        for tensor in (query, key, value)
    )
    output = compute(*stacked, pattern=pattern)
    return output.view(-1, *query.shape[::2], value.shape[3]).transpose(0, 1)


def _stack(pattern: Pattern, q_length: int, kv_length: int) -> "_Stacked | None":
    """Return what is the same for a batch as one sequence, if its elements differ, in pieces."""
    batch, _ = pattern.heads
    rows = tuple(pattern.head(element, 0) for element in range(batch))
    if batch == 1 or any(row.bind(q_length, kv_length).blocks is not None for row in rows):
        return None
    return _Stacked(rows, q_length, kv_length)


@dataclass(frozen=True)
class _Stacked(Pattern):
    """Sequences of equal lengths one after another, each with a pattern of its own."""

    rows: tuple[Pattern, ...]
    q_length: int
    kv_length: int

    def _bind(self, lengths: Lengths) -> BoundPattern:
        return bind_pieces(
            lengths,
            [
                piece._replace(
                    queries=_moved(piece.queries, element * self.q_length),
                    keys=_moved(piece.keys, element * self.kv_length),
                )
                for element, row in enumerate(self.rows)
                for piece in row.bind(self.q_length, self.kv_length).pieces
            ],
        )


def _moved(axis: Axis, by: int) -> Axis:
    tokens = range(axis.tokens.start + by, axis.tokens.stop + by)
    return axis._replace(tokens=tokens, origin=axis.origin + by)


def _of_group(
    group: Any, pattern: Pattern | None, visible: NDArray[np.bool_], q_offset: int
) -> Pattern:
    """Return the pattern of the whole sequence, of which each rank has a part.

    Args:
        group: The process group.
        pattern: That of the mask function; ``None`` for one not known.
        visible: Which keys of this rank are no padding ``[batch, kv_length]``.
        q_offset: Position of this rank's first query in its own part.
    """
    parts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, (pattern, visible, q_offset), group=group)
    patterns, visibles, q_offsets = zip(*parts, strict=True)
    if any(q_offsets):
        raise NotImplementedError("a cache is not supported with a process group")
    if pattern is None or set(patterns) != {pattern}:
        raise NotImplementedError(
            "with a process group masks must be causal, bidirectional or sliding windows, "
            "and sequences not packed"
        )
    visible = np.concatenate(visibles, axis=1)
    return pattern if visible.all() else pattern & _of_padding(visible)


def _check_part(asked: Mapping[str, Any], rank: int) -> None:
    """Raise unless a rank says at which positions of the whole sequence its part is."""
    if asked.get("cu_seq_lens_q") is not None:
        raise NotImplementedError("packed sequences are not supported with a process group")
    position_ids = asked.get("position_ids")
    if rank and position_ids is not None and (position_ids == 0).any():
        raise ValueError(
            f"position_ids of rank {rank} of the group count from 0: pass those of its part of "
            "the whole sequence, and do not pack sequences"
        )


def _name_of(module: torch.nn.Module) -> str:
    """Return what to call a layer: modules do not know their place in the model."""
    index = getattr(module, "layer_idx", None)
    name = type(module).__name__
    return name if index is None else f"{name} of layer {index}"
