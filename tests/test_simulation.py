"""The cost model has the traffic and the memory of real layouts, and obeys its formulas."""

import math
import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from cqs.__main__ import main
from cqs.executors.distributed.layout import ShardedWork, lay_out
from cqs.report.measurement import read_rows
from cqs.scheduler import AttentionShape, Grid2D, Hosts, Quorums, load_interest_set
from cqs.scheduler.cost_model import METHODS, near_shares, predict, predict_plan
from cqs.scheduler.machines import MACHINES, Machine
from cqs.scheduler.workload import Workload

RESULTS = Path(__file__).parents[1] / "benchmarks/results"
MULTI_HEAD = AttentionShape(32, 128)
GROUPED = AttentionShape(32, 128, num_kv_heads=8)
NODES = Machine(devices_per_node=8, between=50e9)


def layouts(case, num_devices, head_parallel, num_chunks=1, *, is_backward=False, plan="quorums"):
    lengths = (case.tokens // num_devices,) * num_devices
    options = {"is_causal": case.is_causal, "with_gradients": is_backward, "plan": plan}
    options |= {"head_parallel": head_parallel, "num_chunks": num_chunks}
    work = ShardedWork(lengths, lengths, case.shape, **options)
    return [lay_out(work, rank) for rank in range(num_devices)]


def bytes_received(case, layout, head_parallel):
    """Bytes received by a rank: tokens before the kernel, results of its shard after it."""
    part, rank = case.part(head_parallel), layout.rank
    queries, keys = layout.query_route, layout.key_route
    inputs = part.query_bytes(sum(queries.receives) - queries.receives[rank])
    inputs += part.key_bytes(sum(keys.receives) - keys.receives[rank])
    returned = sum(queries.lengths) - queries.lengths[rank]
    return inputs + (part.query_bytes if layout.is_final else part.result_bytes)(returned)


@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize(
    ("plan", "num_devices", "head_parallel"),
    [
        *[("quorums", 1, 1), ("quorums", 7, 1), ("quorums", 8, 2), ("quorums", 16, 16)],
        *[(Grid2D(2, 4), 8, 1), (Grid2D(8, 1), 16, 2), (Hosts(Quorums(), 2), 8, 1)],
    ],
    ids=str,
)
def test_traffic_is_that_of_the_layout(plan, num_devices, head_parallel, is_causal):
    options = {"is_backward": False} | ({} if plan == "quorums" else {"kind": plan})
    for shape in (MULTI_HEAD, GROUPED):
        case = Workload(120 * num_devices, shape, is_causal)
        predicted = predict_plan(case, num_devices, Machine(), head_parallel, **options)
        actual = {
            bytes_received(case, layout, head_parallel)
            for layout in layouts(case, num_devices, head_parallel, plan=plan)
        }
        if not is_causal or head_parallel == num_devices:
            assert actual == {predicted.bytes_received}
        else:  # the rank with the most queries may receive fewer results
            least, most = (0.9, 1) if plan == "quorums" else (0.5, 1.2)
            assert least * predicted.bytes_received < max(actual) <= most * predicted.bytes_received


def test_head_chunks_are_those_of_the_layout():
    lengths, found = (4096, 16384, 40000, 2**17), set()
    for tokens, is_causal, is_backward in product(lengths, *2 * [(False, True)]):
        case = Workload(tokens, GROUPED, is_causal)
        assert case.num_chunks(1, 1, is_backward=is_backward) == 1
        for head_parallel in (1, 2, 8):
            layout = layouts(case, 8, head_parallel, None, is_backward=is_backward)[0]
            assert case.num_chunks(8, head_parallel, is_backward=is_backward) == len(layout.chunks)
            found.add(len(layout.chunks))
    assert found == {1, 2, 4}


def test_heads_are_sent_in_four_chunks_where_links_take_longest():
    case = Workload(1680, AttentionShape(8, 64, itemsize=4))
    slow = replace(MACHINES["CPU"], devices_per_node=1, between=1.25e6)
    for machine, num_chunks in (
        (slow, 4),
        (replace(slow, devices_per_node=7), 1),
        (replace(slow, between=1.25e9), 1),
        (replace(slow, rate=1e6), 1),
        (replace(slow, latency=1.0), 1),
    ):
        assert case.num_chunks(7, 1, is_backward=False, machine=machine) == num_chunks


def test_traffic_is_that_of_the_formulas():
    case, shard_of_all = Workload(2**20, GROUPED), GROUPED.query_bytes(2**20)

    def units(method, num_devices):
        return predict(method, case, num_devices, Machine()).bytes_received / shard_of_all

    g = 1 / 4
    assert units("ring", 64) == units("all-gather", 64) == 2 * g * 63 / 64
    assert units("ulysses", 8) == (2 + 2 * g) * 7 / 64
    with_lse = (2 + 2 * g + 4 / 256) * (len(load_interest_set(64)) - 1) / 64
    assert math.isclose(units("cqs quorums", 64), with_lse)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("passes", ["forward", "both"])
def test_faster_machines_never_take_longer(method, passes):
    case = Workload(2**20, GROUPED, is_causal=True)
    for machine, num_devices in product((Machine(), NODES), (1, 8, 32, 512)):
        predicted = predict(method, case, num_devices, machine, passes, plan="any")
        if predicted is None:
            continue
        least = case.one_device_seconds(machine, passes) / num_devices
        assert predicted.seconds >= least * (1 - 1e-12)
        if num_devices == 1:
            assert predicted.bytes_received == 0 and math.isclose(predicted.seconds, least)
        for better in (
            {"rate": 2 * machine.rate, "backward_rate": 2 * machine.backward_rate},
            {"bandwidth": 2 * machine.bandwidth},
            {"between": 2 * machine.between},
            {"latency": machine.latency / 2},
            {"devices_per_node": 2 * machine.devices_per_node},
        ):
            faster = replace(machine, **better)
            again = predict(method, case, num_devices, faster, passes, plan="any")
            assert again.seconds <= predicted.seconds * (1 + 1e-12)


def test_half_of_the_pairs_are_live_in_causal_attention():
    dense, causal = (Workload(2**16, GROUPED, each) for each in (False, True))
    assert dense.flops(is_backward=False) == 2 * causal.flops(is_backward=False)


@pytest.mark.parametrize("passes", ["forward", "both"])
@pytest.mark.parametrize(("method", "head_parallel"), [("cqs", "auto"), ("cqs quorums", 1)])
def test_memory_is_what_gpus_allocated(method, head_parallel, passes):
    kind, on = [f"peers {passes}", method], (2, MACHINES["H200"])
    rows = read_rows(RESULTS / "memory-h200-x2.jsonl", lambda row: [row])
    rows = [row for row in rows if [row["benchmark"], row["executor"]] == kind]
    assert len(rows) == 10
    for row in rows:
        details, options = row["details"], {"is_backward": passes == "both"}
        shape = AttentionShape(details["heads"], 128, num_kv_heads=details["kv_heads"])
        case = Workload(details["tokens"], shape, row["case"].startswith("causal"))
        chosen = predict("cqs", case, *on, passes, 0.02, head_parallel=head_parallel)
        peak = predict_plan(case, *on, chosen.head_parallel, **options).peak_bytes
        assert peak == pytest.approx(details["peak_bytes"], rel=0.005)


@pytest.mark.parametrize("head_parallel", [1, 4])
@pytest.mark.parametrize("num_devices", [16, 56])
def test_holders_in_the_same_node_are_counted(num_devices, head_parallel):
    num_tasks = num_devices // head_parallel
    kind = Quorums().fit(num_tasks)
    same = 0
    for rank in range(num_devices):
        workers = {(rank // head_parallel - offset) % num_tasks for offset in kind.interest_set}
        holders = [w * head_parallel + i for w in workers for i in range(head_parallel)]
        same += sum(other // 8 == rank // 8 for other in holders)
    others = same / num_devices - 1, len(kind.interest_set) * head_parallel - 1
    (near, _), (far, _) = near_shares(kind, num_tasks, head_parallel, 8)
    assert math.isclose(near, others[0] / others[1]) and math.isclose(far, 1 - near)


def test_the_command_marks_the_best(capsys):
    options = "--devices 1,8,4096 --seqlen 1M --kv-heads 8 --devices-per-node 8".split()
    assert main(["simulate", *options, "--backward"]) == 0
    output = capsys.readouterr().out
    assert output.count("<") == 3 and re.search(r"ulysses +8 x 1 ", output)
    assert re.search(r"ring +1 x 8 +\d\.\d\d s ", output)
    assert re.search(r"cqs +\d+ x \d+ +\d\d\.\d ms ", output)


@pytest.mark.parametrize("text", ["", "1.5", "nan", "8,", "1T"])
def test_what_is_no_integer_is_refused(text):
    with pytest.raises(SystemExit):
        main(["simulate", f"--devices={text}"])
