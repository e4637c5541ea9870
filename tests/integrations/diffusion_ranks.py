"""Models of diffusers on ranks, compared with one process; a program that prints what it finds."""

import json
import multiprocessing
import sys
import warnings

import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig
from diffusers.utils import logging
from diffusion_models import FAMILIES, SIZES, make_inputs, make_model, passes
from ranks import find_free_port

from cqs.integrations.diffusers import register


def make_parallel(family, heads, **degrees):
    model = make_model(family, heads)
    model.set_attention_backend("cqs")
    degrees = degrees or {"ring_degree": dist.get_world_size()}
    model.enable_parallelism(config=ContextParallelConfig(**degrees))
    return model


def errors_of(model, family, size):
    """Return the largest error of outputs, and that of gradients, which are summed over the ranks.

    Relative to the largest value of a tensor, if that is above 1; on rank 0.
    """
    heads, sizes = SIZES[size]
    found = passes(model, make_inputs(family, sizes))
    if dist.is_initialized():
        gradients = [*filter(torch.is_tensor, found[1])]
        dist.all_reduce(joined := torch.cat([*map(torch.flatten, gradients)]))
        parts = joined.split([gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))
        if dist.get_rank() > 0:
            return None
    reference = make_model(family, heads)
    reference.set_attention_backend("native")
    expected = passes(reference, make_inputs(family, sizes))
    return [max(map(_error, *pair)) for pair in zip(found, expected, strict=True)]


def _error(found, expected):
    if expected is None:  # an input or a parameter that is not used
        assert found is None
        return 0.0
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1))


def _compiled(size):
    model = make_parallel("HunyuanVideo", SIZES[size][0])
    model.compile(backend="aot_eager")
    return errors_of(model, "HunyuanVideo", size)


def _complaints():
    """Return the errors for masks that context parallelism does not support."""
    model = make_parallel("Flux", 3)
    inputs = make_inputs("Flux", (1, 1, 11, 4))
    rows = (11 + 4) // dist.get_world_size() + 1
    found = {}
    for name, mask in {
        "of pairs": torch.ones(rows, rows).tril().bool()[None, None],
        "of other lengths": torch.ones(1, 1, 1, 99).bool(),
    }.items():
        try:
            model(**inputs, joint_attention_kwargs={"attention_mask": mask})
        except (NotImplementedError, ValueError) as error:
            found[name] = str(error)
    return found


def _serve(rank, num_ranks, port, queue):
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=num_ranks)
    found = {
        f"{family}, {size}": errors_of(make_parallel(family, SIZES[size][0]), family, size)
        for family in FAMILIES
        for size in SIZES
    }
    if num_ranks == 2:
        size = next(iter(SIZES))
        found["compiled"] = _compiled(size)
        found["complaints"] = _complaints()
    if rank == 0:
        queue.put(found)
    dist.destroy_process_group()


def main():
    """Print the findings for the numbers of ranks that are given, as JSON."""
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    register()
    context = multiprocessing.get_context("fork")  # what takes long to import is imported
    results = {}
    for num_ranks in map(int, sys.argv[1:]):
        arguments = num_ranks, find_free_port(), (queue := context.SimpleQueue())
        ranks = [
            context.Process(target=_serve, args=(rank, *arguments), daemon=True)
            for rank in range(num_ranks)
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(100)
            assert rank.exitcode == 0
        results[num_ranks] = queue.get()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
