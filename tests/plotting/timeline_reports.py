"""Reports of runs that never were."""

import random

from cqs.executors.ray.tasks.report import MergeReport, RunReport, TaskReport, WorkerFailure


def make_report(num_tasks, num_processes, failures=()):
    """Tasks of about a second, each taken by the process that is free first."""
    rng = random.Random(0)
    started, tasks = 1.7e9, []
    free = [rng.uniform(0.02, 0.05) for _ in range(num_processes)]
    for index in range(num_tasks):
        process = free.index(min(free))
        seconds = rng.uniform(0.9, 1.1)
        tasks.append(
            TaskReport(
                index=index,
                pid=4000 - process // 2,  # nodes number their processes independently
                node=f"node {process % 2}",
                device="cpu",
                backend="cpu",
                load_seconds=0.01,
                started=started + free[process],
                seconds=seconds,
                peak_bytes=1000 + index,
                bytes_in=10,
                bytes_out=20,
            )
        )
        free[process] += seconds + rng.uniform(0.01, 0.05)
    return RunReport(
        started=started,
        seconds=max(free) + 0.1,
        put_seconds=0.01,
        get_seconds=0.02,
        tasks=tuple(tasks),
        merges=(MergeReport(4000, "node 0", started + 0.01 + max(free), 0.03, 0.0),),
        failures=tuple(
            WorkerFailure(pid, node, started + seconds, lost)
            for pid, node, seconds, lost in failures
        ),
        reruns=sum(len(lost) for *_, lost in failures),
    )
