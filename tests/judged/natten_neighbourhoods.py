"""NATTEN: neighbourhoods in one, two and three dimensions, as its block masks define them."""

import sys
from functools import partial
from itertools import product
from math import prod
from unittest import mock

import torch

from .flex_masks import check_block_mask
from .framework import Case, Suite
from .sources import unpacked

VERSION = "0.21.7"
_SHAPES = {
    1: [(32,), (81,), (128,)],
    2: [(8, 8), (12, 10), (16, 7)],
    3: [(4, 4, 4), (5, 6, 4), (8, 3, 5)],
}
"""Number of dimensions -> extents of the tokens."""


def suite():
    """Return neighbourhoods of all kernel sizes, strides, dilations and causal dimensions."""
    path = str(unpacked(f"natten=={VERSION}") / "src")
    with mock.patch.object(sys, "path", [path, *sys.path]):  # it runs without its compiled part
        from natten.backends.flex import get_na_flex_mask
    return Suite("NATTEN", f"natten {VERSION}", _cases(get_na_flex_mask))


def _cases(make):
    for dimensions, shapes in _SHAPES.items():
        for shape, kernel, stride, dilation, causal in product(
            shapes, (2, 3, 5, 7), (1, 2), (1, 2), (False, True)
        ):
            kernels = tuple(min(kernel, extent // dilation) for extent in shape)
            if min(kernels) < 2 or stride > min(kernels):
                continue
            options = {
                "qkv_shape": shape,
                "kernel_size": kernels,
                "stride": (stride,) * dimensions,
                "dilation": (dilation,) * dimensions,
                "is_causal": (causal,) + (False,) * (dimensions - 1),
            }
            name = " ".join(f"{key}={value}" for key, value in options.items())
            yield Case(name, partial(_check, make, dimensions, options))


def _check(make, dimensions, options):
    block_mask = make("cpu", dimensions, **options)
    length = prod(options["qkv_shape"])
    check_block_mask(block_mask, torch.float64, heads=(2, 2), lengths=(length, length))
