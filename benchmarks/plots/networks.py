"""Plot of methods of context parallelism on hosts with slow links."""

from collections.abc import Mapping, Sequence
from typing import Any

from cqs.plotting.figures import PLAIN

Rows = Sequence[Mapping[str, Any]]
"""Rows of the benchmark ``networks``, as the JSON objects of its files."""

_STYLES = {
    "cqs": ("#000000", "o"),
    "ring": ("#0072b2", "s"),
    "all-gather": ("#d55e00", "^"),
    "ulysses": ("#009e73", "D"),
    "ulysses in two": ("#56b4e9", "v"),
    "grid": ("#cc79a7", "P"),
}
"""Colour of Okabe and Ito ("Color Universal Design", 2008) and marker of each method."""
_PANELS = (False, 8), (True, 8), (False, 2), (True, 2)


def plot_networks(rows: Rows, passes: str = "both") -> Any:
    """Plot the time of each method relative to ``cqs`` against the number of hosts.

    Args:
        rows: Rows of hosts with one rank each.
        passes: ``"forward"`` or ``"both"``.

    Returns:
        The matplotlib figure: panels for full and causal attention, with 8 and 2 KV heads.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.6), layout="constrained")
    panels = figure.subplots(2, 2, sharex=True, sharey=True).flat
    for panel, (is_causal, kv_heads) in zip(panels, _PANELS, strict=True):
        times: dict[str, dict[int, float]] = {}
        for row in rows:
            is_case = row["benchmark"].endswith(passes) and row["details"]["kv_heads"] == kv_heads
            if is_case and row["case"].startswith("causal") == is_causal:
                times.setdefault(row["executor"], {})[row["num_tasks"]] = row["median_ms"]
        for name, (color, marker) in _STYLES.items():
            points = [(n, ms / times["cqs"][n]) for n, ms in sorted(times.get(name, {}).items())]
            if points:
                numbers, ratios = zip(*points, strict=True)
                is_line = name in ("cqs", "ring", "all-gather")
                style = "-" if is_line else ""
                panel.plot(numbers, ratios, marker + style, ms=5, color=color, label=name)
        kind = "causal" if is_causal else "non-causal"
        panel.set_title(f"{kind}, 8 query heads, {kv_heads} KV heads", fontsize="medium")
        panel.set_xscale("log", base=2)
        panel.set_yscale("log", base=2)
        hosts = sorted(times["cqs"])
        panel.set_xticks(hosts, map(str, hosts), fontsize="small")
        panel.xaxis.set_minor_locator(_no_ticks())
        panel.yaxis.set_major_formatter(PLAIN)
        panel.grid(axis="y", color="gray", alpha=0.3)
    figure.supxlabel("hosts", fontsize="medium")
    figure.supylabel("time / time of cqs", fontsize="medium")
    handles = {line.get_label(): line for axes in figure.axes for line in axes.lines}
    figure.legend(handles=[*handles.values()], loc="outside upper center", ncols=6, frameon=False)
    return figure


def _no_ticks() -> Any:
    from matplotlib.ticker import NullLocator

    return NullLocator()
