"""Convert configurations of DeepSpeed's sparse attention to patterns.

The layouts are those of ``deepspeed.ops.sparse_attention.sparsity_config``, written as affine
pieces and lists of random blocks. As in DeepSpeed, "unidirectional" attention is causal by blocks:
diagonal blocks are full unless the pattern is combined with :func:`~cqs.patterns.causal`.
"""

import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar

import numpy as np

from cqs.arguments import as_bool, as_integer
from cqs.patterns import algebra
from cqs.patterns.bound import BoundPattern, unite
from cqs.patterns.grid import Integers, check_num_blocks
from cqs.patterns.masks import bind_layout
from cqs.patterns.pattern import Lengths, Pattern, per_head
from cqs.patterns.piece import FAR, Axis, Piece
from cqs.patterns.tokens import as_list
from cqs.ranges import overlap

_COMMON: dict[str, Any] = {"block": 16, "different_layout_per_head": False}
_GLOBAL: dict[str, Any] = {"global_block_indices": (0,), "global_block_end_indices": None}
_BIDIRECTIONAL: dict[str, Any] = {"attention": "bidirectional"}
_PARAMETERS: dict[str, dict[str, Any]] = {
    "dense": _COMMON,
    "fixed": _COMMON
    | _BIDIRECTIONAL
    | {"num_local_blocks": 4, "num_global_blocks": 1, "horizontal_global_attention": False}
    | {"num_different_global_patterns": 1},
    "variable": _COMMON
    | _BIDIRECTIONAL
    | _GLOBAL
    | {"num_random_blocks": 0, "local_window_blocks": (4,), "horizontal_global_attention": False},
    "bigbird": _COMMON
    | _BIDIRECTIONAL
    | {"num_random_blocks": 1, "num_sliding_window_blocks": 3, "num_global_blocks": 1},
    "bslongformer": _COMMON | _BIDIRECTIONAL | _GLOBAL | {"num_sliding_window_blocks": 3},
    "local": {"block": 16, "num_sliding_window_blocks": 3, "attention": "unidirectional"},
}
"""The parameters of each mode, with the defaults of its DeepSpeed class."""
_LEAST = {"block": 1, "num_local_blocks": 1, "num_different_global_patterns": 1}
_FLAGS = ("different_layout_per_head", "horizontal_global_attention")
_LISTS = ("local_window_blocks", "global_block_indices", "global_block_end_indices")
_MAX_HEADS = 2**16
_MAX_LISTED = 1024
"""Largest number of windows, global blocks or pieces, which are united one by one."""
_CLASSES = {
    "DenseSparsityConfig": "dense",
    "FixedSparsityConfig": "fixed",
    "VariableSparsityConfig": "variable",
    "BigBirdSparsityConfig": "bigbird",
    "BSLongformerSparsityConfig": "bslongformer",
    "LocalSlidingWindowSparsityConfig": "local",
}
_NOT_IN_FILES = {"bigbird": ("attention",), "bslongformer": ("attention",)}
"""Parameters that DeepSpeed does not read from a configuration file."""


