"""Plot of the memory of one of W tasks relative to that of one task alone."""

from collections.abc import Mapping, Sequence
from typing import Any

from cqs.plotting.colors import OKABE_ITO
from cqs.plotting.figures import PLAIN, add_legend, make_logarithmic, new_axes


def plot_shares(shares: Mapping[str, Mapping[int, float]], axes: Any = None) -> Any:
    """Plot memory relative to one task against the number of tasks, with 1/W and 1/sqrt(W).

    Args:
        shares: Label of a line -> number of tasks -> memory relative to one task.
        axes: Matplotlib axes to draw on; ``None`` makes a new figure.

    Returns:
        The matplotlib axes.
    """
    axes = new_axes((5, 3.4)) if axes is None else axes
    numbers = sorted({number for line in shares.values() for number in line})
    for power, label in ((-1, "$1/W$"), (-0.5, r"$1/\sqrt{W}$")):
        ideal: Sequence[float] = [number**power for number in numbers]
        axes.plot(numbers, ideal, color="gray", linewidth=1)
        axes.annotate(label, (numbers[-1], ideal[-1]), (3, 0), textcoords="offset points")
    for (label, line), color, marker in zip(shares.items(), OKABE_ITO[1::-1], "os", strict=True):
        axes.plot(*zip(*sorted(line.items()), strict=True), marker, color=color, label=label)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(PLAIN)
    axes.set(xlabel="tasks (W)", ylabel="memory of a task / of one task")
    make_logarithmic(axes)
    return add_legend(axes, 1)
