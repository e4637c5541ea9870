"""Hugging Face diffusers: models with ``set_attention_backend("cqs")``."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig, ModelMixin, ParallelConfig
from diffusers.models import attention_processor
from diffusers.models.attention_dispatch import (
    AttentionBackendName,
    _AttentionBackendRegistry,
    dispatch_attention_fn,
)
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

import cqs.distributed
from cqs.api import attention
from cqs.executors.distributed.agreement import errors_shared
from cqs.executors.operators import made_once
from cqs.integrations import diffusers_parallel, masks
from cqs.patterns import Pattern, from_mask, sliding_window
from cqs.patterns.arrays import as_array
from cqs.patterns.pattern import named_in_graphs
from cqs.problem.tensors import with_four_dimensions
from cqs.worker.backends import check_backend_name

_MASKED = -5000.0
"""A bias below this masks a key out: models use -10000 and the least number of their dtype."""
_registered: set[str] = set()
"""Names of registered attention backends."""


def register(name: str = "cqs", *, backend: str | None = None) -> None:
    """Register cqs as an attention backend of Hugging Face diffusers.

    ``model.set_attention_backend("cqs")`` makes :func:`cqs.attention` compute the attention of a
    model. If ``model.enable_parallelism(config=ContextParallelConfig(...))`` follows, that is
    :func:`cqs.distributed.attention` on all ranks of the configuration, with any number of ranks,
    heads and tokens. The product of the degrees is the number of ranks; their factors do not
    matter. Every rank passes the whole inputs and gets the whole output. If the loss is the same on
    all ranks, the gradient of an input or a parameter is the sum of the ranks' gradients.

    A mask becomes a pattern. It must be boolean, or a bias that is 0 for visible keys and less than
    -5000 for others. Under context parallelism it must be the same for all heads and queries. A
    query that sees no key has output 0.

    This changes diffusers, for models whose backend is cqs:

    - ``enable_parallelism`` supports lengths that the number of ranks does not divide, and ranks
      without GPUs.
    - HunyuanVideo, CogVideoX and Z-Image have plans for context parallelism. Each rank has the
      whole text of LTX-Video.
    - Layers of CogVideoX call the attention backend.

    Args:
        name: Name of the backend, in lower case. It replaces an earlier registration of the name.
        backend: Name of the kernels; ``None`` selects them, see :func:`cqs.attention`.

    Raises:
        ValueError: diffusers has another attention backend of that name.

    Example:
        >>> from diffusers.models.attention_dispatch import attention_backend
        >>> register()
        >>> query, key, value = torch.randn(3, 1, 50, 4, 16)
        >>> expected = dispatch_attention_fn(query, key, value)
        >>> with attention_backend("cqs"):
        ...     output = dispatch_attention_fn(query, key, value)
        >>> torch.allclose(output, expected, atol=1e-5)
        True
    """
    check_backend_name(backend)
    if name not in _registered:
        if name in AttentionBackendName._value2member_map_ or name != name.lower():
            raise ValueError(
                f"name must be in lower case and not a backend of diffusers, got {name!r}"
            )
        _add_member(AttentionBackendName, name)
        if not _registered:
            ModelMixin.enable_parallelism = _with_any_length(ModelMixin.enable_parallelism)
        _registered.add(name)
    member = AttentionBackendName(name)
    add = _AttentionBackendRegistry.register(member, supports_context_parallel=True)
    add(_make_backend(backend))
    for processor in ("CogVideoXAttnProcessor2_0", "FusedCogVideoXAttnProcessor2_0"):
        processor_class = getattr(attention_processor, processor)
        if not hasattr(processor_class, "_attention_backend"):
            processor_class._attention_backend = processor_class._parallel_config = None
            processor_class.__call__ = _with_dispatch(processor_class.__call__)


def _add_member(enum: Any, value: str) -> None:
    """Add a member to an enumeration of strings, which has no public way to do so."""
    member = str.__new__(enum, value)
    member._name_, member._value_ = value.upper(), value
    setattr(enum, member._name_, member)
    enum._member_names_.append(member._name_)
    enum._member_map_[member._name_] = enum._value2member_map_[value] = member


def _make_backend(kernels: str | None) -> Callable[..., Tensor]:
    """Return the function of an attention backend of diffusers."""

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        _parallel_config: Any = None,
    ) -> Tensor:
        """Compute one layer; the parameters are those of ``dispatch_attention_fn``.

        Args:
            query: ``[batch, seqlen_q, num_heads, head_dim]``; with context parallelism the tokens
                of this rank, as key and value.
            key: ``[batch, seqlen_kv, num_kv_heads, head_dim]``.
            value: ``[batch, seqlen_kv, num_kv_heads, value_dim]``.
            attn_mask: See :func:`_read_mask`.
            dropout_p: Probability that an attention weight is zeroed.
            is_causal: Whether query i sees only keys up to i.
            scale: Factor on the scores; ``None`` means ``head_dim ** -0.5``.
            enable_gqa: Ignored: ``num_heads`` may always be a multiple of ``num_kv_heads``.
            _parallel_config: The ``ParallelConfig`` of the model, or ``None``.

        Returns:
            The output, ``[batch, seqlen_q, num_heads, value_dim]``.

        Raises:
            NotImplementedError: ``attn_mask`` or ``is_causal`` is not supported.
            TypeError: ``attn_mask`` or the tensors have an unsupported dtype.
            ValueError: ``attn_mask`` or the tensors do not fit together, or ranks differ.
        """
        compute: Callable[..., Any] = attention
        group = None
        if _parallel_config is not None:
            group = _parallel_config.context_parallel_config._flattened_mesh.get_group()
            compute = partial(cqs.distributed.attention, group=group)
        batch, seqlen_q, num_heads, _ = query.shape
        sizes = batch, num_heads, seqlen_q, key.shape[1]
        if is_causal and (group is not None or seqlen_q != key.shape[1]):
            raise NotImplementedError(
                "is_causal must be False under context parallelism, and for unequal lengths, got "
                f"True for {seqlen_q} queries and {key.shape[1]} keys"
            )
        pattern = None
        if attn_mask is not None:
            name = "" if group is None else group.group_name
            pattern = made_once(_read_mask, attn_mask, name, *sizes)
        output: Tensor = compute(
            *(tensor.transpose(1, 2) for tensor in (query, key, value)),
            pattern=pattern,
            dropout_p=dropout_p,
            is_causal=is_causal,
            scale=scale,
            backend=kernels,
        )
        return output.transpose(1, 2)

    return attend


@named_in_graphs
def _read_mask(mask: Tensor, group_name: str, *sizes: int) -> Pattern:
    """Return the pattern of a mask; with a group, that of the keys of all its ranks.

    Args:
        mask: Boolean or additive mask that broadcasts to ``[batch, heads, seqlen_q, seqlen_kv]``,
            or ``[batch, seqlen_kv]``. With a group its keys are those of this rank.
        group_name: Name of the process group over whose ranks the keys are sharded, or empty:
            ``torch.compile`` passes names of groups, not groups.
        sizes: Numbers of batch elements, heads, queries and keys of this rank.

    Raises:
        NotImplementedError: The mask adds a bias, or differs between queries or heads of a group.
        TypeError: The mask is neither boolean nor floating-point.
        ValueError: The mask does not fit the lengths.
    """
    if not group_name:
        visible = _visible(mask, sizes)
        key_mask = _reduce_to_keys(visible)
        if key_mask is None:
            return from_mask(visible.expand(-1, -1, *sizes[2:]))
        return masks.mask_padding(as_array(key_mask))
    group = dist.distributed_c10d._resolve_process_group(group_name)  # type: ignore[arg-type]
    with errors_shared(group):
        key_mask = _reduce_to_keys(_visible(mask, sizes, is_shard=True))
        if key_mask is None:
            raise NotImplementedError(
                "attn_mask must be the same for all queries and heads under context parallelism, "
                f"got different rows in a mask {list(mask.shape)}"
            )
    everything = sliding_window(None, None)
    return masks.gather_mask(group, everything, as_array(key_mask), 0, is_padded=True).pattern


def _visible(mask: Tensor, sizes: Sequence[int], *, is_shard: bool = False) -> Tensor:
    """Return a mask as a boolean tensor, ``[1 or batch, 1 or heads, 1 or seqlen_q, seqlen_kv]``."""
    batch, _, _, seqlen_kv = sizes
    if mask.shape == (batch, seqlen_kv):
        mask = mask[:, None, None]
    mask = with_four_dimensions("attn_mask", mask, sizes).expand(-1, -1, -1, seqlen_kv)
    if mask.dtype == torch.bool or not seqlen_kv:
        return mask.bool()
    if not mask.is_floating_point():
        raise TypeError(f"attn_mask must be boolean or floating-point, got {mask.dtype}")
    bias = mask
    if not is_shard:  # adding a number to all scores of a row does not change its softmax
        bias = mask - mask.amax(-1, keepdim=True).clamp(min=torch.finfo(mask.dtype).min)
    between = bias[(bias != 0) & ~(bias < _MASKED)]
    if len(between):
        raise NotImplementedError(
            f"attn_mask must be boolean or a bias of 0 and below {_MASKED}, got "
            f"{between.max().item()}: cqs does not support a bias on the scores"
        )
    return bias == 0


def _reduce_to_keys(visible: Tensor) -> Tensor | None:
    """Return a mask as ``[batch, keys]``, or ``None`` if it differs between queries or heads."""
    first = visible[:, :1, :1]
    return first[:, 0, 0] if bool((visible == first).all()) else None


class _Dispatched(TorchFunctionMode):
    """Sends PyTorch's attention to the dispatcher of diffusers, with a processor's settings."""

    def __init__(self, processor: Any) -> None:
        super().__init__()
        self._processor = processor

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        output = dispatch_attention_fn(
            *(tensor.transpose(1, 2) for tensor in args),
            **kwargs,
            backend=self._processor._attention_backend,
            parallel_config=self._processor._parallel_config,
        )
        return output.transpose(1, 2)


def _with_dispatch(call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def dispatching(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _Dispatched(self) if _uses_cqs(self) else nullcontext():
            return call(self, *args, **kwargs)

    return dispatching


def _with_any_length(enable: Callable[..., None]) -> Callable[..., None]:
    """Return ``enable_parallelism`` for shards of any length if layers use cqs."""

    @wraps(enable)
    def enable_parallelism(self: Any, *, config: Any, cp_plan: Any = None) -> None:
        if isinstance(config, ContextParallelConfig):
            config = ParallelConfig(context_parallel_config=config)
        is_context = getattr(config, "context_parallel_config", None) is not None
        layers = [*diffusers_parallel.attention_layers(self)]

        def uses_cqs() -> bool:
            return any(_uses_cqs(layer.processor) for layer in layers)

        if is_context and uses_cqs() and self._parallel_config is None:
            diffusers_parallel.enable_parallelism(self, config, cp_plan, uses_cqs)
        elif is_context and not uses_cqs() and not torch.accelerator.is_available():
            name = next(iter(_registered))
            raise ValueError(
                "the attention backend must be of cqs for context parallelism without GPUs: call "
                f"model.set_attention_backend({name!r}) before model.enable_parallelism"
            )
        else:
            enable(self, config=config, cp_plan=cp_plan)

    return enable_parallelism


def _uses_cqs(processor: Any) -> bool:
    active = _AttentionBackendRegistry._active_backend
    return (processor._attention_backend or active) in _registered
