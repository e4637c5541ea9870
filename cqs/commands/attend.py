"""Attend to query, key and value files; write the output to a file."""

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import cqs.streaming
from cqs.commands.options import add_causal, note_idle, note_start, parse_integer
from cqs.commands.tensor_files import create_file, create_tensor, map_tensor
from cqs.commands.written_files import check_written
from cqs.executors.contract import Executor, Planned, attend
from cqs.executors.local import LocalExecutor
from cqs.executors.streaming.attention import choose_device_and_backend
from cqs.executors.streaming.checkpoint import FILES, WorkingDirectory
from cqs.executors.streaming.sources import InFile, Shape
from cqs.partial import Partial, lse_dtype
from cqs.patterns.text import PATTERN_HELP, parse_pattern
from cqs.problem import check_problem
from cqs.report.table import digits
from cqs.worker import BACKENDS

_NAMES = ("query", "key", "value")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``cqs attend``."""
    add = parser.add_argument
    kinds = "FILE.npy, FILE.safetensors with a tensor '{0}', or FILE.safetensors:NAME"
    for name in _NAMES:
        add(name, metavar=name.upper(), help=kinds.format(name))
    add("output", metavar="OUTPUT", help="FILE.npy or FILE.safetensors to write")
    add(
        "--lse", metavar="FILE", help="also write the log of the denominators; default: not written"
    )
    add_causal(parser, default=False)
    add("--pattern", metavar="CALL", help=PATTERN_HELP)
    add("--scale", type=float, help="factor on the scores; default: 1 / sqrt(head_dim)")
    add(
        "--tasks", dest="num_tasks", type=parse_integer, metavar="W",
        help="default: 1 in this process; chosen by workers and memory on Ray",
    )  # fmt: skip
    add("--backend", choices=list(BACKENDS), help="default: the best that supports the call")
    add("--executor", choices=["local", "ray"], default="local")
    add("--verify", action="store_true", help="recompute sampled rows in float64")
    streaming = parser.add_argument_group("sequences longer than memory, in this process")
    add = streaming.add_argument
    add("--budget", metavar="BYTES", help="hold at most 8GiB, say, on the device; default: all")
    add("--device", help="where to compute; default: a GPU if there is one")
    add(
        "--resume", metavar="DIR",
        help="keep working files in this directory, a new one or that of a run that was stopped, "
        "which goes on; removed at the end; default: none are kept",
    )  # fmt: skip


def run(options: argparse.Namespace) -> None:
    """Attend from files to files, which become the outputs only if all went well."""
    inputs = [cqs.streaming.open_tensor(getattr(options, name), name) for name in _NAMES]
    paths = [str(source.path) for source in inputs]
    # No file that is written may be an input, or another one that is written.
    check_written("OUTPUT", options.output, [*paths, options.resume])
    if options.lse is not None:
        check_written("--lse", options.lse, [*paths, options.output])
    for name in FILES if options.resume else ():
        check_written("--resume", str(Path(options.resume, name)), paths)
    shape, dtype = (*inputs[0].shape[:3], inputs[2].shape[3]), inputs[0].dtype
    attend_to = _attend_mapped if options.budget is None else _attend_within_budget
    start = time.perf_counter()
    how = attend_to(options, inputs, shape, dtype)
    seconds = time.perf_counter() - start
    for name, source in zip(_NAMES, inputs, strict=True):
        print(_describe(name, source.shape, dtype))
    verified = ", sampled rows verified in float64" if options.verify else ""
    print(f"{how}, {digits(seconds)} s from files to file{verified}")
    print(_describe(f"{options.output}:", shape, dtype))


def _describe(name: str, shape: Shape, dtype: torch.dtype) -> str:
    """Name the axes: a file of ``[batch, tokens, heads, dim]`` may be attended to without error."""
    axes = zip(("batch", "heads", "tokens", "dim"), shape, strict=True)
    return f"{name} [{', '.join(f'{axis} {length}' for axis, length in axes)}] {dtype}"


def _attend_mapped(
    options: argparse.Namespace, inputs: Sequence[InFile], shape: Shape, dtype: torch.dtype
) -> str:
    """Attend from files to files that are mapped into memory; say with which tasks and backend."""
    if options.device is not None or options.resume is not None:
        raise ValueError("--device and --resume go with --budget")
    mapped = (map_tensor(source, "c") for source in inputs)
    problem = check_problem(*mapped, **_problem_options(options))
    with ExitStack() as files:
        output = files.enter_context(create_tensor(options.output, "output", shape, dtype))
        lse = torch.empty(shape[:3], dtype=lse_dtype(dtype))
        if options.lse is not None:
            lse = files.enter_context(create_tensor(options.lse, "lse", shape[:3], lse.dtype))
        opened: Executor = LocalExecutor()
        number = options.num_tasks or 1
        if options.executor == "ray":
            note_start()
            opened = cluster = files.enter_context(cqs.Cluster()).make_executor()
            number = options.num_tasks or cluster.choose_num_tasks(problem)
        note_idle(number, max(inputs[0].shape[2], inputs[1].shape[2]))
        attend(
            opened,
            problem,
            lambda part: part.make_plan(number),
            backend=options.backend,
            verify=options.verify,
            progress=sys.stderr.isatty(),
            into=Partial(output, lse),
        )
        plans = (Planned(p, p.make_plan(number), options.backend) for _, p in problem.parts())
        backends = dict.fromkeys(opened.name_backend(planned) for planned in plans)
        return f"tasks: {number}, backend: {', '.join(backends)}"


def _attend_within_budget(
    options: argparse.Namespace, inputs: Sequence[InFile], shape: Shape, dtype: torch.dtype
) -> str:
    """Attend from files to files within a memory budget; say with which tasks and backend."""
    if options.num_tasks is not None or options.executor != "local" or options.lse is not None:
        raise ValueError("--budget cannot be combined with --tasks, --executor or --lse")
    with ExitStack() as stack:
        directory = None
        if options.resume is not None:
            directory = stack.enter_context(WorkingDirectory(options.resume))
        # A file beside the output, which is renamed to it at the end of the block.
        path = stack.enter_context(create_file(options.output, "output", shape, dtype, directory))
        try:
            out: Any = replace(cqs.streaming.open_tensor(path, "output"), is_writable=True)
            cqs.streaming.attention(
                *inputs,
                memory_budget=options.budget,
                device=options.device,
                out=out if directory is None else cqs.streaming.Resumable(out, directory),
                progress=True,
                backend=options.backend,
                verify=options.verify,
                **_problem_options(options),
            )
        except BaseException:
            if directory is not None and directory.output is not None:
                kept = f"'{directory.path}' and '{path}'"
                print(f"The same command goes on with {kept}, which stay.", file=sys.stderr)
            raise
    pattern = _problem_options(options)["pattern"]
    device, backend = choose_device_and_backend(
        inputs, options.device, options.backend, None, pattern
    )
    return f"tasks: 1, within {options.budget} of {device}, backend: {backend}"


def _problem_options(options: argparse.Namespace) -> dict[str, Any]:
    pattern = None if options.pattern is None else parse_pattern(options.pattern)
    return {"is_causal": options.is_causal, "pattern": pattern, "scale": options.scale}
