"""DeepSpeed's sparse attention: its configurations, read as patterns.

The layouts are those of ``deepspeed.ops.sparse_attention.sparsity_config``, block by block. Like
them a "unidirectional" one is so by blocks: blocks on the diagonal are whole unless the pattern is
combined with :func:`~cqs.patterns.causal`.
"""

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from cqs.patterns.bound import BoundPattern
from cqs.patterns.masks import bind_layout
from cqs.patterns.pattern import Lengths, Pattern, per_head
from cqs.scheduler.arguments import as_integer

Layout = NDArray[np.bool_]

_COMMON: dict[str, Any] = {"block": 16, "different_layout_per_head": False}
_GLOBAL: dict[str, Any] = {"global_block_indices": (0,), "global_block_end_indices": None}
_BOTH_WAYS: dict[str, Any] = {"attention": "bidirectional"}
_PARAMETERS: dict[str, dict[str, Any]] = {
    "dense": _COMMON,
    "fixed": _COMMON
    | _BOTH_WAYS
    | {"num_local_blocks": 4, "num_global_blocks": 1, "horizontal_global_attention": False}
    | {"num_different_global_patterns": 1},
    "variable": _COMMON
    | _BOTH_WAYS
    | _GLOBAL
    | {"num_random_blocks": 0, "local_window_blocks": (4,), "horizontal_global_attention": False},
    "bigbird": _COMMON
    | _BOTH_WAYS
    | {"num_random_blocks": 1, "num_sliding_window_blocks": 3, "num_global_blocks": 1},
    "bslongformer": _COMMON | _BOTH_WAYS | _GLOBAL | {"num_sliding_window_blocks": 3},
    "local": _COMMON | {"num_sliding_window_blocks": 3, "attention": "unidirectional"},
}
"""What each mode reads, and the defaults of its class."""
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
    """The pattern of a DeepSpeed ``SparsityConfig``, for self-attention of any length.

    Args:
        config: An object of one of the six classes, known by its class name and attributes; or the
            ``"sparse_attention"`` section of a configuration file, or the whole file, as a dict.
            Keys that its mode does not read are ignored, as DeepSpeed does.
        num_heads: Number of heads; ``None`` takes that of the object. A file has none, and needs
            one if layouts differ by head.
        seed: Random blocks are those that DeepSpeed draws right after ``random.seed(seed)``.

    Raises:
        TypeError: if it is none of these.
        ValueError: if a parameter has a value that DeepSpeed refuses.

    Example:
        >>> from_deepspeed({"mode": "fixed", "block": 64}).density(4096)
        0.296875
    """
    if isinstance(config, Mapping):
        section = config.get("sparse_attention", config)
        mode = section.get("mode", "fixed")
        if mode not in set(_PARAMETERS) - {"local"}:
            raise ValueError(
                f"mode must be one of {sorted(set(_PARAMETERS) - {'local'})}, got {mode!r}"
            )
        given = {name: section[name] for name in _PARAMETERS[mode] if name in section}
        for name in _NOT_IN_FILES.get(mode, ()):
            given.pop(name, None)
        given.setdefault("num_random_blocks", 0)
    else:
        names = [kind.__name__ for kind in type(config).__mro__ if kind.__name__ in _CLASSES]
        if not names:
            raise TypeError(f"config must be a dict or one of {sorted(_CLASSES)}, got {config!r}")
        mode = _CLASSES[names[0]]
        given = {name: getattr(config, name) for name in _PARAMETERS[mode] if hasattr(config, name)}
        num_heads = getattr(config, "num_heads", None) if num_heads is None else num_heads
    parameters = {name: given.get(name, default) for name, default in _PARAMETERS[mode].items()}
    _check(parameters)
    heads = 1
    if parameters["different_layout_per_head"]:
        if num_heads is None:
            raise ValueError("num_heads is needed: layouts differ by head")
        heads = as_integer("num_heads", num_heads, 1)
    items = tuple((name, _frozen(value)) for name, value in parameters.items())
    seed = as_integer("seed", seed, 0)
    return per_head([[_DeepSpeed(mode, items, heads, head, seed) for head in range(heads)]])


