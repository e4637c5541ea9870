"""What pages say in words about rows of methods of context parallelism."""

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


def test_where_cqs_is_the_fastest_on_four_h100s():
    slower, gains, beside_cudnn = {}, defaultdict(list), {}
    for (case, benchmark), times in times_of_methods("peers-h100-x4").items():
        if "h40" in case:
            continue
        ours = times.pop("cqs")
        if "torch" in times:
            beside_cudnn[case, benchmark] = times.pop("torch") / ours
        ratio = ours / min(times.values())
        if ratio > 1:
            slower[case, benchmark] = ratio
        else:
            gains[benchmark].append(1 - ratio)
    assert sum(map(len, gains.values())) == 19 and len(slower) == 3
    assert max(slower.values()) < 1.0095
    assert 0.0085 < min(gains["peers forward"]) and max(gains["peers forward"]) < 0.185
    assert 0.0035 < min(gains["peers both"]) and max(gains["peers both"]) < 0.1
    training = {case: ratio for (case, name), ratio in beside_cudnn.items() if name == "peers both"}
    long = sorted(ratio for case, ratio in training.items() if "131072" in case)
    assert long == pytest.approx([0.909, 0.944], abs=1e-3)
    short = [ratio for case, ratio in training.items() if "131072" not in case]
    assert 1.075 < min(short) and max(short) < 1.555


def test_two_gpus_where_cqs_is_not_the_fastest():
    slower, beside_cudnn, gains, replayed, alike = {}, {}, defaultdict(list), [], []
    for (case, benchmark), times in times_of_methods("peers-h200-x2").items():
        ours = {"cqs", "cqs replayed", "cqs quorums"}
        best = min(times[name] for name in times.keys() - {"one", "torch"} - ours)
        ratio = times["cqs"] / best
        name = benchmark.removeprefix("peers "), case.rpartition("-d128")[0]
        if ratio > 0.9985:
            slower[name] = ratio
        else:
            gains[benchmark].append(1 - ratio)
        replayed.append(times.get("cqs replayed", times["cqs"]) / times["cqs"])
        if benchmark == "peers forward":
            alike.append(times["cqs quorums"] / times["cqs"])
        if "torch" in times:
            beside_cudnn[name] = times["torch"] / times["cqs"]
    assert len(gains["peers forward"]) == 13 and len(gains["peers both"]) == 12
    assert 0.0015 < min(gains["peers forward"]) and max(gains["peers forward"]) < 0.0845
    assert 0.0035 < min(gains["peers both"]) and max(gains["peers both"]) < 0.0805
    assert 0.955 < min(replayed) and max(replayed) < 1.025
    assert 0.97 < min(alike) and max(alike) < 1.03
    expected = {
        ("forward", "causal-524288-h16-kv16"): 1.009,
        ("forward", "full-65536-h32-kv8"): 1.002,
        ("forward", "causal-65536-h32-kv8"): 1.005,
        ("both", "full-16384-h32-kv8"): 1.001,
        ("both", "full-16384-h16-kv16"): 1.019,
        ("both", "full-65536-h16-kv16"): 1.000,
        ("both", "full-524288-h16-kv16"): 1.005,
    }
    assert slower == pytest.approx(expected, abs=6e-4), slower
    assert 1.165 < min(beside_cudnn["forward", case] for _, case in beside_cudnn)
    assert max(beside_cudnn["forward", case] for _, case in beside_cudnn) < 1.345
    trained = {case: ratio for (passes, case), ratio in beside_cudnn.items() if passes == "both"}
    expected = {
        "full-32768-h16-kv16": 0.927,
        "full-65536-h16-kv16": 0.885,
        "causal-65536-h16-kv16": 0.935,
        "causal-32768-h16-kv16": 1.013,
    }
    assert trained == pytest.approx(expected, abs=6e-4), trained


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
    assert machine.latency == pytest.approx(38e-6, abs=5e-7)
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
