"""Tasks on the actors of a Ray cluster.

Every token group is put into the object store once and fetched by its holders alone. A task is a
pure function of its groups, so it may be computed again anywhere; Ray itself restarts and retries
nothing (``max_restarts=0``, ``max_task_retries=0``), which makes the death of an actor final.
"""

from cqs.executors.ray.cluster import AttentionFuture, Cluster
from cqs.executors.ray.report import RunReport, TaskReport
from cqs.executors.ray.run import TaskFailedError, WorkersFailedError

__all__ = [
    "AttentionFuture",
    "Cluster",
    "RunReport",
    "TaskFailedError",
    "TaskReport",
    "WorkersFailedError",
]
