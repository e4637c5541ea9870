"""Hugging Face transformers: models with ``attn_implementation="cqs"``."""

import inspect
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import cqs.distributed
from cqs.api import attention
from cqs.executors.distributed.agreement import errors_shared
from cqs.integrations import graph_masks, masks, own_attention
from cqs.integrations.pattern_mask import KnownMask, MaskSource, PatternMask, as_added
from cqs.patterns import Pattern, documents, from_mask, sliding_window
from cqs.problem.scores import Scores
from cqs.uncompiled import replaced_in_graphs, uncompiled
from cqs.worker.backends import check_backend_name

_NOT_HONOURED = ("block_indices", "cache", "head_mask", "sinks")
"""Arguments of layers, besides a mask, that change the result and are not supported."""
_NOT_SHARDED = ("indices", "output_attentions", "position_bias")
"""Those that are not supported with a process group."""
_MIXERS = "mamba", "ssm_", "linear_", "conv_"
"""Beginnings of the names of options of models whose layers mix tokens without attention."""
_WHOLE = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
"""Arguments of transformers' mask function, which then returns a mask in every case."""


def register(
    name: str = "cqs",
    *,
    cluster: "cqs.Cluster | None" = None,
    group: "dist.ProcessGroup | None" = None,
    num_tasks: int | None = None,
    backend: str | None = None,
    reproducible: bool = False,
) -> None:
    """Register cqs as an ``attn_implementation`` of Hugging Face transformers.

    It supports models that use transformers' ``AttentionInterface``: causal or non-causal, with
    GQA, sliding windows, padding, packed sequences, caches, attention sinks, soft caps, biases and
    dropout. Masks become patterns. A mask function of transformers becomes a few integers; any
    other mask becomes a block list, and a bias if it has other values than those of an additive
    mask. Code of a model that reads or changes the mask gets an ordinary boolean tensor. A query
    that sees no key, as in padding on the left, has output 0.

    Layers of BLOOM, MPT and Falcon are supported too. Other layers that do not use the interface
    keep their own attention. ``set_attn_implementation`` logs transformers' warning about a model
    without layers that use it.

    Unsupported arguments of a layer raise an error that names the layer when the model is called,
    such as a paged cache. If a layer's attention weights are an output, ``output_attentions``, the
    model's eager attention computes the layer, with a warning.

    Args:
        name: Name to register; it replaces an earlier registration of the same name. Several names
            may be registered.
        cluster: A :class:`cqs.Cluster` whose workers compute every layer; ``None`` computes in this
            process.
        group: Process group for context parallelism, such as ``torch.distributed.group.WORLD``.
            Each rank calls the model with its contiguous shard of every sequence, see
            :func:`cqs.distributed.attention`, with its ``position_ids`` in the whole sequence, and
            with its shard of the padding mask. For packed sequences pass this rank's shard of
            their ``position_ids``, which begin anew in every sequence, or ``cu_seq_lens_q`` of the
            sequences of all ranks. Caches are not supported.
        num_tasks: Number of tasks, see :func:`cqs.attention`. Supported with ``group`` only if
            ``reproducible``.
        backend: Name of a backend; ``None`` selects one, see :func:`cqs.attention`.
        reproducible: Whether results are bitwise identical on every executor, see
            :func:`cqs.attention`.

    Raises:
        ImportError: transformers is not installed, or has no ``AttentionInterface``.
        ValueError: ``group`` is given together with ``cluster`` or ``num_tasks``.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> register()
        >>> config = BertConfig(hidden_size=32, num_attention_heads=2, num_hidden_layers=1)
        >>> config._attn_implementation = "cqs"
        >>> BertModel(config)(torch.tensor([[1, 2, 3]])).last_hidden_state.shape
        torch.Size([1, 3, 32])
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import eager_mask, sdpa_mask
    except ImportError as error:
        message = "transformers must be 5.4 or later: pip install 'transformers>=5.4'"
        raise ImportError(message) from error
    check_backend_name(backend)
    if group is not None and not (cluster is None and (num_tasks is None or reproducible)):
        raise ValueError(
            "cluster and num_tasks must be None with a process group, "
            f"got {cluster!r} and {num_tasks!r}"
        )
    local: Any = attention if cluster is None else cluster.attention
    execute = local if group is None else partial(cqs.distributed.attention, group=group)
    options = {"num_tasks": num_tasks, "backend": backend, "reproducible": reproducible or None}
    compute = partial(execute, **{name: o for name, o in options.items() if o is not None})
    implementation = _Implementation(compute, sdpa_mask, group)
    attend = implementation.attend
    mask = replaced_in_graphs(implementation.mask_in_graph, lambda: 0)(implementation.mask)
    if not group is cluster is None:
        attend, mask = uncompiled(attend), uncompiled(implementation.mask)
    make_mask = own_attention.with_eager_masks(mask, eager_mask) if group is None else mask
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, make_mask)
    own_attention.register(name, attend)


@dataclass(frozen=True)
class _Implementation:
    """The attention function and the mask function that transformers calls for a name."""

    compute: "partial[Any]"
    """:func:`cqs.attention` or :func:`cqs.distributed.attention`, with options."""
    dense_mask: Callable[..., Any]
    """Makes transformers' own boolean mask, ``[batch, 1, seqlen_q, seqlen_kv]``."""
    group: Any
    """The process group, or ``None``."""

    def attend(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **asked: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute one layer.

        Args:
            module: The layer.
            query: ``[batch, num_heads, seqlen_q, head_dim]``.
            key: ``[batch, num_kv_heads, seqlen_kv, head_dim]``.
            value: ``[batch, num_kv_heads, seqlen_kv, value_dim]``.
            attention_mask: A mask of :meth:`mask`, of the model or of the user, ``[batch, heads,
                seqlen_q, seqlen_kv]``, or ``None``.
            dropout: Probability that an attention weight is zeroed.
            scaling: Factor on the scores; ``None`` means ``head_dim ** -0.5``.
            is_causal: Whether attention without a mask is causal; ``None`` uses the ``is_causal``
                attribute of the layer.
            asked: Further keyword arguments of the layer.

        Returns:
            The output, ``[batch, seqlen_q, num_heads, value_dim]``, and the attention weights,
            ``None`` unless the layer asks for them.

        Raises:
            NotImplementedError: An argument of the layer is not supported.
            TypeError: Tensors have an unsupported dtype.
            ValueError: The mask does not fit the tensors, or ranks differ.
        """
        lengths = query.shape[2], key.shape[2]
        try:
            if self.group is None and asked.get("output_attentions"):
                eager, mask = _eager_of(module), attention_mask
                if mask is not None and mask.dtype == torch.bool:
                    mask = as_added(mask, query.dtype)
                asked |= {"dropout": dropout, "scaling": scaling}
                return eager(module, query, key, value, mask, **asked)
            with self._errors_shared:
                pattern, bias = self._pattern_of(module, lengths, attention_mask, is_causal, asked)
            if self.group is not None and (packed := self._packed(attention_mask, asked)):
                pattern = pattern & packed
            scores = Scores(asked.get("s_aux"), asked.get("softcap"), bias=bias)
            compute = partial(self.compute, scale=scaling, dropout_p=dropout, scores=scores)
            known, indices = _known_mask(attention_mask, lengths), asked.get("indices")
            if known is not None and known.is_stacked:
                if bias is indices is None and "reproducible" not in self.compute.keywords:
                    compute = partial(_compute_stacked, compute)
                else:
                    pattern = graph_masks.unstacked(pattern)
            if indices is not None:
                pattern = pattern & masks.indexed_keys(indices, key.shape[2])
            output = compute(query, key, value, pattern=pattern)
        except (NotImplementedError, TypeError, ValueError) as error:
            name = f"{type(module).__name__} of layer {getattr(module, 'layer_idx', None)}"
            raise type(error)(f"{name}: {error}") from error
        return output.transpose(1, 2).contiguous(), None

    def _pattern_of(
        self,
        module: torch.nn.Module,
        lengths: tuple[int, int],
        attention_mask: Tensor | None,
        is_causal: bool | None,
        asked: Mapping[str, Any],
    ) -> tuple[Pattern, Tensor | None]:
        """Return pattern and bias; raise NotImplementedError for unsupported arguments."""
        if self.group is not None:
            _check_part(asked, attention_mask)
        for name in _NOT_HONOURED + (_NOT_SHARDED if self.group is not None else ()):
            if asked.get(name) is not None and asked[name] is not False:
                raise NotImplementedError(f"{name} is not supported")
        bias: Tensor | None = None
        if is_causal is False and attention_mask is not None and _sets_is_causal(type(module)):
            is_causal = None
        known = _known_mask(attention_mask, lengths)
        if known is not None:
            pattern = known.pattern
            # Transformers' sdpa has no mask then, and asks the layer.
            if is_causal is False and known.is_causal and lengths[0] == lengths[1]:
                pattern = sliding_window(None, None)
        elif attention_mask is not None:
            if self.group is not None:
                raise NotImplementedError(
                    "attention_mask must be the padding mask, [batch, positions], with a process "
                    f"group, got {list(attention_mask.shape)}"
                )
            pattern, bias = masks.split_mask(attention_mask, *lengths)
        else:
            if is_causal is None:
                is_causal = getattr(module, "is_causal", True)
            pattern = masks.without_mask(lengths, is_causal, asked.get("sliding_window"))
        if (ends := asked.get("cu_seq_lens_q")) is not None:
            pattern = pattern & documents(ends, is_causal=False)
        if (added := asked.get("position_bias")) is not None:
            bias = added if bias is None else bias + added
        return pattern, bias

    def _packed(self, attention_mask: Tensor | None, asked: Mapping[str, Any]) -> Pattern | None:
        """Return the packed sequences of all ranks by their positions, found once per mask."""
        position_ids = asked.get("position_ids")
        if position_ids is None or position_ids.ndim != 2 or asked.get("cu_seq_lens_q") is not None:
            return None
        if not isinstance(attention_mask, PatternMask):
            return masks.gather_documents(self.group, position_ids)
        source = attention_mask.source
        if source.may_be_packed:
            source.packed = masks.gather_documents(self.group, position_ids)
            source.may_be_packed = False
        return source.packed

    @property
    def _errors_shared(self) -> AbstractContextManager[None]:
        return nullcontext() if self.group is None else errors_shared(self.group)

    def mask(self, **options: Any) -> PatternMask:
        """Return the mask that a model passes to its layers; see :meth:`_make_mask`."""
        return self._make_mask(partial(self.dense_mask, **options | _WHOLE), **options)

    def _make_mask(
        self,
        make_dense: Callable[..., Tensor],
        *,
        batch_size: int,
        q_length: int,
        kv_length: int,
        mask_function: Callable[..., Tensor],
        q_offset: int | Tensor = 0,
        kv_offset: int = 0,
        attention_mask: Tensor | None = None,
        use_vmap: bool = False,
        device: "torch.device | str" = "cpu",
        config: Any = None,
        **_: Any,
    ) -> PatternMask:
        """Return the mask that a model passes to its layers.

        It is never ``None``, in contrast to ``sdpa``: layers of models that do not support ``sdpa``
        may not declare whether they are causal.

        Args:
            make_dense: Returns transformers' own boolean mask of these arguments.
            batch_size: Number of sequences.
            q_length: Number of queries.
            kv_length: Number of keys.
            mask_function: Function of transformers that returns whether a query sees a key, without
                regard to padding.
            q_offset: Position of the first query.
            kv_offset: Position of the first key.
            attention_mask: ``[batch, positions]``, False at padding; ``None`` without padding.
            use_vmap: Whether ``mask_function`` supports scalars only.
            device: Device of the mask.
            config: The configuration of the model.

        Returns:
            The mask, ``[batch, 1, q_length, kv_length]``.

        Raises:
            NotImplementedError: The mask or the model is not supported with a process group.
            ValueError: Ranks of the group differ in batch size or pattern.
        """
        q_offset = int(q_offset)
        options = getattr(config, "__dict__", ()) if self.group is not None else ()
        with self._errors_shared:
            if any(name.startswith(_MIXERS) for name in options):
                raise NotImplementedError("state-space or convolution layers need whole sequences")
            visible = masks.visible_keys(attention_mask, kv_offset, kv_length)
            distance = kv_offset + kv_length - q_offset - q_length
            pattern = masks.recognise_pattern(mask_function, distance, self.group is not None)
        shape, device = (batch_size, 1, q_length, kv_length), torch.device(device)
        if self.group is not None:
            if visible is None:
                visible = np.ones((batch_size, kv_length), dtype=bool)
            is_padded = attention_mask is not None
            whole = masks.gather_mask(self.group, pattern, visible, q_offset, is_padded=is_padded)
            source = MaskSource(lambda: whole.pattern, _no_dense_mask, num_tokens=whole.num_tokens)
            source.may_be_packed = not whole.is_padded
            source.has_packed = masks.has_packed(mask_function)
            return PatternMask(shape, device, source)
        make_dense = partial(make_dense, q_offset=q_offset, use_vmap=use_vmap and pattern is None)
        if pattern is None:
            # Made now, because torch.vmap does not run inside of __torch_dispatch__.
            make_dense = make_dense().clone

        def make_pattern() -> Pattern:
            if pattern is None:
                batched = masks.by_batch([from_mask(element[0]) for element in make_dense()])
            else:
                batched = pattern if visible is None else pattern & masks.mask_padding(visible)
            return masks.stack(batched, q_length, kv_length) or batched

        source = MaskSource(make_pattern, make_dense)
        if "torch._dynamo" in sys.modules:  # a compiled model may read the mask
            source.known  # noqa: B018
        return PatternMask(shape, device, source)

    def mask_in_graph(self, **options: Any) -> Tensor:
        """Return the mask in a graph of ``torch.compile``, see :mod:`cqs.integrations.graph_masks`.

        The arguments are those of :meth:`mask`.
        """
        return graph_masks.with_pattern(self.dense_mask(**options | _WHOLE), **options)


def _known_mask(attention_mask: Tensor | None, lengths: tuple[int, int]) -> KnownMask | None:
    """Return the pattern of a mask that nothing has changed, or ``None`` for other masks.

    A mask for other lengths is broadcast, as in transformers: its cache for a sliding window of 1
    returns all keys, and a mask for one.
    """
    if attention_mask is None or attention_mask.shape[2:] != lengths:
        return None
    if isinstance(attention_mask, PatternMask):
        source = attention_mask.source
        return source.known if source.dense is None else None
    return graph_masks.pattern_of(attention_mask) if torch.compiler.is_dynamo_compiling() else None


def _sets_is_causal(layer: Any) -> bool:
    """Return whether a layer computes ``is_causal``, False if it has a mask, as Moonshine's."""
    code = inspect.unwrap(layer.forward).__code__
    return "is_causal" in code.co_varnames[code.co_argcount + code.co_kwonlyargcount :]


# As torch.compiler.assume_constant_result does, which imports the compiler.
_sets_is_causal._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _eager_of(module: torch.nn.Module) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the eager attention of a model, which returns attention weights, and warn."""
    eager: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if eager is None:
        raise NotImplementedError("output_attentions is not supported")
    warnings.warn(
        "output_attentions=True: the model's eager attention computes the layers, not cqs",
        stacklevel=3,
    )
    return eager  # type: ignore[no-any-return]


def _no_dense_mask() -> Tensor:
    """Raise, because the ranks' masks together are the mask of the whole sequence."""
    raise NotImplementedError(
        "models whose code reads or changes the mask are not supported with a process group"
    )


def _compute_stacked(
    compute: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: "masks.Stacked",
) -> Tensor:
    """Compute a batch as one sequence in a single call, its elements one after another."""
    stacked = (
        tensor.transpose(1, 2).flatten(0, 1).transpose(0, 1).unsqueeze(0)
        for tensor in (query, key, value)
    )
    output = compute(*stacked, pattern=pattern)
    return output.view(-1, *query.shape[::2], value.shape[3]).transpose(0, 1)


def _check_part(asked: Mapping[str, Any], attention_mask: Tensor | None) -> None:
    """Raise unless a rank's arguments determine the packed sequences of all ranks, if any."""
    ends, source = asked.get("cu_seq_lens_q"), getattr(attention_mask, "source", None)
    if source is None:
        return
    if ends is not None and int(ends[-1]) != source.num_tokens:
        raise ValueError(
            "cu_seq_lens_q must be of the sequences of all ranks of the group, "
            f"{source.num_tokens} tokens, got {int(ends[-1])}"
        )
    if ends is None and asked.get("position_ids") is None and source.has_packed:
        raise NotImplementedError(
            "packed sequences require layers that get position_ids: pass cu_seq_lens_q"
        )
