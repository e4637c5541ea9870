"""Models of diffusers on ranks, compared with one process; a program that prints what it finds."""

import contextlib
import json
import sys
import warnings
from functools import partial
from logging import Logger

import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig
from diffusers.models.attention_dispatch import attention_backend, dispatch_attention_fn
from diffusers.utils import logging
from diffusion_models import FAMILIES, HEAD_DIM, SIZES, make_inputs, make_model, passes
from program import complaint_of
from ranks import run_as_torchrun
from torch.distributed.device_mesh import init_device_mesh

from cqs.integrations.diffusers import register


def make_parallel(family, heads, **degrees):
    model = make_model(family, heads)
    model.set_attention_backend("cqs")
    degrees = degrees or {"ring_degree": dist.get_world_size()}
    model.enable_parallelism(config=ContextParallelConfig(**degrees))
    return model


def errors_of(model, family, size, **changes):
    """Return the largest error of outputs, and that of gradients, which are summed over the ranks.

    Relative to the largest value of a tensor, if that is above 1; on rank 0.
    """
    heads, sizes = SIZES[size]
    found = passes(model, make_inputs(family, sizes) | changes)
    if dist.is_initialized():
        for gradient in filter(torch.is_tensor, found[1]):
            dist.all_reduce(gradient)
        if dist.get_rank() > 0:
            return None
    reference = make_model(family, heads)
    reference.set_attention_backend("native")
    expected = passes(reference, make_inputs(family, sizes) | changes)
    return [max(map(_error, *pair)) for pair in zip(found, expected, strict=True)]


def _error(found, expected):
    if expected is None:  # an input or a parameter that is not used
        assert found is None
        return 0.0
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1))


def _complaints():
    """Return the errors for masks and lengths that context parallelism does not support."""
    model, rows = make_parallel("Flux", 3), 8
    pairs = torch.ones(1, 1, rows, rows).bool()
    masks = {
        "pairs": pairs.tril(),
        "heads": torch.tensor([True, False, True])[None, :, None, None],
        "bias": -0.5 * torch.arange(rows),
        "other lengths": torch.ones(1, 1, 1, 99).bool(),
        "few tokens": pairs,
    }
    complaints = {}
    for name, mask in masks.items():
        inputs = make_inputs("Flux", (1, 1, 1, 15) if name == "few tokens" else (1, 1, 12, 12))
        inputs["joint_attention_kwargs"] = {"attention_mask": mask}
        complaints[name] = complaint_of(partial(model, **inputs))
    model.set_attention_backend("native")
    inputs = make_inputs("Flux", (1, 1, 4, 2))
    return complaints | {"other backend": complaint_of(partial(model, **inputs))}


def _complaints_about_ranks():
    """Return the errors of this rank for degrees and orders of calls that do not fit."""
    degrees = {
        "few": {"ring_degree": 2},
        "mesh": {"ring_degree": 2, "mesh": init_device_mesh("cpu", (3,), mesh_dim_names=["ring"])},
        "one rank": {"ring_degree": 3 if dist.get_rank() else 2},
    }
    native = partial(make_model("Wan", 3).enable_parallelism, config=ContextParallelConfig(3))
    complaints = {
        name: complaint_of(partial(make_parallel, "Wan", 3, **given))
        for name, given in degrees.items()
    }
    with attention_backend("native"):
        return complaints | {"order": complaint_of(native)}


def _bias_of_padding():
    """Return the error of a layer whose mask, a bias, masks out all keys of the last rank."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    tensors = torch.randn(3, 2, 7, 3, HEAD_DIM)
    bias = torch.zeros(2, 1, 1, 7).masked_fill(torch.arange(7) >= 4, -10000.0)
    config = make_parallel("Flux", 3)._parallel_config
    own = (each.tensor_split(num_ranks, 1)[rank] for each in tensors)
    mask = bias.tensor_split(num_ranks, 3)[rank]
    found = dispatch_attention_fn(*own, attn_mask=mask, backend="cqs", parallel_config=config)
    expected = dispatch_attention_fn(*tensors, attn_mask=bias, backend="native")
    return [_error(found, expected.tensor_split(num_ranks, 1)[rank])]


def _special_cases():
    """Return the errors of what one family alone takes, or one way to call a model."""
    size, few = SIZES
    checkpointed = make_parallel("HunyuanVideo", SIZES[size][0]).train()
    checkpointed.enable_gradient_checkpointing()
    flux = make_parallel("Flux", SIZES[size][0])
    ltx, timesteps = make_parallel("LTX", SIZES[few][0]), 30 * torch.arange(22).view(2, 11)
    qwen = make_parallel("QwenImage", SIZES[few][0])
    return {
        "checkpointed": errors_of(checkpointed, "HunyuanVideo", size),
        "output object": errors_of(flux, "Flux", size, return_dict=True),
        "timesteps of tokens": errors_of(ltx, "LTX", few, timestep=timesteps),
        "fewer text tokens than ranks": errors_of(
            qwen, "QwenImage", few, encoder_hidden_states_mask=None
        ),
        "bias of padding": _bias_of_padding(),
    }


def _print_findings():
    """Print as JSON what this number of ranks finds, on rank 0."""
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    errors = {
        f"{family}, {size}": errors_of(make_parallel(family, SIZES[size][0]), family, size)
        for family in FAMILIES
        for size in (SIZES if num_ranks != 3 else list(SIZES)[1:])
    }
    found = {"errors": errors}
    if num_ranks == 3:
        errors |= _special_cases()
        found["complaints"] = _complaints()
        found["complaints about ranks"] = of_ranks = [None] * num_ranks
        dist.all_gather_object(of_ranks, _complaints_about_ranks())
    if num_ranks == 2:
        size = next(iter(SIZES))
        model = make_parallel("HunyuanVideo", SIZES[size][0], ulysses_degree=num_ranks)
        (block,) = model.single_transformer_blocks
        block.compile(backend="aot_eager", fullgraph=True)
        errors["compiled"] = errors_of(model, "HunyuanVideo", size)
    dist.destroy_process_group()
    if rank == 0:
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    with contextlib.suppress(AttributeError):
        del Logger.warning_once  # transformers adds it
    register()
    run_as_torchrun(int(sys.argv[1]), _print_findings, start_method="fork")
