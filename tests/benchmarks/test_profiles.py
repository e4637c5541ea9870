"""The benchmark ``profiles`` reads the counters of Nsight Compute."""

import pytest

from benchmarks import profiles

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
