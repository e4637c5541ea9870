"""The case study comes out as published, and what is measured is what the plan says."""

from dataclasses import asdict, replace

import pytest

from benchmarks import case_measurement, memory_samples
from benchmarks.case_measurement import longest_task, measure, plan_case
from benchmarks.memory_samples import record_resident
from cqs.report.passes import MeasuredPass
from cqs.report.settings import Settings
from cqs.scheduler import Quorums, make_plan

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.long]
SMALL = Settings("local", 300, num_heads=2, num_kv_heads=2, head_dim=16, dtype="float32", repeats=2)
PUBLISHED = {
    4: (7500, 15000, 22500, 30000, 33750, 34500, 35250, 36000, 36750),
    7: (4287, 8572, 12858, 17144, 19287, 19715, 20144, 20572, 21000),
    8: (5000, 10000, 15000, 20000, 22500, 23000, 23500, 24000, 24500),
    31: (1937, 3873, 5808, 7743, 8711, 8904, 9099, 9292, 9486),
}
"""Longest subsequences of 10,000 to 49,000 tokens (Bian and Somani, IEEE Access 2025)."""
needs_statm = pytest.mark.skipif(not memory_samples.STATM.exists(), reason="needs /proc/self/statm")


def longest(tokens, num_tasks):
    return longest_task(plan_case(replace(SMALL, tokens=tokens), num_tasks)).held_tokens


@pytest.mark.parametrize("num_tasks", PUBLISHED)
def test_no_subsequence_is_longer_than_published(num_tasks):
    """Published sets are chosen by chance: one token may be saved."""
    found = [longest(tokens, num_tasks) for tokens in case_measurement.TOKENS]
    saved = [before - now for before, now in zip(PUBLISHED[num_tasks], found, strict=True)]
    assert set(saved) <= {0, 1} and saved[0] == 0


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"pattern": "strided(16)"}], ids=str)
def test_rows_say_what_the_plan_says(options):
    settings, ticks = replace(SMALL, **options), []
    rows = measure(settings, (1, 4, 7), lambda: ticks.append(1))
    assert len(ticks) == 3 + settings.repeats
    work = MeasuredPass(settings, "forward")
    for row, number in zip(rows, (1, 4, 7), strict=True):
        options = {"is_causal": settings.is_causal, "pattern": settings.make_pattern()}
        kind = Quorums(row.interest_set)
        plan = make_plan(settings.tokens, num_tasks=number, kind=kind, **options)
        task = longest_task(plan)
        assert asdict(settings).items() <= asdict(row).items()
        assert row.num_tasks == number and row.tile == plan.tile
        assert row.held_tokens == max(each.held_tokens for each in plan.tasks)
        assert row.predicted_bytes == work.predict_bytes(task, work.backend)
        assert row.peak_bytes == max(row.sample_bytes) and row.samples[0] == (0, 0)
        assert row.sample_seconds == sorted(row.sample_seconds) and row.median_ms > 0
        assert row.whole_ms == rows[0].median_ms
    assert rows[0].ratio == 1


@needs_statm
def test_more_workers_hold_less_memory_and_no_less_than_predicted():
    settings = replace(SMALL, tokens=1500, num_heads=64, num_kv_heads=64, head_dim=64, repeats=1)
    rows = measure(settings, (1, 7, 31))
    for row in rows:
        assert row.memory == case_measurement.RESIDENT and len(row.samples) > 3
        assert row.peak_bytes == pytest.approx(row.predicted_bytes, abs=4 * 2**20)
        assert row.sample_bytes[-1] < row.peak_bytes / 2
    held = [row.peak_bytes for row in rows]
    assert held[0] > 1.5 * held[1] > 2 * held[2]


def test_a_system_without_a_resident_set_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(memory_samples, "STATM", tmp_path / "statm")
    with pytest.raises(NotImplementedError, match="the resident set is read from .*statm"):
        record_resident(lambda: None)
