"""What pages say in words about rows of methods of context parallelism."""

import math
import re
from collections import defaultdict
from dataclasses import replace

import pytest

from benchmarks import fitting
from benchmarks.networks import promise
from benchmarks.result_tables import RESULTS, rows_of
from cqs.scheduler import AttentionShape
from cqs.scheduler.machines import MACHINES

pytestmark = pytest.mark.slow


def times_of_methods(name):
    """Case and benchmark -> method -> milliseconds."""
    times = defaultdict(dict)
    for row in rows_of(name):
        times[row["case"], row["benchmark"]][row["executor"]] = row["median_ms"]
    return times


OTHERS = ("ring", "all-gather", "ulysses")


def ratios_of(name):
    """Pass -> sorted (time of cqs relative to the best other, of quorums, of PyTorch, case)."""
    found = defaultdict(list)
    for (case, benchmark), times in times_of_methods(name).items():
        best = min(times[other] for other in OTHERS if other in times)
        ours, quorums = times["cqs"] / best, times.get("cqs quorums", math.inf) / best
        torch = times["torch"] / times["cqs"] if "torch" in times else None
        found[benchmark.removeprefix("peers ")].append((ours, quorums, torch, case))
    return {passes: sorted(rows) for passes, rows in found.items()}


def test_where_cqs_is_the_fastest_on_two_h200s():
    ratios = ratios_of("peers-h200-x2-rectangles")
    forward, both = ratios["forward"], ratios["both"]
    gains = [1 - ours for ours, *_ in forward if ours < 1]
    assert (len(gains), len(forward)) == (11, 12)
    assert 0.0045 < min(gains) and max(gains) < 0.185
    assert 1 - 1 / forward[-1][0] == pytest.approx(0.034, abs=5e-4)
    assert max(abs(ours / quorums - 1) for ours, quorums, *_ in forward) < 0.0475
    gains = [1 - ours for ours, *_ in both if ours < 1]
    assert (len(gains), len(both)) == (8, 11)
    assert 0.0045 < min(gains) and max(gains) < 0.125
    losses = both[8:]
    assert [1 - 1 / ours for ours, *_ in losses] == pytest.approx([0.006, 0.031, 0.066], abs=5e-4)
    assert all(0.0065 < 1 - quorums < 0.0345 for _, quorums, *_ in losses)
    torch = {(passes, case): t for passes in ratios for _, _, t, case in ratios[passes] if t}
    assert torch.pop(("both", "full-131072-h16-kv16-d128")) == pytest.approx(0.909, abs=5e-4)
    for passes, least, most in (("forward", 1.035, 1.525), ("both", 1.065, 1.415)):
        found = [ratio for (name, _), ratio in torch.items() if name == passes]
        assert least < min(found) and max(found) < most


def test_where_cqs_is_the_fastest_on_four_h200s():
    ratios = ratios_of("peers-h200-x4-rectangles")
    for passes, number, least, most, loss in (
        ("forward", 9, 0.0285, 0.195, 0.0035),
        ("both", 8, 0.0015, 0.0375, 0.0115),
    ):
        gains = [1 - ours for ours, *_ in ratios[passes] if ours < 0.9999]
        assert (len(gains), len(ratios[passes])) == (number, 11)
        assert least < min(gains) and max(gains) < most
        assert ratios[passes][-1][0] < 1 + loss
    for passes, least, most in (("forward", 1.155, 1.695), ("both", 1.025, 1.855)):
        found = [torch for *_, torch, _ in ratios[passes] if torch]
        assert least < min(found) and max(found) < most


def test_loops_of_short_calls():
    found = defaultdict(list)
    for number, name in ((2, "peers-h100-x2-loops"), (4, "peers-h100-x4-loops")):
        cases = defaultdict(dict)
        for row in rows_of(name):
            if row["executor"] != "one":
                cases[row["case"], row["benchmark"]][row["executor"]] = row
        for (_, benchmark), methods in cases.items():
            places = [
                sorted(methods, key=time_of).index("cqs")
                for time_of in (
                    lambda method, methods=methods: methods[method]["details"]["loop_ms"],
                    lambda method, methods=methods: methods[method]["median_ms"],
                )
            ]
            found[benchmark].append((number, len(methods), *places))
    forward, both = found["peers forward"], found["peers both"]
    assert [loop for *_, loop, _ in forward] == [number - 1 for _, number, *_ in forward]
    assert sum(busy == 0 for *_, busy in forward) == 7
    assert len(forward) == len(both) == 8
    assert sum(loop == 0 for _, _, loop, _ in both) == 4