def from_deepspeed(config: Any, num_heads: int | None = None, seed: int = 0) -> Pattern:
    """Return the pattern of a DeepSpeed ``SparsityConfig``, for self-attention of any length.

    Args:
        config: An object of one of DeepSpeed's six classes, or a dict: a configuration file or its
            ``"sparse_attention"`` section. Keys that the mode does not use are ignored, as in
            DeepSpeed. If ``"mode"`` is a class name, the dict holds constructor arguments.
        num_heads: Number of heads; ``None`` means the object's. Required with a dict if layouts
            differ between heads.
        seed: Random seed; random blocks equal those of DeepSpeed after ``random.seed(seed)``.

    Raises:
        TypeError: ``config`` is of another type, or a parameter has the wrong type.
        ValueError: A parameter has a value that DeepSpeed rejects. Limits that depend on the number
            of blocks are checked when the pattern is bound to a length.

    Example:
        >>> from_deepspeed({"mode": "fixed", "block": 64}).density(4096)
        0.296875
    """
    if isinstance(config, Mapping):
        section = config.get("sparse_attention", config)
        if not isinstance(section, Mapping):
            raise TypeError(f"sparse_attention must be a dict, got {section!r}")
        mode, modes = section.get("mode", "fixed"), [*_PARAMETERS, *_CLASSES]
        modes.remove("local")
        if mode not in modes:
            raise ValueError(f"mode must be one of {modes}, got {mode!r}")
        of_file = {} if mode in _CLASSES else {"num_random_blocks": 0}
        unread = _NOT_IN_FILES.get(mode, ())
        given = of_file | {name: section[name] for name in section if name not in unread}
        mode = str(_CLASSES.get(mode, mode))
    else:
        names = [kind.__name__ for kind in type(config).__mro__ if kind.__name__ in _CLASSES]
        if not names:
            raise TypeError(f"config must be a dict or one of {sorted(_CLASSES)}, got {config!r}")
        mode = _CLASSES[names[0]]
        given = {name: getattr(config, name) for name in _PARAMETERS[mode] if hasattr(config, name)}
        num_heads = getattr(config, "num_heads", None) if num_heads is None else num_heads
    parameters = {
        name: _parameter(name, given.get(name, default))
        for name, default in _PARAMETERS[mode].items()
    }
    _check(mode, parameters)
    heads = 1
    if parameters.get("different_layout_per_head"):
        if num_heads is None:
            raise ValueError(
                "num_heads must be given if different_layout_per_head is true, got None"
            )
        heads = as_integer("num_heads", num_heads, 1, _MAX_HEADS)
    items, seed = tuple(parameters.items()), as_integer("seed", seed, 0)
    return per_head([[_DeepSpeed(mode, items, head, seed) for head in range(heads)]])


@dataclass(frozen=True, repr=False)
class _DeepSpeed(Pattern):
    mode: str
    parameters: tuple[tuple[str, Any], ...]
    index: int
    """Index of the head; the random blocks of heads are drawn in order."""
    seed: int

    depends_on_length: ClassVar[bool] = True

    def _bind(self, lengths: Lengths) -> BoundPattern:
        if lengths.seqlen_q != lengths.seqlen_kv:
            raise ValueError(
                f"{self!r} requires self-attention, seqlen_q = seqlen_kv, got {tuple(lengths)}"
            )
        blocks = _BlockPieces(lengths, self.mode, **dict(self.parameters))
        pieces = as_list("the pattern's pieces", blocks.pieces(self.index), _MAX_LISTED)
        bound = BoundPattern(*lengths, tuple(algebra.unite_all(pieces)))
        if not blocks.parameters.get("num_random_blocks"):
            return bound
        layout = blocks.random_layout(random.Random(self.seed), self.index)
        return unite(bound, bind_layout(lengths, *layout, blocks.block))

    def __repr__(self) -> str:
        (name,) = (name for name, mode in _CLASSES.items() if mode == self.mode)
        config = {"mode": name} | dict(self.parameters)
        if not config.get("different_layout_per_head"):
            return f"from_deepspeed({config}, seed={self.seed})"
        heads = f"num_heads={self.index + 1}, seed={self.seed}"
        return f"from_deepspeed({config}, {heads}).head(0, {self.index})"


