"""Pages state in words what rows of methods of context parallelism contain."""

import math
from collections import defaultdict

import pytest

from benchmarks import fitting
from benchmarks.result_tables import RESULTS, rows_of

pytestmark = pytest.mark.long

OTHERS = ("ring", "all-gather", "ulysses")


def ratios_of(name, baselines):
    """Benchmark -> sorted times of cqs relative to the fastest of some baselines."""
    times = defaultdict(dict)
    for row in rows_of(name):
        times[row["benchmark"], row["case"]][row["executor"]] = row["median_ms"]
    ratios = defaultdict(list)
    for (benchmark, _), methods in times.items():
        known = [methods[other] for other in baselines if other in methods]
        if known:
            ratios[benchmark.removeprefix("peers ")].append(methods["cqs"] / min(known))
    return {passes: sorted(values) for passes, values in ratios.items()}


@pytest.mark.parametrize(
    ("rows", "passes", "baselines", "num_faster", "number", "best", "worst"),
    [
        ("x2-rectangles", "forward", OTHERS, 11, 12, 0.815, 1.0355),
        ("x2-rectangles", "both", OTHERS, 8, 11, 0.875, 1.071),
        ("x4-rectangles", "forward", OTHERS, 9, 11, 0.805, 1.0035),
        ("x4-rectangles", "both", OTHERS, 8, 11, 0.9625, 1.0115),
        ("x4-rectangles", "both", ["torch"], None, None, 1 / 1.855, 1 / 1.025),
        ("x2-best", "both", [*OTHERS, "torch"], 5, 6, 1 / 1.115, 1.0075),
        ("x2-best", "both", ["one"], None, None, 0.505, 0.565),
    ],
)
def test_gains_and_losses_of_cqs(rows, passes, baselines, num_faster, number, best, worst):
    ratios = ratios_of(f"peers-h200-{rows}", baselines)[passes]
    assert best <= ratios[0] and ratios[-1] <= worst
    if number is not None:
        assert (sum(ratio < 0.9999 for ratio in ratios), len(ratios)) == (num_faster, number)


def test_four_gpus_are_predicted_from_two():
    files = (RESULTS / f"peers-h200-{name}.jsonl" for name in ("x2", "x4"))
    fitted, measured = map(fitting.read_rows, files)
    machine = fitting.fit(fitted)
    assert machine.latency == pytest.approx(25e-6, abs=5e-7)
    long = [row for row in measured if row.case.tokens >= 2**16]
    assert max(abs(row.ratio(machine) - 1) for row in long) < 0.1


def test_hosts_with_slow_links():
    cases = defaultdict(dict)
    for row in rows_of("networks-cpu"):
        cases[row["num_tasks"], row["case"], row["benchmark"]][row["executor"]] = row
    assert len(cases) == 72
    for case, methods in cases.items():
        for row in methods.values():
            predicted = row["details"].get("predicted_ms", row["median_ms"])
            assert math.isclose(predicted, row["median_ms"], rel_tol=0.135)
        ours = methods.pop("cqs")
        assert ours["median_ms"] < 1.0265 * min(row["median_ms"] for row in methods.values()), case
        details = ours["details"]
        assert 1.0 < details["link_bytes"] / details["promised_bytes"] < 1.0305, case
