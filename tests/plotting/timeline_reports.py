"""Reports of runs that never were."""

from cqs.executors.ray.tasks.report import MergeReport, RunReport, TaskReport, WorkerFailure


def make_report(num_tasks, num_processes, failures=()):
    """Tasks of about a second, which the processes take in turn."""
    started = 1.7e9
    tasks = []
    for index in range(num_tasks):
        turn, process = divmod(index, num_processes)
        tasks.append(
            TaskReport(
                index=index,
                pid=4000 - process // 2,  # nodes number their processes independently
                node=f"node {process % 2}",
                device="cpu",
                backend="cpu",
                load_seconds=0.01,
                started=started + 0.02 + 1.3 * turn + 0.01 * process,
                seconds=1 + 0.001 * index,
                peak_bytes=1000 + index,
                bytes_in=10,
                bytes_out=20,
            )
        )
    end = max(task.started + task.seconds for task in tasks)
    return RunReport(
        started=started,
        seconds=end - started + 0.1,
        transport="shared memory",
        put_seconds=0.01,
        get_seconds=0.02,
        tasks=tuple(tasks),
        merges=(MergeReport(4000, "node 0", end + 0.01, 0.03, 0.0),),
        failures=tuple(
            WorkerFailure(pid, node, started + seconds, lost)
            for pid, node, seconds, lost in failures
        ),
        reruns=sum(len(lost) for *_, lost in failures),
        rerun_seconds=0.0,
    )
