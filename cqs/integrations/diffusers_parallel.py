"""Context parallelism of diffusers for any sequence length, and plans for models without one."""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from diffusers.hooks import HookRegistry, ModelHook, context_parallel
from diffusers.models._modeling_parallel import ContextParallelInput as Input
from diffusers.models._modeling_parallel import ContextParallelOutput as Output
from diffusers.utils.torch_utils import unwrap_module
from torch import Tensor
from torch.nn.functional import pad

from cqs.executors.distributed.agreement import Request, agree, control_group, errors_shared, swap
from cqs.uncompiled import uncompiled


@dataclass(frozen=True)
class PaddedInput(Input):
    """An input that is padded with zeros, so that every rank has a token."""


@dataclass(frozen=True)
class Mask(Input):
    """A mask over one or several sequences, one after another, each of which is sharded.

    Padding of the sequences is masked out. If the mask is ``None``, that of padding is made.
    """

    parts: tuple[str, ...] = ()
    """Names of the sequences, inputs ``[batch, seqlen, ...]`` that were sharded before."""


# In plans, Input(1, 3) divides dimension 1 of inputs with 3 dimensions; others stay whole. With
# split_output=True it divides outputs, by index. Output(1, 3) gathers dimension 1.
def _hunyuan_video(model: Any) -> Mapping[str, Any]:
    if model.config.image_condition_type == "token_replace":
        raise NotImplementedError(
            "HunyuanVideo with image_condition_type='token_replace' is not supported under context "
            "parallelism, because its blocks count the tokens of the first frame"
        )
    streams = "hidden_states", "encoder_hidden_states"
    mask = {"attention_mask": Mask(3, 4, parts=streams)}
    return {
        "rope": {0: Input(0, 2, split_output=True), 1: Input(0, 2, split_output=True)},
        # Blocks take the last tokens as the text, which fails for no text.
        "transformer_blocks.0": {streams[0]: Input(1, 3), streams[1]: PaddedInput(1, 3)},
        "transformer_blocks.*": mask,
        "single_transformer_blocks.*": mask,
        "proj_out": Output(1, 3),
    }


def _cogvideox(model: Any) -> Mapping[str, Any]:
    return {
        "transformer_blocks.0": {
            "hidden_states": Input(1, 3),
            "encoder_hidden_states": Input(1, 3),
        },
        "transformer_blocks.*": {"image_rotary_emb": [Input(0, 2), Input(0, 2)]},
        "proj_out": Output(1, 3),
    }


def _ltx(model: Any) -> Mapping[str, Any]:
    return {
        "": {"hidden_states": Input(1, 3), "timestep": Input(1, 2)},
        "rope": {0: Input(1, 3, split_output=True), 1: Input(1, 3, split_output=True)},
        "transformer_blocks.*.attn2": None,
        "proj_out": Output(1, 3),
    }


def _qwen_image(model: Any) -> Mapping[str, Any]:
    """Return the plan of diffusers, in which text has a token for every rank, and a mask."""
    text, mask = "encoder_hidden_states", "encoder_hidden_states_mask"
    return dict(model._cp_plan) | {
        # Blocks fail for no text.
        "transformer_blocks.0": {"hidden_states": Input(1, 3), text: PaddedInput(1, 3)},
        "transformer_blocks.*": {"modulate_index": Input(1, 2), mask: Mask(1, 2, parts=(text,))},
        "pos_embed": {0: Input(0, 2, split_output=True), 1: PaddedInput(0, 2, split_output=True)},
    }


def _z_image(model: Any) -> Mapping[str, Any]:
    refiners = "noise_refiner", "context_refiner", "siglip_refiner"
    tokens = {"attn_mask": Input(1, 2), "freqs_cis": Input(1, 3), "noise_mask": Input(1, 2)}
    last = [f"all_final_layer.{key}" for key in model.all_final_layer]
    return (
        {f"{refiner}.*": None for refiner in refiners if getattr(model, refiner, None)}
        | {"layers.0": {"x": Input(1, 3)}, "layers.*": tokens}
        | {path: {"noise_mask": Input(1, 2)} for path in last}
        | {f"{path}.linear": Output(1, 3) for path in last}
    )


_PLANS: dict[str, Callable[[Any], Mapping[str, Any]]] = {
    "CogVideoXTransformer3DModel": _cogvideox,
    "HunyuanVideoTransformer3DModel": _hunyuan_video,
    "LTXVideoTransformer3DModel": _ltx,
    "QwenImageTransformer2DModel": _qwen_image,
    "ZImageTransformer2DModel": _z_image,
}
"""Plans of models that have none in diffusers, or one that fails for less text than ranks."""


