"""Hosts on this machine: their links, and what methods send over them."""

import json
import os
import signal
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import cqs.distributed
from benchmarks.__main__ import main
from benchmarks.hosts import Hosts, why_not_hosts

REASON = why_not_hosts()
pytestmark = [pytest.mark.long, pytest.mark.skipif(REASON is not None, reason=str(REASON))]


def fail_on_rank_1():
    if os.environ["RANK"] == "1":
        raise ValueError("no")
    time.sleep(60)


def test_a_rank_that_fails_ends_all(capfd):
    with Hosts([1000.0] * 3) as hosts:
        start = time.monotonic()
        with pytest.raises(RuntimeError, match="rank 1 ended with exit code 1"):
            hosts.run(fail_on_rank_1)
        assert time.monotonic() - start < 30
        namespaces = [each for each in os.listdir("/run/netns") if f"-{os.getpid()}-" in each]
        assert len(namespaces) == 4
    assert "ValueError: no" in capfd.readouterr().err
    assert not [each for each in os.listdir("/run/netns") if f"-{os.getpid()}-" in each]


@pytest.mark.parametrize("ranks_per_host", [1, 2])
def test_links_carry_what_the_plan_promises(tmp_path, capfd, ranks_per_host):
    out = tmp_path / "rows.jsonl"
    words = f"networks --hosts 3 --ranks-per-host {ranks_per_host} --mbit 100 --seqlen 1536"
    words += f" --repeats 1 --kv-heads 2 --causal yes --only cqs,all-gather --out {out}"
    assert main(words.split()) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 2 * 2  # passes, methods
    for row in rows:
        if row["executor"] == "cqs":
            promised, sent = row["details"]["promised_bytes"], row["details"]["link_bytes"]
            assert promised < sent < 1.03 * promised, row
            assert row["median_ms"] > 0.9e3 * 8 * sent / 100e6, "a link of 100 Mbit/s"
        assert row["details"]["predicted_ms"] > 0


def attend_until_a_rank_is_lost(folder):
    """Write the error of calls, one of which loses a rank."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=5))
    q = torch.randn(1, 8, 256, 64)
    try:
        for _ in range(10_000):
            cqs.distributed.attention(q, q, q)
    except Exception as error:
        found = type(error).__name__, str(error)
        Path(folder, os.environ["RANK"]).write_text(json.dumps(found))


@pytest.mark.parametrize("fault", ["unplug", "freeze", "slow", "part"])
def test_survivors_raise_when_the_network_fails(tmp_path, fault):
    with Hosts([100.0] * 4) as hosts:
        processes = hosts.start(partial(attend_until_a_rank_is_lost, tmp_path))
        time.sleep(4)
        start = time.monotonic()
        if fault == "unplug":
            hosts.unplug(2)
        elif fault == "freeze":
            os.kill(processes[2].pid, signal.SIGSTOP)
        elif fault == "part":
            hosts.part([2, 3])
        else:
            hosts.set_rate(2, 0.01)
        survivors = {0, 1, 3} if fault == "freeze" else {0, 1, 2, 3}
        for rank in survivors:
            processes[rank].join(40)
            assert processes[rank].exitcode == 0, rank
        assert time.monotonic() - start < 40
        for rank in survivors:
            name, message = json.loads(Path(tmp_path, str(rank)).read_text())
            assert name in ("LostError", "RuntimeError") and "rank" in message
