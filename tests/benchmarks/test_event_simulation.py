"""Simulated calls take the analytic time where there is one, and lose no task."""

import json
import math
from collections import Counter, defaultdict
from functools import partial
from itertools import pairwise

import numpy as np
import pytest

from benchmarks.__main__ import main
from benchmarks.event_simulation import FaultModel, simulate_steps, simulate_tasks

pytestmark = pytest.mark.long

HOUR = 3600.0
FAILING = FaultModel(mtbf_hours=1.0, detection_seconds=5.0, repair_seconds=60.0)


def rng(seed=0):
    return np.random.default_rng(seed)


def mean(simulate, trials=2000):
    """The mean time, and four of its standard errors."""
    generator = rng()
    seconds = np.array([simulate(generator).seconds for _ in range(trials)])
    return seconds.mean(), 4 * seconds.std() / math.sqrt(trials)


@pytest.mark.parametrize(("num_tasks", "num_devices"), [(1, 1), (8, 3), (3, 8)])
def test_without_faults_calls_take_the_analytic_time(num_tasks, num_devices):
    outcome = simulate_tasks(2.5, num_tasks, num_devices, FaultModel(), rng())
    assert outcome.seconds == 2.5 * math.ceil(num_tasks / num_devices)
    given = 2.5, num_tasks, num_devices, FaultModel(), rng()
    for num_saves in (0, 3):
        steps = simulate_steps(*given, num_saves=num_saves)
        assert steps.seconds == 2.5 * num_tasks
        assert steps.num_failures == outcome.num_failures == steps.lost_seconds == 0


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("num_tasks", "num_devices"), [(1, 1), (40, 7), (5, 9)])
def test_every_task_is_finished_once_and_no_device_does_two(seed, num_tasks, num_devices):
    faults = FaultModel(0.05, 5.0, 30.0, 0.3, 2.0, (0.8, 1.0, 1.1, 1.5))
    outcome = simulate_tasks(60.0, num_tasks, num_devices, faults, rng(seed))
    finished = Counter(each.task for each in outcome.attempts if each.is_finished)
    assert finished == dict.fromkeys(range(num_tasks), 1)
    assert outcome.seconds == max(each.stop for each in outcome.attempts)
    of_device = defaultdict(list)
    for attempt in sorted(outcome.attempts, key=lambda attempt: attempt.start):
        of_device[attempt.device].append(attempt)
        assert attempt.start < attempt.stop
    for attempts in of_device.values():
        for one, other in pairwise(attempts):
            gap = 0 if one.is_finished else faults.repair_seconds
            assert other.start >= one.stop + gap
    lost = [each for each in outcome.attempts if not each.is_finished]
    assert outcome.lost_seconds == sum(each.stop - each.start for each in lost)
    assert outcome.num_failures >= len(lost)


def test_steps_with_failures_take_what_the_formula_says():
    """Work T that begins again after failures at rate r and repairs R: (exp(rT) - 1)(1 / r + R).

    On average; Daly, Future Generation Computer Systems 22, 2006, without checkpoints.
    """
    rate, work = 8 / HOUR, 400.0
    for num_saves in (0, 3):
        simulate = partial(simulate_steps, 50.0, 8, 8, FAILING, num_saves=num_saves)
        found, error = mean(simulate)
        parts = num_saves + 1
        expected = (math.exp(rate * work / parts) - 1) * (1 / rate + FAILING.repair_seconds) * parts
        assert abs(found - expected) < error < 0.1 * expected


def test_devices_that_fail_too_often_are_an_error(monkeypatch):
    monkeypatch.setattr("benchmarks.event_simulation._MAX_FAILURES", 1000)
    for simulate in (simulate_tasks, simulate_steps):
        with pytest.raises(OverflowError, match="after 1000 failures"):
            simulate(HOUR, 2, 2, FaultModel(mtbf_hours=0.01), rng())


def test_the_command_simulates_failures_and_draws(capsys, tmp_path):
    picture, rows = tmp_path / "faults.png", tmp_path / "rows.jsonl"
    row = {"repeats": 9, "median_ms": 10.0, "p20_ms": 9.5, "p80_ms": 11.0}
    few = {"repeats": 3, "median_ms": 1.0, "p20_ms": 0.1, "p80_ms": 9.0}
    rows.write_text(f"{json.dumps(row)}\n{json.dumps(few)}\n")
    options = "--devices 8,32 --seqlen 1M --mtbf opt,10 --slow 0.1:1.2 --trials 3".split()
    assert main(["simulate", *options, "--spread", str(rows), "--picture", str(picture)]) == 0
    header, _, *table = capsys.readouterr().out.splitlines()
    assert header.split()[:4] == ["devices", "MTBF", "h", "schedule"] and len(table) == 2 * 2 * 5
    assert table[0].split()[:3] == ["8", "13831", "steps"]
    assert picture.read_bytes().startswith(b"\x89PNG")
