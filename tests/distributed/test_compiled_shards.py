"""``torch.compile`` keeps attention over the shards of two ranks in one graph."""

import pytest
from compiled import (
    attend_by_heads,
    attend_reordered,
    check_operator,
    compare,
    compare_in_autocast,
    compare_meshes,
    count_graphs,
)
from programs import raised

from cqs.patterns import causal, documents, per_head, sliding_window
from cqs.scheduler import Grid2D

pytestmark = pytest.mark.slow

WINDOW, DOCUMENTS = sliding_window(5, 2), documents([0, 13, 14, 40])
CALLS = {
    "full": {},
    "causal": {"is_causal": True},
    "window": {"pattern": sliding_window(7)},
    "documents": {"pattern": DOCUMENTS, "is_causal": True},
    "per-head": {"pattern": per_head([[WINDOW, WINDOW, causal(), DOCUMENTS]])},
    "dropout": {"dropout_p": 0.3},
    "dropout-seed": {"dropout_p": 0.3, "seed": 7, "is_causal": True},
    "lse": {"return_lse": True, "scale": 0.7},
    "plan": {"plan": Grid2D(1, 1), "head_parallel": 2, "num_chunks": 1, "links": (1e9, 1e-5)},
    "max_bytes": {"max_bytes": 60_000, "is_causal": True},
    "verified": {"verify": True, "backend": "reference"},
}


@pytest.mark.parametrize("options", CALLS.values(), ids=CALLS)
def test_a_graph_has_the_whole_call(ranks, options):
    """Bitwise identical to an eager call, in a second run of the graph too."""
    for differences in ranks.run(2, compare, options):
        assert max(differences) == 0


@pytest.mark.parametrize(
    "options",
    [{}, {"is_causal": True, "joint_position": "rear", "return_lse": True}],
    ids=["full", "causal"],
)
def test_a_graph_has_joint_tokens(ranks, options):
    """Also other numbers of them than in the first pass."""
    for differences in ranks.run(2, compare, options, num_joint=(5, 5, 7)):
        assert max(differences) == 0


@pytest.mark.parametrize("num_joint", [0, 5])
def test_autocast_casts_what_it_casts_for_sdpa(ranks, num_joint):
    """In calls, compiled calls and prepared calls."""
    assert ranks.run(2, compare_in_autocast, num_joint) == [[True] * 3] * 2


@pytest.mark.parametrize("recomputed", ["all", "selected"])
def test_activation_checkpointing(ranks, recomputed):
    options = {"is_causal": True, "dropout_p": 0.2}
    for differences in ranks.run(2, compare, options, recomputed):
        assert max(differences) == 0


def test_new_lengths_and_patterns_do_not_recompile(ranks):
    for found in ranks.run(2, count_graphs):
        assert found[1:] == [found[1]] * 3


def test_the_operator_passes_opcheck(ranks):
    ranks.run(2, check_operator)


def test_calls_that_the_compiler_has_reordered_on_one_rank(ranks):
    """They have equal arguments, so each would be paired with the other one."""
    for error, text in ranks.run(2, raised, attend_reordered):
        assert error is ValueError
        assert text == "rank 1 of the group has place in its compiled graph 2, rank 0 has 1"


def test_meshes_and_dtensors(ranks):
    """Uneven shards: 10 and 9 rows."""
    for differences in ranks.run(2, compare_meshes):
        assert set(differences.values()) == {0.0}


def test_dtensors_that_are_not_sharded_on_the_sequence(ranks):
    for error, text in ranks.run(2, raised, attend_by_heads):
        assert error is ValueError and text.startswith("query must have") and "dim=1" in text
