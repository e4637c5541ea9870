"""Attend to query, key and value files; write the output file as it is computed."""

import argparse
import sys
from contextlib import ExitStack
from dataclasses import replace

import torch

import cqs.streaming
from cqs.api import open_executor
from cqs.commands.integers import parse_integer
from cqs.commands.tensor_files import create_file, create_tensor, load_tensor, path_of
from cqs.commands.written_files import check_written
from cqs.executors.contract import attend
from cqs.executors.streaming.checkpoint import WorkingDirectory
from cqs.partial import Partial, lse_dtype
from cqs.patterns.text import PATTERN_HELP, parse_pattern
from cqs.problem import check_problem
from cqs.worker import BACKENDS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``cqs attend``."""
    for name in ("query", "key", "value"):
        parser.add_argument(
            name,
            metavar=name.upper(),
            help=f"FILE.npy, FILE.safetensors with a tensor '{name}', or FILE.safetensors:NAME",
        )
    parser.add_argument("output", metavar="OUTPUT", help="FILE.npy or FILE.safetensors to write")
    parser.add_argument("--lse", metavar="FILE", help="also write the log of the denominators")
    parser.add_argument("--is-causal", "--causal", action="store_true")
    parser.add_argument("--pattern", metavar="CALL", help=PATTERN_HELP)
    parser.add_argument("--scale", type=float)
    parser.add_argument("--tasks", dest="num_tasks", type=parse_integer, metavar="W")
    parser.add_argument("--backend", choices=list(BACKENDS))
    parser.add_argument("--executor", choices=["local", "ray"], default="local")
    parser.add_argument("--verify", action="store_true", help="recompute sampled rows in float64")
    streaming = parser.add_argument_group("sequences longer than memory, in this process")
    streaming.add_argument(
        "--budget", metavar="BYTES", help="hold at most 8GiB, say, on the device: read as needed"
    )
    streaming.add_argument("--device", help="where to compute; default: a GPU if there is one")
    streaming.add_argument(
        "--resume",
        metavar="DIR",
        help="keep working files in this directory, a new one or that of a run that was stopped, "
        "which goes on; removed at the end",
    )


def run(options: argparse.Namespace) -> None:
    """Attend from mapped files to mapped files; an output appears only if all went well."""
    inputs = [path_of(source) for source in (options.query, options.key, options.value)]
    check_written("OUTPUT", options.output, [*inputs, options.resume])
    if options.lse:
        check_written("--lse", options.lse, [*inputs, options.output])
    if options.budget is not None:
        _attend_within_budget(options)
        return
    if options.device is not None or options.resume is not None:
        raise ValueError("--device and --resume go with --budget")
    problem = check_problem(
        *(load_tensor(getattr(options, name), name) for name in ("query", "key", "value")),
        is_causal=options.is_causal,
        pattern=None if options.pattern is None else parse_pattern(options.pattern),
        scale=options.scale,
    )
    shape = (*problem.query.shape[:3], problem.value.shape[3])
    dtype = problem.query.dtype
    with ExitStack() as files:
        output = files.enter_context(create_tensor(options.output, "output", shape, dtype))
        lse = torch.empty(shape[:3], dtype=lse_dtype(dtype))
        if options.lse:
            lse = files.enter_context(create_tensor(options.lse, "lse", shape[:3], lse.dtype))
        opened = files.enter_context(open_executor(options.executor))
        number = opened.num_tasks if options.num_tasks is None else options.num_tasks
        attend(
            opened,
            problem,
            lambda part: part.make_plan(number),
            backend=options.backend,
            verify=options.verify,
            progress=sys.stderr.isatty(),
            into=Partial(output, lse),
        )
    print(f"{options.output}: {list(shape)} {dtype}")


def _attend_within_budget(options: argparse.Namespace) -> None:
    """Attend from files to files that are not mapped: no more memory is taken than the budget."""
    if options.num_tasks is not None or options.executor != "local" or options.lse:
        raise ValueError("--budget goes neither with --tasks and --executor nor with --lse")
    query, key, value = (
        cqs.streaming.open_tensor(getattr(options, name), name)
        for name in ("query", "key", "value")
    )
    shape, dtype = (*query.shape[:3], value.shape[3]), query.dtype
    with ExitStack() as stack:
        directory = None
        if options.resume is not None:
            directory = stack.enter_context(WorkingDirectory(options.resume))
        path = stack.enter_context(create_file(options.output, "output", shape, dtype, directory))
        try:
            cqs.streaming.attention(
                query,
                key,
                value,
                memory_budget=options.budget,
                device=options.device,
                out=replace(cqs.streaming.open_tensor(path, "output"), is_writable=True),
                resume=directory,
                progress=True,
                is_causal=options.is_causal,
                pattern=None if options.pattern is None else parse_pattern(options.pattern),
                scale=options.scale,
                backend=options.backend,
                verify=options.verify,
            )
        except BaseException:
            if directory is not None and directory.output is not None:
                kept = f"'{directory.path}' and '{path}'"
                print(f"The same command goes on with {kept}, which stay.", file=sys.stderr)
            raise
    print(f"{options.output}: {list(shape)} {dtype}")
