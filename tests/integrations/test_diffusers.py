"""Models of diffusers with attention by cqs equal those with diffusers' own, on any ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from diffusion_models import FAMILIES, SIZES, make_model
from diffusion_ranks import errors_of

from cqs.integrations.diffusers import register

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
NUM_RANKS = ("2", "3", "5")

register()


def of_family_and_size(test):
    for name, values in ("family", FAMILIES), ("size", SIZES):
        test = pytest.mark.parametrize(name, values)(test)
    return test


def set_cqs(model):
    model.set_attention_backend("cqs")
    return model


@of_family_and_size
def test_one_process_equals_native(family, size):
    assert max(errors_of(set_cqs(make_model(family, SIZES[size][0])), family, size)) < 1e-5


@pytest.fixture(scope="module")
def found_on_ranks():
    folders = ("", "tests/distributed", "tests/integrations")
    paths = os.pathsep.join(str(ROOT / folder) for folder in folders)
    program = [sys.executable, ROOT / "tests/integrations/diffusion_ranks.py", *NUM_RANKS]
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@of_family_and_size
@pytest.mark.parametrize("num_ranks", NUM_RANKS)
def test_ranks_equal_one_process(found_on_ranks, num_ranks, family, size):
    assert max(found_on_ranks[num_ranks][f"{family}, {size}"]) < 1e-5


def test_compiled_ranks_equal_one_process(found_on_ranks):
    assert max(found_on_ranks["2"]["compiled"]) < 1e-5
