"""Pictures of plans, of patterns and of measurements; every function returns matplotlib axes."""

from cqs.plotting.density import plot_density
from cqs.plotting.figures import check_picture
from cqs.plotting.owners import plot_owners, save_owners
from cqs.plotting.timeline import plot_timeline, save_trace

__all__ = [
    "check_picture",
    "plot_density",
    "plot_owners",
    "plot_timeline",
    "save_owners",
    "save_trace",
]
