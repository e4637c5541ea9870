"""What a task reads, what it computes, and what all tasks compute."""

from typing import Any

from cqs.plotting.colors import task_colors
from cqs.plotting.figures import label_tokens
from cqs.plotting.owners import plot_owners
from cqs.scheduler import Plan, make_plan

_NUM_TOKENS, _NUM_TASKS = 14, 7
_SIZE = 10.5, 3.9
"""Width and height of the figure in inches."""
_UNREAD = "#eeeeee"


def plot_hero() -> Any:
    """Return a figure of three panels about 7 tasks of 14 tokens."""
    from matplotlib.figure import Figure

    plan = make_plan(_NUM_TOKENS, num_tasks=_NUM_TASKS)
    figure = Figure(figsize=_SIZE, layout="compressed")
    reads, computes, everything = figure.subplots(1, 3)
    _plot_groups(plan, reads)
    plot_owners(plan, computes, index=0)
    plot_owners(plan, everything)
    reads.set_title("Task 0 reads 3 of 7 groups")
    computes.set_title("and computes 7 of 49 blocks")
    everything.set_title("7 tasks: every block once")
    return figure


def _plot_groups(plan: Plan, axes: Any) -> None:
    """Draw queries as rows and keys as columns, those of the groups of task 0 in its colour."""
    label_tokens(axes, _NUM_TOKENS, _NUM_TOKENS)
    axes.set_facecolor(_UNREAD)
    (color, *_), task = task_colors(_NUM_TASKS), plan.task(0)
    for tokens in (plan.token_groups[group] for group in task.held_groups):
        for draw in (axes.axhspan, axes.axvspan):
            draw(tokens.start, tokens.stop, color=color, alpha=0.35, linewidth=0)
