"""Workers that meet in a picture can be told apart, by colour-blind people too."""

import colorspacious
import numpy as np
import pytest
from matplotlib.colors import to_rgb

from cqs import make_plan
from cqs.plotting.colors import letter_color, task_colors

SIGHTS = (None, "protanomaly", "deuteranomaly", "tritanomaly")


def perceived(colors):
    """CAM02-UCS ``[4, ..., 3]`` of sRGB in [0, 1]: of normal sight, and without a kind of cones."""
    seen = []
    for sight in SIGHTS:
        space = "sRGB1" if sight is None else {"name": "sRGB1+CVD", "cvd_type": sight}
        severe = space if sight is None else space | {"severity": 100}
        rgb = np.clip(colorspacious.cspace_convert(colors, severe, "sRGB1"), 0, 1)
        seen.append(colorspacious.cspace_convert(rgb, "sRGB1", "CAM02-UCS"))
    return np.stack(seen)


def neighbours(plan):
    """The pairs of workers whose pairs of tokens touch, as two arrays."""
    owners = np.full((plan.seqlen_q, plan.seqlen_kv), -1)
    for task in plan.tasks:
        for queries, keys, is_causal in task.blocks:
            part = owners[queries.start : queries.stop, keys.start : keys.stop]
            part[np.tri(*part.shape, dtype=bool) if is_causal else ...] = task.index
    sides = [(owners[1:], owners[:-1]), (owners[:, 1:], owners[:, :-1])]
    touching = np.concatenate([np.stack(side).reshape(2, -1) for side in sides], axis=1)
    return touching[:, (touching[0] != touching[1]) & (touching >= 0).all(axis=0)]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("num_tasks", "least"), [(3, 45), (8, 18), (31, 8), (111, 3.9)])
def test_neighbours_can_be_told_apart(num_tasks, least, is_causal):
    """A difference of 1 is about the smallest that is seen."""
    first, second = neighbours(make_plan(4 * num_tasks, num_tasks=num_tasks, is_causal=is_causal))
    seen = perceived(np.array([to_rgb(color) for color in task_colors(num_tasks)]))
    difference = np.linalg.norm(seen[:, first] - seen[:, second], axis=-1)
    assert difference.min() >= least, dict(zip(SIGHTS, difference.min(axis=1), strict=True))


def test_letters_contrast_with_every_colour():
    def luminance(color):
        return colorspacious.cspace_convert(to_rgb(color), "sRGB1", "XYZ1")[1]

    for color in task_colors(128):
        light, dark = sorted((luminance(color), luminance(letter_color(color))), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, color


def test_beyond_128_colours_repeat():
    assert task_colors(130)[128:] == task_colors(2)
    assert len(set(task_colors(128))) == 128
