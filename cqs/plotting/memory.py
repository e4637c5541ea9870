"""Memory over time."""

from collections.abc import Sequence
from typing import Any

from cqs.plotting.figures import new_axes


def plot_memory(
    samples: Sequence[tuple[float, int]],
    axes: Any = None,
    *,
    predicted_bytes: int | None = None,
    label: str = "held",
) -> Any:
    """Plot what is held against time.

    Args:
        samples: Seconds, ascending, and the bytes held from then on, as
            :func:`cqs.worker.memory.record_memory` returns them, and
            :func:`~cqs.worker.memory.samples_of_snapshot` of a history that PyTorch recorded.
        axes: Matplotlib axes to draw on, which may have other samples on it; ``None`` makes a new
            figure.
        predicted_bytes: The peak that a plan predicts, drawn as a dashed line.
        label: What the samples are of; the legend adds their peak.

    Returns:
        The matplotlib axes.

    Raises:
        ValueError: if there are no samples.
    """
    if not samples:
        raise ValueError("there are no samples of memory to plot")
    axes = new_axes((8, 4)) if axes is None else axes
    seconds, held = zip(*samples, strict=True)
    mebibytes = [each / 2**20 for each in held]
    milliseconds = [1e3 * (each - seconds[0]) for each in seconds]
    (line,) = axes.step(
        milliseconds, mebibytes, where="post", label=f"{label}, peak {max(mebibytes):,.4g} MiB"
    )
    axes.fill_between(milliseconds, mebibytes, step="post", color=line.get_color(), alpha=0.2)
    if predicted_bytes is not None:
        axes.axhline(
            predicted_bytes / 2**20,
            color=line.get_color(),
            linestyle="--",
            label=f"predicted {predicted_bytes / 2**20:,.4g} MiB",
        )
    axes.set_ylim(bottom=0)
    axes.set(xlabel="milliseconds", ylabel="MiB")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False, fontsize="small")
    return axes
