"""Executes tasks on the actors of a Ray cluster.

The driver copies every token group once: to memory that the actors of its host share, or into the
object store, from which only the tasks that hold a group fetch it. Each group is merged by the
actor to which the first of its tasks was assigned; the driver receives merged groups. A task is a
pure function of its groups, so any actor can execute it again. Ray itself restarts no actor and
retries no task (``max_restarts=0``, ``max_task_retries=0``): the driver replaces failed actors.
"""

import sys

if sys.platform != "linux":
    raise ImportError(f"cqs.Cluster requires Linux, got {sys.platform}")

from cqs.executors.ray.cluster import Cluster
from cqs.executors.ray.future import AttentionFuture
from cqs.executors.ray.pool import TaskFailedError, WorkersFailedError
from cqs.executors.ray.shards.sharded import Sharded
from cqs.executors.ray.tasks.report import RunReport, TaskReport, WorkerFailure
