"""The rows of transformers' families: a few are computed again."""

import json

import pytest
import torch
import transformers

from .transformers_families import ROWS, find_families, judge_family, prepare

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def prepared(monkeypatch):
    """Judge as the command does, and restore what it changes for the process."""
    verbosity, threads = transformers.utils.logging.get_verbosity(), torch.get_num_threads()
    prepare()
    yield
    transformers.utils.logging.set_verbosity(verbosity)
    torch.set_num_threads(threads)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.sample(1000)  # the first alone
@pytest.mark.parametrize("family", ["t5", "gpt_oss", "canine", "inkling2", "resnet", "blt"])
def test_a_row_is_what_its_family_does(family):
    rows = {row["family"]: row for row in map(json.loads, ROWS.read_text().splitlines())}
    row = rows[family]
    if row.pop("version") != transformers.__version__:
        pytest.skip("rows of another version of transformers")
    assert judge_family(family) == row


def test_every_family_has_a_row_and_none_fails():
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()]
    if {row["version"] for row in rows} != {transformers.__version__}:
        pytest.skip("rows of another version of transformers")
    assert sorted(row["family"] for row in rows) == find_families()
    outcomes = [row["outcome"] for row in rows]
    assert not {"fails", "differs"} & set(outcomes) and outcomes.count("computed") >= 300
