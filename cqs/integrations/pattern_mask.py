"""A tensor subclass that represents an attention mask by its pattern."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from cqs.integrations.masks import Stacked
from cqs.patterns import Pattern, causal
from cqs.uncompiled import uncompiled

_aten = torch.ops.aten


class KnownMask(NamedTuple):
    """The pattern of a mask that nothing has changed, and its properties that layers read."""

    pattern: Pattern
    is_stacked: bool
    """Whether it is the pattern of the batch elements one after another."""
    is_causal: bool
    """Whether it is the causal pattern alone."""


@dataclass(eq=False)
class MaskSource:
    """The content of a :class:`PatternMask`, shared by its aliases."""

    make_pattern: Callable[[], Pattern]
    """Returns the pattern of the visible pairs."""
    make_dense: Callable[[], Tensor]
    """Returns the mask as an ordinary boolean tensor."""
    dense: Tensor | None = None
    """The ordinary tensor, once an operation has read it; in-place operations may change it."""

    num_tokens: int | None = None
    """Number of tokens of all ranks of a process group, or ``None`` without a group."""
    may_be_packed: bool = False
    """Whether positions of the ranks of a group may be those of packed sequences."""
    has_packed: bool = False
    """Whether transformers has found packed sequences in this rank's shard of a sequence."""
    packed: Pattern | None = None
    """Packed sequences of all ranks of a group, once ``may_be_packed`` is resolved."""

    @cached_property
    def pattern(self) -> Pattern:
        """The visible pairs, valid as long as ``dense`` is ``None``."""
        return self.make_pattern()

    @cached_property
    def known(self) -> "KnownMask":
        """The pattern as a layer reads it, valid as long as ``dense`` is ``None``."""
        return KnownMask(self.pattern, isinstance(self.pattern, Stacked), self.pattern == causal())

    def read(self) -> Tensor:
        """Return the ordinary tensor, allocated on the first call."""
        if self.dense is None:
            self.dense = self.make_dense()
        return self.dense


class PatternMask(Tensor):
    """A boolean mask ``[batch, 1, seqlen_q, seqlen_kv]``, ``True`` for visible pairs.

    Attention reads the pattern, so the mask allocates no memory. Every other PyTorch operation
    gets the ordinary tensor, which the first such operation allocates. From then on attention
    reads that tensor too, because an in-place operation or a view may change it. Added to
    floating-point scores, it masks scores out as transformers' additive masks do.
    """

    source: MaskSource

    @staticmethod
    def __new__(
        cls, shape: tuple[int, ...], device: torch.device, source: MaskSource
    ) -> "PatternMask":
        """Create a mask.

        Args:
            shape: Shape of the tensor that ``source`` makes.
            device: Device of the tensor that ``source`` makes.
            source: The functions that make the pattern and the ordinary tensor.
        """
        mask = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        mask.source = source
        return mask

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    @uncompiled
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operation on the ordinary tensors; copies and aliases keep the pattern."""
        kwargs = kwargs or {}
        # In inference mode ``to`` arrives whole; elsewhere only as ``_to_copy``, if at all.
        result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        first = args[0] if args else None
        if isinstance(first, cls):
            if func in (_aten.alias.default, _aten.detach.default):
                return cls(first.shape, first.device, first.source)
            dtype, device = kwargs.get("dtype"), kwargs.get("device") or first.device
            if (
                func in (_aten.clone.default, _aten._to_copy.default)
                and dtype in (None, torch.bool)
                and first.source.dense is None
            ):
                source = first.source
                copy = replace(
                    source,
                    make_pattern=lambda: source.pattern,
                    make_dense=lambda: source.make_dense().to(device),
                )
                return cls(first.shape, device, copy)
        is_sum = func in (_aten.add.Tensor, _aten.add_.Tensor)
        read = partial(_read, dtype=torch.result_type(*args) if is_sum else torch.bool)
        return func(*tree_map_only(cls, read, args), **tree_map_only(cls, read, kwargs))

    def __copy__(self) -> "PatternMask":
        """Return an alias, which keeps the pattern."""
        return PatternMask(self.shape, self.device, self.source)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return the state of the ordinary tensor for pickles and other processes."""
        return self.source.read().__reduce_ex__(protocol)

    def numpy(self, *, force: bool = False) -> Any:
        """Return the ordinary tensor as an array."""
        return self.source.read().numpy(force=force)

    def tolist(self) -> Any:
        """Return the ordinary tensor as nested lists."""
        return self.source.read().tolist()

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the memory of the ordinary tensor."""
        return self.source.read().untyped_storage()

    def __dlpack__(self, **options: Any) -> Any:
        """Return the memory of the ordinary tensor for other libraries."""
        return self.source.read().__dlpack__(**options)

    def __repr__(self) -> str:  # type: ignore[override]
        """Return the shape, without allocating the ordinary tensor."""
        return f"PatternMask(shape={tuple(self.shape)})"


def _read(mask: PatternMask, dtype: torch.dtype) -> Tensor:
    """Return the ordinary mask: an additive one, as transformers' ``eager_mask``, for floats."""
    visible = mask.source.read()
    return as_added(visible, dtype) if dtype.is_floating_point else visible


def as_added(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a boolean mask as eager attention adds it to scores."""
    return torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, torch.finfo(dtype).min)