def attention_layers(model: Any) -> Iterator[Any]:
    """Yield the layers of a model or a block whose processor calls an attention backend."""
    for module in model.modules():
        if hasattr(getattr(module, "processor", None), "_attention_backend"):
            yield module


def enable_parallelism(
    model: Any, config: Any, plan: Mapping[str, Any] | None, uses_cqs: Callable[[], bool]
) -> None:
    """Shard a model's sequences over ranks, as its method of the same name does.

    Lengths need not be multiples of the number of ranks, and the ranks may be processes on CPUs.

    Args:
        model: A model of diffusers.
        config: The ``ParallelConfig`` of diffusers, with context parallelism.
        plan: Inputs to shard and outputs to gather, by the path of their module. A plan of this
            module may also have ``None``: attention below that module stays within a rank.
        uses_cqs: Returns whether cqs computes the attention of the model.

    Raises:
        ValueError: ``plan`` is ``None``, and the model has none; or the degrees are not those of
            the mesh or, without one, of all ranks. In the last case every rank raises.
    """
    name, context = type(model).__name__, config.context_parallel_config
    if plan is None:
        plan = _PLANS[name](model) if name in _PLANS else model._cp_plan
    if plan is None:
        raise ValueError(f"cp_plan must be given for {name}, which has none")
    _check_degrees(context)
    device, rank = torch.device("cpu"), dist.get_rank()
    if accelerator := torch.accelerator.current_accelerator(check_available=True):
        device = torch.device(accelerator.type, rank % torch.accelerator.device_count())
    mesh = context.mesh or dist.init_device_mesh(
        device.type, context.mesh_shape, mesh_dim_names=context.mesh_dim_names
    )
    config.setup(rank, dist.get_world_size(), device, mesh=mesh)
    model._parallel_config = config
    for layer in attention_layers(model):
        layer.processor._parallel_config = config
    group, shapes = context._flattened_mesh.get_group(), dict[str, torch.Size]()
    for path, spec in reversed([*plan.items()]):  # the hook that is registered last runs first
        submodules = context_parallel._get_submodule_by_name(model, path)
        for module in submodules if isinstance(submodules, list) else [submodules]:
            if spec is None:
                for layer in attention_layers(module):
                    layer.processor = copy(layer.processor)  # other layers may share it
                    layer.processor._parallel_config = None
            elif isinstance(spec, dict):
                hook = _Shard(spec, group, shapes, uses_cqs)
                _register(module, hook, f"cp_input---{path}")
            else:
                _register(module, _Gather(spec, group), f"cp_output---{path}")


def _check_degrees(context: Any) -> None:
    """Raise ValueError unless the degrees of a ``ContextParallelConfig`` fit mesh or ranks."""
    names, degrees = context.mesh_dim_names, context.mesh_shape
    if context.mesh is not None:
        sizes = dict(zip(context.mesh.mesh_dim_names or (), context.mesh.shape, strict=False))
        if (given := tuple(map(sizes.get, names))) != degrees:
            raise ValueError(f"mesh must have the sizes {degrees} of {names}, got {given}")
        return
    num_ranks, product = dist.get_world_size(), math.prod(degrees)
    with errors_shared(None):
        if product != num_ranks:
            raise ValueError(
                "ring_degree * ulysses_degree must be the number of ranks, "
                f"{num_ranks}, got {' * '.join(map(str, degrees))} = {product}"
            )
    agree(None, Request({"call": "enable_parallelism", "degrees": degrees}))


def _register(module: Any, hook: ModelHook, name: str) -> None:
    HookRegistry.check_if_exists_or_initialize(module).register_hook(hook, name)


