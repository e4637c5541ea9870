"""The benchmark ``profiles`` reads the counters of Nsight Compute."""

import pytest
import torch

from benchmarks import profiles
from benchmarks.__main__ import main
from benchmarks.patterns import make_forms

HEADER = ["ID", "Kernel Name", profiles._DURATION, *profiles._COUNTERS.values()]


def line(cells):
    return ",".join(f'"{cell}"' for cell in cells)


def test_counters_of_kernels_are_read():
    """Numbers have commas, and the second line has units."""
    lines = [
        "==PROF== Profiling",
        line(HEADER),
        line([""] * len(HEADER)),
        line([0, "attend_tiles(int, float)", "764,928", 72.5, 39, 60, 90.25, 18, 168, "180,484"]),
        line([1, "merge", "1,000", *range(7)]),
    ]
    first, second = profiles.parse_counters(lines)
    assert first[:2] == ("attend_tiles", pytest.approx(764.928e-6))
    assert first[2]["tensor_percent"] == 72.5 and first[2]["shared_bytes"] == 180484
    assert second[:2] == ("merge", pytest.approx(1e-6)) and second[2]["registers"] == 5


def test_calls_are_those_of_the_benchmark_of_patterns():
    names = {case.name for case in make_forms(1024)}
    assert all(name in names for name, _ in profiles.CALLS)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there it is a benchmark")
def test_a_gpu_is_required(capsys):
    assert main(["profiles"]) == 2
    assert "require a GPU and the program ncu" in capsys.readouterr().err
