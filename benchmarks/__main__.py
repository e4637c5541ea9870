"""``python -m benchmarks NAME``: one command, one module of this package."""

import argparse
import sys
from functools import partial
from importlib import import_module
from types import ModuleType

import benchmarks
from cqs.arguments import as_integer
from cqs.commands.program import Command, run_program
from cqs.commands.written_files import check_written
from cqs.report.measurement import check_rows

BENCHMARKS = {
    "tasks": "time of all tasks on this device relative to one call of the same kernels",
    "host": "host time of short calls, alone or under torchrun",
    "kernels": "single calls of kernels",
    "merge": "bandwidth of the merge relative to a copy",
    "accuracy": "errors of outputs and gradients against float64",
    "memory": "peak memory of tasks relative to the prediction",
    "ray": "tasks on Ray actors, by parts of a run",
    "sharded": "overhead of Ray for calls on sharded sequences, and recovery from failures",
    "patterns": "sparse patterns compared with dense attention and FlexAttention",
    "profiles": "counters of kernels by Nsight Compute",
    "packed": "plans of packed documents: planning time, balance, bytes moved",
    "streaming": "attention under a memory budget",
    "networks": "methods of context parallelism on hosts with slow links, on this machine",
    "hosts": "run a module on ranks of hosts whose links are limited, on this machine",
    "peers": "methods of context parallelism on the same GPUs, under torchrun",
    "case-study": "memory and time of one of W tasks, as published",
    "bottleneck": "share of attention in the time of a transformers model, by length",
    "model": "training or denoising steps of a model, alone or under torchrun",
    "block": "time of the parts of a transformer layer, under torchrun",
}
_OTHERS = {
    "tables": "write the tables of results into the pages",
    "figures": "draw the figures of results that pages show",
    "simulate": "fit the cost model to rows, compare it with rows, simulate failures",
}
_LEAST = {
    **dict.fromkeys(("seqlen", "repeats", "heads", "kv_heads", "head_dim", "workers", "tasks"), 1),
    "failures": 0,
}
"""Smallest values of options."""


def main(arguments: list[str] | None = None) -> int:
    """Run one benchmark; return its exit status."""
    summaries = {**BENCHMARKS, **_OTHERS}
    return run_program("python -m benchmarks", benchmarks.__doc__, summaries, _load, arguments)


def _load(name: str) -> Command:
    module = import_module(f"benchmarks.{name.replace('-', '_')}")
    return module, module.run if name in _OTHERS else partial(_run, module)


def _run(module: ModuleType, options: argparse.Namespace) -> None:
    """Check the options, then pass those that were given to a benchmark."""
    given = {name: value for name, value in vars(options).items() if value is not None}
    for name in _LEAST.keys() & given.keys():
        numbers = given[name] if isinstance(given[name], list) else [given[name]]
        for number in numbers:
            as_integer(f"--{name.replace('_', '-')}", number, _LEAST[name])
    if "out" in given:
        check_rows(given["out"])
    if "picture" in given:
        check_written("--picture", given["picture"], [given.get("out")])
    if "seqlen" in given:
        given["tokens"] = given.pop("seqlen")
    module.run(**given)


if __name__ == "__main__":
    sys.exit(main())