class _Shard(context_parallel.ContextParallelSplitHook):
    """Replaces inputs or outputs of a module by this rank's shards."""

    def __init__(
        self,
        specs: Mapping[Any, Any],
        group: Any,
        shapes: dict[str, torch.Size],
        uses_cqs: Callable[[], bool],
    ) -> None:
        super().__init__(specs, None)
        self._uses_cqs = uses_cqs
        self._rank, self._num_ranks = dist.get_rank(group), group.size()
        self._shapes = shapes
        """Shapes of the inputs that hooks of the model have sharded, by name."""

    def initialize_hook(self, module: Any) -> Any:
        forward = type(unwrap_module(module)).forward
        self._names = list(inspect.signature(forward).parameters)[1:]
        return module

    def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        given = dict(zip(self._names, args, strict=False)) | kwargs
        for name, spec in self.metadata.items():
            whole = given.get(name)
            if whole is None and isinstance(spec, Mask):
                whole = self._mask_of_padding(given, spec)
            if isinstance(whole, Tensor):
                if name == "hidden_states" and whole.shape[spec.split_dim] < self._num_ranks:
                    raise ValueError(
                        f"hidden_states must have at least one token for each of the "
                        f"{self._num_ranks} ranks, got {list(whole.shape)}: use fewer ranks"
                    )
                given[name] = self._prepare_cp_input(whole, spec)
                self._shapes[name] = whole.shape
            elif whole is not None:
                given[name] = [*map(self._prepare_cp_input, whole, spec)]
        return (), given

    def post_forward(self, module: Any, output: Any) -> Any:
        if any(getattr(spec, "split_output", False) for spec in self.metadata.values()):
            return super().post_forward(module, output)
        return output  # the base class rejects output objects of models

    def _mask_of_padding(self, given: Mapping[str, Any], spec: Mask) -> Tensor | None:
        """Return a mask ``[batch, seqlen]`` without the padding, or ``None`` if there is none."""
        part = spec.parts[0]
        shape = self._shapes[part][:2]
        return given[part].new_ones(shape).bool() if shape[1] < self._num_ranks else None

    def _prepare_cp_input(self, whole: Tensor, spec: Any) -> Tensor:
        """Return this rank's shard of a tensor; replaces the method of the base class.

        Args:
            whole: An input or output for the whole sequence.
            spec: Says which dimension is divided, and whether the tensor is padded before.

        Raises:
            ValueError: Shards would differ in length, and the attention backend is not of cqs.
        """
        if spec.expected_dims not in (None, whole.ndim):  # without a dimension of tokens
            return whole
        dim, parts = spec.split_dim, [whole]
        if whole.shape[dim] % self._num_ranks and not self._uses_cqs():
            raise ValueError(
                "the attention backend must be of cqs for lengths that are not multiples of the "
                f"number of ranks, got length {whole.shape[dim]} on {self._num_ranks} ranks"
            )
        if isinstance(spec, PaddedInput):
            parts = [_padded(whole, dim, self._num_ranks)]
        if isinstance(spec, Mask):
            lengths = [max(self._shapes[part][1], self._num_ranks) for part in spec.parts]
            parts = _padded(whole, dim, sum(lengths)).split(lengths, dim)
        own = [part.tensor_split(self._num_ranks, dim)[self._rank] for part in parts]
        return own[0] if len(own) == 1 else torch.cat(own, dim)


def _padded(tensor: Tensor, dim: int, least: int) -> Tensor:
    """Return a tensor with zeros at the end of a dimension, if that is below a length."""
    missing = max(0, least - tensor.shape[dim])
    return pad(tensor, (0, 0) * (tensor.ndim - dim - 1) + (0, missing)) if missing else tensor


class _Gather(ModelHook):
    """Replaces outputs of a module by those of all ranks."""

    def __init__(self, specs: Any, group: Any) -> None:
        super().__init__()
        self._specs, self._group = [specs] if isinstance(specs, Output) else specs, group

    def post_forward(self, module: Any, output: Any) -> Any:
        parts = [output] if isinstance(output, Tensor) else output
        gathered = tuple(
            part if spec is None else gather_shards(part, spec.gather_dim, self._group)
            for part, spec in zip(parts, self._specs, strict=True)
        )
        return gathered[0] if isinstance(output, Tensor) else gathered


@uncompiled
def gather_shards(shard: Tensor, dim: int, group: Any) -> Tensor:
    """Concatenate the shards of all ranks.

    The gradient of a shard is its part of the gradient on this rank, because all ranks continue
    with the same computation.
    """
    gathered: Tensor = _GatherShards.apply(shard, dim, group)
    return gathered


class _GatherShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: Tensor, dim: int, group: Any) -> Tensor:
        lengths = swap(control_group(group), [shard.shape[dim]])
        ctx.own = dim, sum(lengths[: dist.get_rank(group)]), shard.shape[dim]
        # Gloo gathers tensors of one shape only.
        shape = [*shard.shape]
        shape[dim] = max(lengths)
        padded = shard.new_zeros(shape)
        padded.narrow(dim, 0, shard.shape[dim]).copy_(shard)
        parts = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(parts, padded, group=group)
        kept = (part.narrow(dim, 0, length) for part, length in zip(parts, lengths, strict=True))
        return torch.cat([*kept], dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient.narrow(*ctx.own), None, None
