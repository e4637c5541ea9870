"""Pictures of patterns show the mask, or the share of every tile."""

import numpy as np
import pytest

from cqs.patterns import causal, from_mask, longformer, sliding_window
from cqs.plotting import plot_density


def picture(axes):
    (image,) = axes.images
    return np.asarray(image.get_array())


def test_short_patterns_are_drawn_pair_by_pair():
    pattern = longformer(4, 2)
    axes = plot_density(pattern, 40, 50)
    assert (picture(axes) == pattern.to_mask(40, 50)).all()
    title = "sliding_window(2, 2) | global_tokens(range(0, 2)), 13.9 %"
    assert axes.get_title().replace("\n", " ") == title


def test_long_patterns_are_drawn_by_tiles():
    shares = picture(plot_density(causal(), 10**9))
    assert shares.shape[0] == shares.shape[1] < 200
    assert (shares[np.tril_indices_from(shares, -1)] == 1).all()
    assert np.diag(shares) == pytest.approx(0.5, abs=1e-6)
    assert not np.triu(shares, 1).any()


def test_pictures_go_on_given_axes_and_may_be_empty():
    from matplotlib.figure import Figure

    axes = Figure().add_subplot()
    assert plot_density(causal(), 0, axes=axes) is axes
    assert picture(plot_density(from_mask(np.zeros((3, 0), dtype=bool)), 3, 0)).size


def test_a_single_live_pair_of_a_tile_is_not_white():
    axes = plot_density(sliding_window(1, 0), 10**6)
    (image,) = axes.images
    colors = image.to_rgba(image.get_array())
    live = np.asarray(image.get_array()) > 0
    assert 0 < np.asarray(image.get_array())[live].min() < 1e-7
    assert (colors[live, 3] == 1).all() and (colors[live, :3].min(axis=1) < 0.5).all()
    assert (colors[~live, 3] == 0).all()
