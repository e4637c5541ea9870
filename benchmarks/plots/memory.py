"""Plot of memory over time."""

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
    """Plot allocated memory over time.

    Args:
        samples: Ascending times in seconds and the allocated bytes from each time on. They are
            returned by :func:`benchmarks.memory_samples.record_memory`, and by
            :func:`~benchmarks.memory_samples.samples_of_snapshot` for a history that PyTorch
            recorded.
        axes: Matplotlib axes to draw on, which may have other samples on it; ``None`` makes a new
            figure.
        predicted_bytes: Predicted peak in bytes, drawn as a dashed line; ``None`` draws none.
        label: Label of the samples; the legend adds their peak.

    Returns:
        The matplotlib axes.

    Raises:
        ValueError: There are no samples.
    """
    if not samples:
        raise ValueError("samples must have at least one element, got none")
    axes = new_axes((6.4, 3.6)) if axes is None else axes
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
