"""Counters of the kernels of a call, by Nsight Compute."""

import argparse
import csv
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from benchmarks.options import add_common
from benchmarks.publish import make_columns, publish
from cqs.report.measurement import Measurement

CALLS = (
    ("causal-window-25", "forward"),
    ("every-8", "forward"),
    ("random-blocks-25", "forward"),
    ("causal-window-25", "backward"),
)
"""A band, strides and a list of blocks, named as by the benchmark ``patterns``, and their pass."""
_DURATION = "gpu__time_duration.sum"
_COUNTERS = {
    "tensor_percent": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "issue_percent": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "l2_percent": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "l2_hit_percent": "lts__t_sector_hit_rate.pct",
    "memory_percent": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "registers": "launch__registers_per_thread",
    "shared_bytes": "launch__shared_mem_per_block_dynamic",
}
"""Name in a row -> metric of Nsight Compute, in percent of the highest rate or in units."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this benchmark."""
    add_common(parser)


def run(*, tokens: int = 16_384, repeats: int = 1, out: str | None = None) -> None:
    """Profile one call of every kind: 16 heads of 128 in bfloat16.

    Nsight Compute runs each kernel several times and alone, so a duration is not that of the
    benchmark ``patterns``.

    Args:
        tokens: Sequence length.
        repeats: Number of profiles of each call.
        out: File to append rows to, or ``None``.

    Raises:
        NotImplementedError: There is no GPU, or no program ``ncu``.
        RuntimeError: Nsight Compute failed.
    """
    if not torch.cuda.is_available() or shutil.which("ncu") is None:
        raise NotImplementedError("profiles require a GPU and the program ncu of Nsight Compute")
    rows = [row for call in CALLS for _ in range(repeats) for row in _profile(*call, tokens=tokens)]
    publish(rows, make_columns(*_COUNTERS), out)


def _profile(name: str, what: str, *, tokens: int) -> Iterator[Measurement]:
    """Return a row for every kernel of one call."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "profile.csv")
        command = ["ncu", "--csv", "--page", "raw", "--print-units", "base", "--log-file", str(log)]
        command += ["--profile-from-start", "off", "--clock-control", "none"]
        command += ["--metrics", ",".join([_DURATION, *_COUNTERS.values()])]
        command += [sys.executable, "-m", "benchmarks.profiled_call", name, what, str(tokens)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        text = log.read_text() if log.exists() else ""
    if done.returncode:
        raise RuntimeError(f"ncu failed on {name} {what}: {done.stderr[-400:]}{text[-400:]}")
    for kernel, seconds, counters in parse_counters(text.splitlines()):
        milliseconds = 1e3 * seconds
        yield Measurement(
            f"profiles {what}",
            f"{name}-{tokens}",
            baseline=kernel,
            num_tasks=1,
            executor=kernel,
            dtype="bfloat16",
            median_ms=milliseconds,
            p20_ms=milliseconds,
            p80_ms=milliseconds,
            ratio=1.0,
            repeats=1,
            details={"tokens": tokens, **counters},
        )


def parse_counters(lines: Iterable[str]) -> Iterator[tuple[str, float, dict[str, float]]]:
    """Return name, seconds and counters of every kernel of a raw page of Nsight Compute in CSV."""
    header, _, *kernels = csv.reader(line for line in lines if line.startswith('"'))
    for kernel in kernels:
        found = dict(zip(header, kernel, strict=True))

        def number(metric: str, found: dict[str, str] = found) -> float:
            return float(found[metric].replace(",", ""))

        counters = {name: number(metric) for name, metric in _COUNTERS.items()}
        yield found["Kernel Name"].partition("(")[0], 1e-9 * number(_DURATION), counters
