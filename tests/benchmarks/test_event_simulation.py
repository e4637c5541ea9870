"""Played calls take what arithmetic says where it says something, and lose no task."""

import json
import math
from collections import Counter, defaultdict
from itertools import pairwise

import numpy as np
import pytest

from benchmarks.__main__ import main
from benchmarks.event_simulation import Trouble, play_steps, play_tasks, read_relative_times

HOUR = 3600.0
DEADLY = Trouble(life_hours=1.0, notice_seconds=5.0, repair_seconds=60.0)


def rng(seed=0):
    return np.random.default_rng(seed)


def mean(play, trials=2000):
    """The mean time, and four of its standard errors."""
    generator = rng()
    seconds = np.array([play(generator).seconds for _ in range(trials)])
    return seconds.mean(), 4 * seconds.std() / math.sqrt(trials)


@pytest.mark.parametrize(("num_tasks", "num_devices"), [(1, 1), (7, 7), (8, 3), (3, 8), (64, 4)])
def test_without_trouble_calls_take_the_analytic_time(num_tasks, num_devices):
    played = play_tasks(2.5, num_tasks, num_devices, Trouble(), rng())
    assert played.seconds == 2.5 * math.ceil(num_tasks / num_devices)
    for num_saves in (0, 3):
        steps = play_steps(2.5, num_tasks, num_devices, Trouble(), rng(), num_saves=num_saves)
        assert steps.seconds == 2.5 * num_tasks
        assert steps.num_deaths == played.num_deaths == steps.lost_seconds == 0


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("num_tasks", "num_devices"), [(1, 1), (40, 7), (5, 9)])
def test_every_task_is_finished_once_and_no_device_does_two(seed, num_tasks, num_devices):
    trouble = Trouble(0.05, 5.0, 30.0, 0.3, 2.0, (0.8, 1.0, 1.1, 1.5))
    played = play_tasks(60.0, num_tasks, num_devices, trouble, rng(seed))
    finished = Counter(each.task for each in played.attempts if each.is_finished)
    assert finished == dict.fromkeys(range(num_tasks), 1)
    assert played.seconds == max(each.stop for each in played.attempts)
    of_device = defaultdict(list)
    for attempt in sorted(played.attempts, key=lambda attempt: attempt.start):
        of_device[attempt.device].append(attempt)
        assert attempt.start < attempt.stop
    for attempts in of_device.values():
        for one, other in pairwise(attempts):
            gap = 0 if one.is_finished else trouble.repair_seconds
            assert other.start >= one.stop + gap
    lost = [each for each in played.attempts if not each.is_finished]
    assert played.lost_seconds == sum(each.stop - each.start for each in lost)
    assert played.num_deaths >= len(lost)
    for dead in lost:
        again = min(
            a.start for a in played.attempts if a.task == dead.task and a.start > dead.start
        )
        assert again >= dead.stop + trouble.notice_seconds


def test_steps_with_deaths_take_what_the_formula_says():
    """Work T that begins again after failures at rate r and repairs R: (exp(rT) - 1)(1 / r + R).

    On average; Daly, Future Generation Computer Systems 22, 2006, without checkpoints.
    """
    rate, work = 8 / HOUR, 400.0
    expected = (math.exp(rate * work) - 1) * (1 / rate + DEADLY.repair_seconds)
    found, error = mean(lambda generator: play_steps(50.0, 8, 8, DEADLY, generator))
    assert abs(found - expected) < error < 0.1 * expected
    saved, error = mean(lambda generator: play_steps(50.0, 8, 8, DEADLY, generator, num_saves=3))
    part = (math.exp(rate * work / 4) - 1) * (1 / rate + DEADLY.repair_seconds)
    assert abs(saved - 4 * part) < error < 0.1 * expected


def test_a_task_alone_takes_what_the_formula_says():
    rate, work = 1 / HOUR, 1800.0
    expected = (math.exp(rate * work) - 1) * (1 / rate + DEADLY.repair_seconds)
    found, error = mean(lambda generator: play_tasks(work, 1, 1, DEADLY, generator))
    assert abs(found - expected) < error < 0.1 * expected


@pytest.mark.parametrize(
    "play",
    [
        lambda trouble, generator: play_tasks(30.0, 24, 8, trouble, generator),
        lambda trouble, generator: play_steps(11.25, 8, 8, trouble, generator),
        lambda trouble, generator: play_steps(11.25, 8, 8, trouble, generator, num_saves=2),
    ],
    ids=["tasks", "steps", "saved"],
)
def test_more_trouble_is_never_faster_on_average(play):
    def seconds(**trouble):
        trouble = Trouble(notice_seconds=5, repair_seconds=20, **trouble)
        return mean(lambda generator: play(trouble, generator), trials=400)

    worse = [seconds(life_hours=hours) for hours in (math.inf, 2.0, 0.5, 0.1)]
    assert worse[0] == (90.0, 0.0)
    for (less, _), (more, error) in pairwise(worse):
        assert more > less + error / 4
    slow = [seconds(slow_share=share, slow_factor=1.5)[0] for share in (0.0, 0.1, 0.5, 1.0)]
    assert slow == sorted(slow) and slow[-1] == 135.0
    straying = seconds(relative_times=(1.0, 1.0, 1.2))[0]
    assert 90.0 < straying < 108.0