def test_how_long_callers_of_two_gpus_wait():
    waits = defaultdict(list)
    for row in rows_of("peers-h200-x2"):
        waits[row["executor"], row["benchmark"]].append(row["details"]["call_ms"])
    for name, forward, both in (
        ("cqs", (3, 9), (5.7, 14)),
        ("ring", (0.8, 2.3), (2.6, 7)),
        ("cqs replayed", (0.04, 0.3), (0.4, 1.4)),
    ):
        for passes, (least, most) in (("forward", forward), ("both", both)):
            found = waits[name, f"peers {passes}"]
            assert least <= min(found) and round(max(found), 2) <= most, (name, passes)


def test_two_gpus_with_flash_attention():
    longer, torch, trained = {}, [], []
    for (case, benchmark), times in times_of_methods("peers-h200-x2-best").items():
        others = (times[name] for name in ("ring", "all-gather", "ulysses", "torch"))
        longer[case, benchmark] = min(others) / times["cqs"]
        if benchmark == "peers both":
            torch.append(times["torch"] / times["cqs"])
            trained.append(times["cqs"] / times["one"])
    assert len(longer) == 12
    assert 0.9925 < longer.pop(("full-131072-h16-kv16-d128-best", "peers both")) < 0.9935
    assert 1.005 < min(longer.values()) and max(longer.values()) < 1.115
    assert 1.105 < min(torch) and max(torch) < 1.285
    assert 0.505 < min(trained) and max(trained) < 0.565


def test_four_gpus_are_predicted_from_two(each_fit_once):
    fitted, measured = (
        fitting.read_rows(RESULTS / f"peers-h200-{name}.jsonl") for name in ("x2", "x4")
    )
    machine = fitting.fit(fitted)
    assert machine.latency == pytest.approx(25e-6, abs=5e-7)
    long = [row for row in measured if row.case.tokens >= 2**16]
    assert max(abs(row.ratio(machine) - 1) for row in long) < 0.1


def test_hosts_with_slow_links():
    cases = defaultdict(dict)
    for row in rows_of("networks-cpu"):
        cases[row["num_tasks"], row["case"], row["benchmark"]][row["executor"]] = row
    assert len(cases) == 72
    for (num_hosts, name, benchmark), methods in cases.items():
        for row in methods.values():
            if "predicted_ms" in row["details"]:
                assert 0.87 < row["details"]["predicted_ms"] / row["median_ms"] < 1.135
        ours, case = methods.pop("cqs"), (num_hosts, name, benchmark)
        assert ours["median_ms"] < 1.0265 * min(row["median_ms"] for row in methods.values()), case
        details = ours["details"]
        assert 1.0 < details["link_bytes"] / details["promised_bytes"] < 1.0305, case
        planned = promised_bytes(num_hosts, name, benchmark, details["mbit"])
        assert planned["promised_bytes"] == pytest.approx(details["promised_bytes"])
        for other in ("ring", "all-gather"):
            of_times = methods[other]["median_ms"] / ours["median_ms"]
            of_bytes = methods[other]["details"]["link_bytes"] / planned["busiest_bytes"]
            assert of_times > 0.85 * of_bytes, case


def promised_bytes(num_hosts, name, benchmark, mbit):
    kind, *sizes = re.fullmatch(r"(\w+)-(\d+)-h(\d+)-kv(\d+)-d(\d+)", name).groups()
    tokens, heads, kv_heads, head_dim = map(int, sizes)
    return promise(
        tokens,
        num_hosts,
        AttentionShape(heads, head_dim, num_kv_heads=kv_heads, itemsize=4),
        replace(MACHINES["CPU"], devices_per_node=1, between=mbit * 1e6 / 8, latency=2e-3),
        is_causal=kind == "causal",
        with_gradients=benchmark.endswith("both"),
    )
