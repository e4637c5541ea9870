"""Time and memory of ``cqs attend`` on files, on the CPU under a memory budget."""

import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from benchmarks.errors import exact_rows, relative_error
from benchmarks.publish import make_row
from cqs.problem import check_problem
from cqs.report.exact import check_error
from cqs.report.measurement import Measurement
from cqs.scheduler import AttentionShape
from cqs.scheduler.machines import MACHINES
from cqs.streaming import make_stream_plan

_SAMPLE = 16
_ERROR = 1e-5
"""Tolerance of float32 outputs."""
_INTERVAL = 0.02
"""Seconds between samples of the process."""


def measure_files(length: int, shape: AttentionShape, is_causal: bool, budget: int) -> Measurement:
    """Verify and time attention from files to a file, in a process of its own.

    Args:
        length: Number of tokens.
        shape: Shape of the tensors, float32.
        is_causal: See :func:`cqs.attention`.
        budget: Memory budget in bytes, without the memory of the process itself.

    Returns:
        A row. Its peak is the largest resident set of the process.

    Raises:
        RuntimeError: The command failed.
    """
    with TemporaryDirectory() as folder:
        files = _make(Path(folder), length, shape)
        command = [sys.executable, "-m", "cqs", "attend", *map(str, files)]
        command += ["--budget", str(budget), "--device", "cpu", *["--causal"] * is_causal]
        start, resident = time.perf_counter(), 0
        with subprocess.Popen(command) as process:
            while process.poll() is None:
                resident = max(resident, _most_resident(process.pid))
                time.sleep(_INTERVAL)
        seconds = time.perf_counter() - start
        if process.returncode:
            raise RuntimeError(f"cqs attend failed with exit status {process.returncode}")
        error = _error(files, is_causal)
    check_error("sampled rows", error, _ERROR)
    plan = make_stream_plan(
        length, length, shape, budget=budget, is_causal=is_causal, machine=MACHINES["CPU"]
    )
    return make_row(
        [seconds],
        "float32",
        benchmark="streaming files",
        case=f"{'causal' if is_causal else 'full'}-{length}-h{shape.num_heads}"
        f":{shape.kv_heads}-d{shape.head_dim}",
        baseline="predicted",
        executor="cqs attend",
        ratio=seconds / plan.seconds,
        details={
            "tokens": length,
            "predicted_ms": 1e3 * plan.seconds,
            "peak_bytes": resident,
            "predicted_bytes": plan.peak_bytes,
            "budget": budget,
            "error": error,
        },
    )


def _make(folder: Path, length: int, shape: AttentionShape) -> list[Path]:
    """Write query, key and value; return their paths and that of the output."""
    generator = np.random.default_rng(0)
    heads = {"query": shape.num_heads, "key": shape.kv_heads, "value": shape.kv_heads}
    for name, number in heads.items():
        mapped = np.lib.format.open_memmap(
            folder / f"{name}.npy", "w+", np.float32, (1, number, length, shape.head_dim)
        )
        for head in range(number):
            mapped[0, head] = generator.standard_normal(mapped.shape[2:], dtype=np.float32)
    return [folder / f"{name}.npy" for name in (*heads, "output")]


def _most_resident(pid: int) -> int:
    """Return the peak resident set of a process in bytes; 0 if it has exited."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    found = [line.split()[1] for line in lines if line.startswith("VmHWM:")]
    return 1024 * int(found[0]) if found else 0


def _error(files: list[Path], is_causal: bool) -> float:
    """Return the relative error of sampled rows to float64, the worse of first and last head."""
    query, key, value, output = (torch.from_numpy(np.load(path, mmap_mode="c")) for path in files)
    rows = torch.linspace(0, query.shape[2] - 1, _SAMPLE).long()
    group_size = query.shape[1] // key.shape[1]

    def error_of(head: int) -> float:
        numbers = head, head // group_size, head // group_size
        of_head = (t[:, [i]] for t, i in zip((query, key, value), numbers, strict=True))
        exact = exact_rows(check_problem(*of_head, is_causal=is_causal), rows)
        return relative_error(output[:, [head]][:, :, rows], exact)

    return max(error_of(head) for head in (0, query.shape[1] - 1))
