"""Every task of a plan in this process, one after another."""

from collections.abc import Callable

from cqs.partial import Partial
from cqs.problem import Problem
from cqs.scheduler import Plan
from cqs.tiler import Tiler
from cqs.worker import HeldTokens, Worker, choose_backend


def run_local(
    problem: Problem,
    plan: Plan,
    *,
    backend: str | None = None,
    answer: Partial | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Partial:
    """Compute ``problem`` by ``plan`` on the device of its tensors.

    Args:
        problem: The checked problem.
        plan: A plan of its lengths.
        backend: Name of a backend, or ``None`` for the best of each call.
        answer: Where to write; ``None`` allocates it.
        progress: Called with (tasks done, tasks in all) after every task.

    Raises:
        NotImplementedError: if the named backend cannot take the tensors.
    """
    choose_backend(problem.query, problem.key, problem.value, backend)
    whole_q, whole_kv = range(plan.seqlen_q), range(plan.seqlen_kv)
    query = HeldTokens([(whole_q, problem.query)])
    key = HeldTokens([(whole_kv, problem.key)])
    value = HeldTokens([(whole_kv, problem.value)])
    worker = Worker(backend)
    answer = answer or problem.empty_answer()
    if not answer.output.numel():
        return answer
    tiler = Tiler(plan, *answer)
    for done, task in enumerate(plan.tasks, start=1):
        tiler.add(task.worker, worker.run(task, query, key, value, scale=problem.scale))
        if progress:
            progress(done, plan.num_workers)
    return tiler.finish()
