"""Pictures of plans, of patterns and of measurements; every function returns matplotlib axes."""

from cqs.plotting.figures import check_picture
from cqs.plotting.owners import plot_owners, save_owners
from cqs.plotting.speedups import plot_speedups

__all__ = ["check_picture", "plot_owners", "plot_speedups", "save_owners"]
