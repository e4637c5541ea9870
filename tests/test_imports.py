import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]


def run(*arguments):
    command = [sys.executable, "-c", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def modules_after(statement):
    """The modules that a fresh interpreter has imported after ``statement``."""
    done = run(f"import sys\n{statement}\nprint(*sys.modules)")
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split())


PLAN = "cqs.make_plan(10**7, num_tasks=31, is_causal=True)"


PATTERN = "cqs.patterns.strided(8).bind(10**9).count(range(9), range(9))"
COST = "from cqs.scheduler import *; predict_cost(make_plan(10**7, num_tasks=8).task(0), "
COST += "AttentionShape(8, 64))"
SIMULATION = "from cqs.__main__ import main; main(['simulate', '--devices', '8,4096'])"


@pytest.mark.parametrize(
    ("statement", "used", "unused"),
    [
        (f"{PLAN}.validate()", "cqs.scheduler.plan", "torch ray numpy"),
        (f"{PLAN}.task(30).blocks", "cqs.scheduler.plan", "torch ray numpy"),
        (f"cqs.Plan.from_json({PLAN}.to_json())", "cqs.scheduler.plan", "torch ray numpy"),
        (COST, "cqs.scheduler.plan", "torch ray numpy"),
        (SIMULATION, "cqs.commands.simulate", "torch ray numpy"),
        (PATTERN, "cqs.patterns", "torch ray triton matplotlib"),
        ("import cqs.plotting", "cqs.plotting.owners", "matplotlib numpy torch ray"),
    ],
)
def test_modules_are_loaded_when_they_are_used(statement, used, unused):
    imported = modules_after(f"import cqs\n{statement}")
    assert used in imported and not imported & set(unused.split())


def test_the_package_does_without_its_benchmarks():
    for source in (ROOT / "cqs").rglob("*.py"):
        assert not re.search(r"^\s*(from|import) benchmarks", source.read_text(), re.M), source


def test_attention_is_loaded_when_it_is_used():
    imported = modules_after("import cqs; cqs.attention")
    assert {"torch", "cqs.api"} <= imported and not imported & {"ray", "triton", "torch._dynamo"}


def test_memory_is_measured_without_what_compiles():
    """It takes as long to import as all the rest, and every actor would."""
    imported = modules_after(
        "import torch; from cqs.worker.memory import measure_peak_bytes; "
        "measure_peak_bytes(lambda: torch.ones(3), torch.device('cpu'))"
    )
    assert "cqs.worker.memory" in imported and "torch._dynamo" not in imported


def test_an_unknown_name_is_refused():
    import cqs

    with pytest.raises(AttributeError, match="'cqs' has no attribute 'flash'"):
        _ = cqs.flash
    for name in ("attention", "make_plan", "Plan", "Cluster", "patterns"):
        assert name in cqs.__all__


@pytest.mark.parametrize(
    ("statement", "name"),
    [("import cqs.streaming", "cqs.streaming"), ("cqs.Cluster", "cqs.Cluster")],
)
def test_what_needs_linux_says_so(statement, name):
    done = run(f"import sys, cqs, torch, tqdm\nsys.platform = 'darwin'\n{statement}")
    assert done.returncode == 1
    assert f"ImportError: {name} requires Linux, got darwin" in done.stderr
