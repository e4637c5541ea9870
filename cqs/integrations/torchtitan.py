"""torchtitan: models whose inner attention is context-parallel attention by cqs."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.distributed import ParallelDims
from torchtitan.models.common import attention as inner
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.module import Module
from torchtitan.protocols.sharding import LocalMapConfig

import cqs.distributed
from cqs.api import attention
from cqs.integrations.masks import gather_documents
from cqs.patterns import Pattern, causal, sliding_window
from cqs.problem.scores import Scores
from cqs.worker.backends import check_backend_name

_REPLACED = (
    inner.FlexAttention.Config,
    inner.ScaledDotProductAttention.Config,
    inner.VarlenAttention.Config,
)


class Attention(Module):
    """Inner attention over contiguous shards of every sequence, which :func:`convert` inserts."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """Configuration of the inner attention."""

        backend: str | None = None
        """Name of a backend; ``None`` selects one, see :func:`cqs.attention`."""
        window: tuple[int, int] = (-1, 0)
        """Numbers of keys before and after the position of a query that it sees, -1 for all."""

    _sharding_config: Any
    """torchtitan's ``ShardingConfig``: placements of the arguments of :meth:`forward` as they come,
    and as they are computed with; ``None`` without."""

    def __init__(self, config: Config) -> None:
        """Create the module; it has no parameters."""
        super().__init__()
        self.compute: Callable[..., Any] = partial(attention, backend=config.backend)
        self.backend, self.window = config.backend, config.window

    def parallelize(self, parallel_dims: ParallelDims) -> None:
        """Compute over the context-parallel mesh, with keys and values as shards."""
        if parallel_dims.cp_enabled:
            mesh = parallel_dims.get_mesh("cp")
            self.compute = partial(cqs.distributed.attention, group=mesh, backend=self.backend)
        if (sharding := self._sharding_config) is not None:
            # The sharding of torchtitan's models gathers the keys and values of all ranks. With the
            # same placements before and after, they stay shards.
            shards = sharding.in_src_shardings
            self._sharding_config = replace(
                sharding,
                in_dst_shardings=shards,
                local_map=LocalMapConfig(in_grad_placements=tuple(shards.values())),
            )
        super().parallelize(parallel_dims)

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: Pattern,
        scale: float | None = None,
        enable_gqa: bool = False,
        **asked: Any,
    ) -> Tensor:
        """Compute attention with torchtitan's layout and arguments.

        Args:
            q_BLNH: Queries of this rank, ``[batch, rows, num_heads, head_dim]``.
            k_BLNH: Keys of this rank, ``[batch, rows, num_kv_heads, head_dim]``.
            v_BLNH: Values of this rank, ``[batch, rows, num_kv_heads, value_dim]``.
            attention_masks: Pattern over the whole sequence.
            scale: Factor on the scores; ``None`` means ``head_dim ** -0.5``.
            enable_gqa: Whether there are fewer KV heads than heads.
            asked: Further arguments of torchtitan's inner attention.

        Returns:
            The output of this rank, ``[batch, rows, num_heads, value_dim]``.

        Raises:
            NotImplementedError: ``score_mod`` is given, or an ``out_transform`` that does not add
                the sinks of gpt-oss.
        """
        scores = None
        if getattr(asked.get("out_transform"), "__name__", None) == "_apply_sinks":
            sinks = asked.pop("out_transform").__self__.sinks
            if isinstance(sinks, DTensor):
                sinks = sinks.to_local(grad_placements=sinks.placements)
            scores = Scores(sinks=sinks)
        for name, value in asked.items():
            if value is not None:
                raise NotImplementedError(f"{name} is not supported, got {value!r}")
        if self.window != (-1, 0):
            left, right = (None if number < 0 else number for number in self.window)
            attention_masks = attention_masks & sliding_window(left, right)
        heads_first = (tensor.transpose(1, 2) for tensor in (q_BLNH, k_BLNH, v_BLNH))
        output: Tensor = self.compute(
            *heads_first, pattern=attention_masks, scale=scale, scores=scores
        )
        return output.transpose(1, 2)


def convert(
    spec: ModelSpec, *, pattern: Pattern | None = None, backend: str | None = None
) -> ModelSpec:
    """Return a torchtitan model with cqs as the inner attention of all layers.

    With ``parallelism.context_parallel_degree`` above 1, the ranks exchange where documents begin
    once per batch, and :func:`cqs.distributed.attention` computes every layer. Any degree is
    supported, whatever the number of heads. Set ``context_parallel_load_balancer`` to ``None``:
    shards are contiguous, and plans balance the work.

    Args:
        spec: The model, such as ``torchtitan.models.llama3.model_registry("8B")``. The sliding
            windows of its layers, and sinks as in gpt-oss, are kept.
        pattern: Pattern over the whole sequence, combined with the documents that ``positions``
            mark and with the window of a layer; ``None`` means causal.
        backend: Name of a backend; ``None`` selects one, see :func:`cqs.attention`.

    Raises:
        ValueError: The model has no inner attention that can be replaced. When the model is
            parallelized: ``context_parallel_load_balancer`` is not ``None``.
        NotImplementedError: When the model is parallelized: ``spmd_backend`` is not supported with
            context parallelism. When it is called: ``attention_masks`` is given.
    """
    check_backend_name(backend)
    model = copy.deepcopy(spec.model)
    matches = [match for kind in _REPLACED for match in model.traverse(kind)]
    if not matches:
        raise ValueError(f"spec must have an inner attention, got model {spec.name!r} without one")
    for _, replaced, parent, name in matches:
        window = getattr(replaced, "window_size", (-1, 0))
        if size := getattr(parent, "sliding_window_size", None):
            window = size - 1, 0
        setattr(parent, name, Attention.Config(backend=backend, window=window))
    parallelize = partial(
        _parallelize, spec.parallelize_fn, causal() if pattern is None else pattern
    )
    return replace(spec, model=model, parallelize_fn=parallelize)


def _parallelize(
    parallelize: Callable[..., torch.nn.Module],
    pattern: Pattern,
    model: torch.nn.Module,
    *,
    parallel_dims: ParallelDims,
    parallelism: Any,
    **options: Any,
) -> torch.nn.Module:
    """Parallelize a model whose layers get a pattern as their mask."""
    group = None
    if parallel_dims.cp_enabled:
        if (balancer := parallelism.context_parallel_load_balancer) is not None:
            raise ValueError(f"context_parallel_load_balancer must be None, got {balancer!r}")
        if parallelism.spmd_backend == "partial_dtensor":
            raise NotImplementedError(
                "spmd_backend must be 'spmd_types' or 'full_dtensor' with context parallelism, "
                "got 'partial_dtensor'"
            )
        group = parallel_dims.get_mesh("cp").get_group()
    model.register_forward_pre_hook(partial(_add_pattern, group, pattern), with_kwargs=True)
    return parallelize(model, parallel_dims=parallel_dims, parallelism=parallelism, **options)


def _add_pattern(
    group: Any, pattern: Pattern, _: Any, args: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Pass the pattern and the documents of the whole sequence as the mask of all layers."""
    if options.get("attention_masks") is not None:
        raise NotImplementedError(
            f"attention_masks must be None, got {options['attention_masks']!r}: pass a pattern to "
            "convert"
        )
    positions = options.get("positions", args[1] if len(args) > 1 else None)
    if positions is not None:
        if isinstance(positions, DTensor):
            positions = positions.to_local()
        packed = gather_documents(group, positions, are_global=True)
        pattern = pattern if packed is None else pattern & packed
    return args, options | {"attention_masks": pattern}