class _BlockPieces:
    """The pieces of one mode at one length, which may overlap. Arguments count blocks."""

    def __init__(self, lengths: Lengths, mode: str, *, block: int, **parameters: Any) -> None:
        """Check the limits that depend on the number of blocks."""
        self.lengths, self.mode, self.block, self.parameters = lengths, mode, block, parameters
        self.num_blocks = -(-lengths.seqlen_q // block)
        self.is_causal = parameters.get("attention") == "unidirectional"
        for name in ("num_sliding_window_blocks", "num_random_blocks"):
            self._need(name)
        if mode == "bigbird":
            self._need("num_global_blocks")

    def pieces(self, head: int) -> Iterator[Piece]:
        """Yield the live pairs of a head without the random blocks, as pieces."""
        if self.mode == "dense":
            yield self._rectangle(0, self.num_blocks, 0, self.num_blocks)
        elif self.mode == "fixed":
            size = self.parameters["num_local_blocks"]
            yield from self._groups(0, size)
            yield from self._summaries(size, head)
        elif self.mode == "variable":
            start, sizes = 0, self.parameters["local_window_blocks"]
            for size in sizes:
                yield from self._groups(start, size, start + size)
                start += size
            yield from self._groups(start, sizes[-1])
            for run in self._global_runs():
                yield from self._global(*run)
        else:
            side = self.parameters["num_sliding_window_blocks"] // 2
            yield Piece(self._rows(1), self._columns(1), -side, 0 if self.is_causal else side)
            for start, stop in self._global_runs():
                for axes in ((0, self.num_blocks, start, stop), (start, stop, 0, self.num_blocks)):
                    yield from self._past(self._rectangle(*axes))

    def random_layout(self, rng: random.Random, head: int) -> tuple[Integers, Integers]:
        """Draw the random blocks of heads ``0 .. head``; return rows and columns of the last head.

        DeepSpeed draws all heads from one generator, so earlier heads are drawn too.
        """
        everywhere = self.mode == "variable" or not self.is_causal
        number = self.parameters["num_random_blocks"]
        check_num_blocks((head + 1) * self.num_blocks * number * 4)  # drawn one by one: slower
        for _ in range(head + 1):
            drawn: list[list[int]] = []
            for row in range(self.num_blocks):
                choices = range(self.num_blocks if everywhere else row + 1)
                drawn.append(rng.sample(choices, number))
        rows = np.repeat(np.arange(len(drawn)), [len(columns) for columns in drawn])
        return rows, np.array(list(chain(*drawn)), dtype=np.int64)

    def _groups(self, start: int, size: int, stop: int | None = None) -> Iterator[Piece]:
        """Yield the pairs within groups of ``size`` blocks, from ``start`` up to ``stop``."""
        stop = self.num_blocks if stop is None else min(stop, self.num_blocks)
        rows: Iterable[tuple[int, int, int]] = [(0, size, size)]
        if self.is_causal:
            rows = ((row, 1, row + 1) for row in range(min(size, stop - start)))
        for row, height, width in rows:
            queries = self._clip(self._rows(size, start + row, height), start, stop)
            yield Piece(queries, self._clip(self._columns(size, start, width), start, stop), 0, 0)

    def _summaries(self, size: int, head: int) -> Iterator[Piece]:
        """Yield the global columns: the last blocks of each group, or earlier ones by head."""
        width = self.parameters["num_global_blocks"]
        first = size - (1 + head % self.parameters["num_different_global_patterns"]) * width
        whole = self.num_blocks - self.num_blocks % size
        high = 0 if self.is_causal else FAR
        columns = self._clip(self._columns(size, first, width), 0, whole)
        yield Piece(self._rows(size, first), columns, high=high)
        if self.parameters["horizontal_global_attention"]:
            rows = self._clip(self._rows(size, first, width), 0, whole)
            yield Piece(rows, self._columns(size))
        if whole < self.num_blocks:
            start = min(whole + first, self.num_blocks - width)
            yield from self._global(*self._sliced(start, start + width))

    def _global(self, start: int, stop: int) -> Iterator[Piece]:
        """Yield columns that all rows see, or only rows from ``start`` on if causal."""
        yield self._rectangle(start if self.is_causal else 0, self.num_blocks, start, stop)
        if self.parameters["horizontal_global_attention"]:
            yield self._rectangle(start, stop, 0, self.num_blocks)

    def _global_runs(self) -> list[tuple[int, int]]:
        """Return (first block, last + 1) of every run of global blocks.

        Negative indices are counted from the end, as in a DeepSpeed layout.
        """
        if self.mode == "bigbird":
            return [(0, self.parameters["num_global_blocks"])]
        starts = self.parameters.get("global_block_indices", ())
        stops = self.parameters.get("global_block_end_indices")
        if stops is not None:
            return [self._sliced(*run) for run in zip(starts, stops, strict=True)]
        if min(starts, default=0) < -self.num_blocks:
            raise ValueError(
                f"global_block_indices must be at least {-self.num_blocks}, got {list(starts)}"
            )
        blocks = (start % self.num_blocks if start < 0 else start for start in starts)
        return [(block, block + 1) for block in blocks]

    def _sliced(self, start: int, stop: int) -> tuple[int, int]:
        """Return first block and last + 1 of a slice of the blocks."""
        return slice(start, stop).indices(self.num_blocks)[:2]

    def _rows(self, size: int, first: int = 0, height: int | None = None) -> Axis:
        """Return the queries in cells of ``height`` blocks, ``size`` apart, from block ``first``.

        ``None`` means cells without gaps.
        """
        sizes = first, size, size if height is None else height
        return self.lengths.queries(*(self.block * each for each in sizes))

    def _columns(self, size: int, first: int = 0, width: int | None = None) -> Axis:
        """Return the keys in cells of ``width`` blocks, as :meth:`_rows` returns queries."""
        sizes = first, size, size if width is None else width
        return self.lengths.keys(*(self.block * each for each in sizes))

    def _rectangle(self, row: int, row_stop: int, column: int, column_stop: int) -> Piece:
        queries, keys = self.lengths.queries(), self.lengths.keys()
        return Piece(self._clip(queries, row, row_stop), self._clip(keys, column, column_stop))

    def _clip(self, axis: Axis, start: int, stop: int) -> Axis:
        tokens = overlap(axis.tokens, range(start * self.block, stop * self.block))
        return axis._replace(tokens=tokens)

    def _past(self, piece: Piece) -> list[Piece]:
        """Remove blocks above the diagonal if the attention is unidirectional."""
        if not self.is_causal:
            return [piece]
        past = algebra.tidy_all([Piece(self._rows(1), self._columns(1), high=0)])
        return algebra.intersect(algebra.tidy_all([piece]), past)

    def _need(self, name: str) -> None:
        if self.num_blocks < self.parameters.get(name, 0):
            raise ValueError(
                f"{name} must be at most the number of blocks, {self.num_blocks}, "
                f"got {self.parameters[name]}"
            )


def _parameter(name: str, value: Any) -> Any:
    """Return a parameter in its Python type; raise TypeError or ValueError if it is invalid."""
    if name == "attention":
        if value not in ("unidirectional", "bidirectional"):
            raise ValueError(f"attention must be unidirectional or bidirectional, got {value!r}")
        return str(value)
    if name in _FLAGS:
        return as_bool(name, value)
    if name not in _LISTS:
        return as_integer(name, value, _LEAST.get(name, 0))
    if value is None and name == "global_block_end_indices":
        return None
    least = 1 if name == "local_window_blocks" else -sys.maxsize
    return tuple(as_integer(name, each, least) for each in as_list(name, value, _MAX_LISTED))


def _check(mode: str, parameters: dict[str, Any]) -> None:
    """Raise ValueError where DeepSpeed would, and where it would end with another error."""
    if parameters.get("attention") == "unidirectional":
        if parameters.get("horizontal_global_attention"):
            raise ValueError(
                "horizontal_global_attention must be False if attention is unidirectional"
            )
        if mode == "bigbird" and parameters["num_random_blocks"] > 1:
            raise ValueError(
                "num_random_blocks must be at most 1 if attention is unidirectional, got "
                f"{parameters['num_random_blocks']}: the first row has a single block to draw from"
            )
    if parameters.get("local_window_blocks") == ():
        raise ValueError("local_window_blocks must have an element, got []")
    if "num_local_blocks" in parameters:
        local, width = parameters["num_local_blocks"], parameters["num_global_blocks"]
        if not width or local % width:
            raise ValueError(
                f"num_global_blocks must divide num_local_blocks, got {width}, {local}"
            )
        number = parameters["num_different_global_patterns"]
        most = local // width if parameters["different_layout_per_head"] else 1
        if number > most:
            raise ValueError(f"num_different_global_patterns must be at most {most}, got {number}")
    stops = parameters.get("global_block_end_indices")
    if stops is not None:
        starts = parameters["global_block_indices"]
        if len(starts) != len(stops) or any(a >= b for a, b in zip(starts, stops, strict=True)):
            raise ValueError(
                f"global_block_end_indices must be one above each of {list(starts)}, "
                f"got {list(stops)}"
            )