def test_what_steps_lose_is_what_all_devices_did():
    played = play_steps(100.0, 1, 50, Trouble(life_hours=2.0), rng(3))
    assert played.num_deaths > 0
    assert played.lost_seconds == pytest.approx(50 * (played.seconds - 100.0))


def test_the_longest_of_many_draws_is_drawn_as_such():
    trouble = Trouble(relative_times=(1.0, 2.0))
    played = play_steps(1.0, 4000, 9, trouble, rng())
    assert played.seconds / 4000 == pytest.approx(1 + 9 / 10, rel=0.01)


@pytest.mark.parametrize("play", [play_tasks, play_steps])
def test_a_seed_says_what_happens(play):
    trouble = Trouble(5.0, 5.0, 60.0, 0.1, 1.2, (0.9, 1.0, 1.3))
    once, again, other = (play(60.0, 32, 8, trouble, rng(seed)) for seed in (7, 7, 8))
    assert once == again != other


def test_devices_that_die_too_fast_are_given_up(monkeypatch):
    monkeypatch.setattr("benchmarks.event_simulation._MOST_DEATHS", 1000)
    for play in (play_tasks, play_steps):
        with pytest.raises(OverflowError, match="not done after 1000 deaths"):
            play(HOUR, 2, 2, Trouble(life_hours=0.01), rng())


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"life_hours": 0}, "life_hours must be positive, got 0"),
        ({"slow_factor": -1}, "slow_factor must be positive, got -1"),
        ({"repair_seconds": -1}, "repair_seconds must be at least 0, got -1"),
        ({"notice_seconds": math.inf}, "notice_seconds must be at least 0, got inf"),
        ({"slow_share": 2}, "slow_share must lie in 0..1, got 2"),
        ({"relative_times": ()}, "relative_times must be positive and ascending"),
        ({"relative_times": (2.0, 1.0)}, "relative_times must be positive and ascending"),
    ],
)
def test_impossible_trouble_is_refused(numbers, message):
    with pytest.raises(ValueError, match=message):
        Trouble(**numbers)


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    times = [(9, 10.0, 9.5, 11.0), (5, 1.0, 0.9, 1.3), (3, 1.0, 0.1, 9.0)]
    names = "repeats", "median_ms", "p20_ms", "p80_ms"
    path.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in times))
    return path


def test_times_stray_as_rows_say(rows):
    assert read_relative_times(str(rows)) == pytest.approx((0.9, 0.95, 1.0, 1.0, 1.1, 1.3))
    rows.write_text('{"repeats": 9}\n')
    with pytest.raises(ValueError, match="line 1: KeyError"):
        read_relative_times(str(rows))
    rows.write_text("")
    with pytest.raises(ValueError, match="has no rows of 5 repeats or more"):
        read_relative_times(str(rows))


def test_the_command_plays_and_draws(capsys, tmp_path, rows):
    picture = tmp_path / "trouble.png"
    options = "--devices 8,32 --seqlen 1M --life opt,10 --slow 0.1:1.2 --trials 3".split()
    assert main(["simulate", *options, "--spread", str(rows), "--picture", str(picture)]) == 0
    header, _, *table = capsys.readouterr().out.splitlines()
    assert header.split()[:4] == ["devices", "life", "h", "way"] and len(table) == 2 * 2 * 5
    assert table[0].split()[:3] == ["8", "13831", "steps"]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_command_draws_forecasts(tmp_path):
    picture = tmp_path / "forecasts.svg"
    options = "--devices 8,64,4096 --kv-heads 8 --slack 1".split()
    assert main(["simulate", *options, "--picture", str(picture)]) == 0
    assert "<svg" in picture.read_text()


def test_slack_saves_memory_and_takes_no_more_time_than_it_may(capsys):
    def of_quorums(*options):
        assert main(["simulate", *"--devices 256 --kv-heads 8 --causal no".split(), *options]) == 0
        (line,) = (row for row in capsys.readouterr().out.splitlines() if " cqs  " in row)
        *_, milliseconds, _, _, _, peak = line.removesuffix("<").split()
        return float(milliseconds), float(peak)

    fastest, frugal = of_quorums(), of_quorums("--slack", "1")
    assert fastest[0] <= frugal[0] <= 1.01 * fastest[0] and frugal[1] < 0.8 * fastest[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--slack", "-1"], "--slack must be at least 0, got -1"),
        (["--picture", "life.doc"], "picture must end in one of"),
        (["--tasks", "0"], "--tasks must be at least 1, got 0"),
        (["--trials", "0"], "--trials must be at least 1, got 0"),
        (["--saves", "-1"], "--saves must be at least 0, got -1"),
        (["--repair", "-1"], "repair_seconds must be at least 0, got -1"),
        (["--slow", "2:1"], "slow_share must lie in 0..1, got 2"),
    ],
)
def test_impossible_plays_are_refused(capsys, options, message):
    assert main(["simulate", "--devices", "8", "--life", "opt", *options]) == 2
    output, error = capsys.readouterr()
    assert output == "" and message in error and error.count("\n") == 1


@pytest.mark.parametrize("options", ["--life=", "--life=gpt", "--slow=0.1", "--slow=a:b"])
def test_options_that_cannot_be_read_are_refused(options):
    with pytest.raises(SystemExit):
        main(["simulate", options])
