"""Pictures show the mask, or the share of every tile."""

import numpy as np
import pytest

from cqs.patterns import causal, from_mask, longformer


def picture(axes):
    (image,) = axes.images
    return np.asarray(image.get_array())


def test_short_patterns_are_drawn_pair_by_pair():
    pattern = longformer(4, 2)
    axes = pattern.draw(40, 50)
    assert (picture(axes) == pattern.to_mask(40, 50)).all()
    assert axes.get_title().startswith("sliding_window(2, 2) | global_tokens(range(0, 2)), ")


def test_long_patterns_are_drawn_by_tiles():
    shares = picture(causal().draw(10**9))
    assert shares.shape[0] == shares.shape[1] < 200
    assert (shares[np.tril_indices_from(shares, -1)] == 1).all()
    assert np.diag(shares) == pytest.approx(0.5, abs=1e-6)
    assert not np.triu(shares, 1).any()


def test_pictures_go_on_given_axes_and_may_be_empty():
    from matplotlib.figure import Figure

    axes = Figure().add_subplot()
    assert causal().draw(0, axes=axes) is axes
    assert picture(from_mask(np.zeros((3, 0), dtype=bool)).draw(3, 0)).size