@dataclass(frozen=True, repr=False)
class _DeepSpeed(Pattern):
    mode: str
    parameters: tuple[tuple[str, Any], ...]
    num_layouts: int
    """How many heads have a layout of their own; random ones are drawn one after another."""
    index: int
    """Which of them this is."""
    seed: int

    depends_on_length: ClassVar[bool] = True

    def _bind(self, lengths: Lengths) -> BoundPattern:
        if lengths.seqlen_q != lengths.seqlen_kv:
            raise ValueError(f"{self!r} is for self-attention, got lengths {tuple(lengths)}")
        block = dict(self.parameters)["block"]
        num_blocks = -(-lengths.seqlen_q // block)
        layouts = _make_layouts(self.mode, self.parameters, num_blocks, self.num_layouts, self.seed)
        return bind_layout(lengths, layouts[self.index], block)

    def __repr__(self) -> str:
        parameters = {"mode": self.mode} | dict(self.parameters)
        head = f".head(0, {self.index})" if self.num_layouts > 1 else ""
        return f"from_deepspeed({parameters}, seed={self.seed}){head}"


@lru_cache(maxsize=4)
def _make_layouts(
    mode: str, parameters: tuple[tuple[str, Any], ...], num_blocks: int, number: int, seed: int
) -> list[Layout]:
    """Make the layouts of all heads ``[num_blocks, num_blocks]`` each."""
    maker = _Layouts(num_blocks, random.Random(seed), **dict(parameters))
    return [getattr(maker, mode)(head) for head in range(number)]


class _Layouts:
    """One mode's layouts; parameters are attributes."""

    def __init__(self, num_blocks: int, rng: random.Random, **parameters: Any) -> None:
        self.num_blocks = num_blocks
        self.rng = rng
        self.parameters = parameters
        self.is_causal = parameters.get("attention") == "unidirectional"
        self.rows, self.columns = np.ogrid[:num_blocks, :num_blocks]

    def dense(self, head: int) -> Layout:
        return np.ones((self.num_blocks, self.num_blocks), dtype=bool)

    def fixed(self, head: int) -> Layout:
        """Groups of local blocks; the last of each, or for other heads those before, are global."""
        size, width = self.parameters["num_local_blocks"], self.parameters["num_global_blocks"]
        layout = self._groups([size])
        first = size - (1 + head % self.parameters["num_different_global_patterns"]) * width
        whole = self.num_blocks - self.num_blocks % size
        starts = list(range(first, whole, size))
        if whole < self.num_blocks:
            starts.append(max(min(whole + first, self.num_blocks - width), 0))
        self._add_global(layout, [(start, start + width) for start in starts])
        return layout

    def variable(self, head: int) -> Layout:
        """Groups of given sizes, given global blocks and random blocks."""
        layout = self._random(everywhere=True) | self._groups(
            self.parameters["local_window_blocks"]
        )
        self._add_global(layout, self._given_global())
        return layout

    def bigbird(self, head: int) -> Layout:
        """A window, the first blocks global both ways, and random blocks."""
        layout = self._random(everywhere=not self.is_causal) | self._window()
        self._need("num_global_blocks")
        width = self.parameters["num_global_blocks"]
        return self._past(layout | (self.rows < width) | (self.columns < width))

    def bslongformer(self, head: int) -> Layout:
        """A window and given blocks, global both ways."""
        layout = self._window()
        for start, stop in self._given_global():
            layout[start:stop] = layout[:, start:stop] = True
        return self._past(layout)

    def local(self, head: int) -> Layout:
        """A window."""
        return self._past(self._window())

    def _groups(self, sizes: Iterable[int]) -> Layout:
        """Blocks of one group; the last size goes on."""
        sizes = list(sizes)
        group = np.repeat(np.arange(len(sizes)), sizes)[: self.num_blocks]
        rest = np.arange(self.num_blocks - len(group)) // sizes[-1] + len(sizes)
        group = np.concatenate([group, rest])
        return self._past(group[:, None] == group[None, :])

    def _window(self) -> Layout:
        self._need("num_sliding_window_blocks")
        side = self.parameters["num_sliding_window_blocks"] // 2
        near: Layout = abs(self.rows - self.columns) <= side
        return near

    def _random(self, *, everywhere: bool) -> Layout:
        self._need("num_random_blocks")
        layout = np.zeros((self.num_blocks, self.num_blocks), dtype=bool)
        for row in range(self.num_blocks):
            choices = range(self.num_blocks if everywhere else row + 1)
            number = min(self.parameters["num_random_blocks"], len(choices))
            layout[row, self.rng.sample(choices, number)] = True
        return layout

    def _given_global(self) -> list[tuple[int, int]]:
        starts = self.parameters["global_block_indices"]
        stops = self.parameters["global_block_end_indices"]
        stops = [start + 1 for start in starts] if stops is None else stops
        return [pair for pair in zip(starts, stops, strict=True) if pair[0] < self.num_blocks]

    def _add_global(self, layout: Layout, runs: Iterable[tuple[int, int]]) -> None:
        """Let the rows, of causal layouts those from the block on, see global columns."""
        for start, stop in runs:
            layout[start if self.is_causal else 0 :, start:stop] = True
            if self.parameters["horizontal_global_attention"]:
                layout[start:stop] = True

    def _past(self, layout: Layout) -> Layout:
        return layout & (self.columns <= self.rows) if self.is_causal else layout

    def _need(self, name: str) -> None:
        if self.num_blocks < self.parameters[name]:
            raise ValueError(
                f"{name} must be at most the number of blocks, {self.num_blocks}, "
                f"got {self.parameters[name]}"
            )


def _check(parameters: dict[str, Any]) -> None:
    """Raise ValueError where DeepSpeed would."""
    as_integer("block", parameters["block"], 1)
    attention = parameters.get("attention", "bidirectional")
    if attention not in ("unidirectional", "bidirectional"):
        raise ValueError(f"attention must be unidirectional or bidirectional, got {attention!r}")
    if attention == "unidirectional" and parameters.get("horizontal_global_attention"):
        raise ValueError("horizontal_global_attention must be False if attention is unidirectional")
    if "num_local_blocks" in parameters:
        local, width = parameters["num_local_blocks"], parameters["num_global_blocks"]
        if local % width:
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


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
