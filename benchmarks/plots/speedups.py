"""Plot of the speed-up of patterns over dense attention."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cqs.plotting.figures import new_axes

if TYPE_CHECKING:
    from cqs.report.measurement import Measurement


def plot_speedups(rows: Sequence["Measurement"], axes: Any = None) -> Any:
    """Plot the speed-up of patterns over dense attention against the sequence length.

    Args:
        rows: Rows of the benchmark ``patterns``; forward passes by ``cqs`` are drawn.
        axes: Matplotlib axes to draw on; ``None`` makes a new figure.

    Returns:
        The matplotlib axes.
    """
    axes = new_axes((9, 6)) if axes is None else axes
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row.executor == "cqs" and row.benchmark == "patterns forward":
            name = row.case.rpartition("-")[0]
            lines.setdefault(name, []).append((row.details["tokens"], 1 / row.ratio))
    markers = "osD^v<>PX*"
    for i, (name, points) in enumerate(lines.items()):
        tokens, speedups = zip(*sorted(points), strict=True)
        axes.plot(tokens, speedups, marker=markers[i // 10 % 10], color=f"C{i % 10}", label=name)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xlabel("tokens")
    axes.set_ylabel(f"speed-up over {rows[0].baseline} attention")
    axes.set_title(f"{rows[0].device}, {rows[0].dtype}")
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    return axes
