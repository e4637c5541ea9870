"""The two linear layers of tensor parallelism, and what they communicate."""

import pytest
from models import checked_layers, layers_differ, traffic

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("scatter_dim", [None, 1])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_their_gradient_is_that_of_differences(mesh_ranks, num_ranks, scatter_dim):
    assert mesh_ranks.run(num_ranks, checked_layers, scatter_dim) == [True] * num_ranks


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_they_are_plain_layers_cut(mesh_ranks, num_ranks):
    assert max(mesh_ranks.run(num_ranks, layers_differ)) < 1e-13


def test_they_communicate_as_in_megatron(mesh_ranks):
    for found in mesh_ranks.run(4, traffic, None):
        assert found == [{}, {"all_reduce": 1}, {"all_reduce": 1}]
    for found in mesh_ranks.run(4, traffic, 1):
        assert found == [
            {},
            {"reduce_scatter_tensor": 1},
            {"all_gather_into_tensor": 1, "all_reduce": 1},
        ]
    for found in mesh_ranks.run(1, traffic, None):
        assert found == [{}, {}, {}]
