"""What callers must not do is an error on every rank, soon, and never a wrong result."""

import threading
import time
from datetime import timedelta
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from programs import ShardedProblem, as_dtensor, complaint, even_cuts, raised
from support.references import kept_without_a_collection
from torch._subclasses import FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.masked import masked_tensor

import cqs.distributed
from benchmarks.cases import Case
from cqs.executors.distributed import agreement
from cqs.integrations import masks
from cqs.nn import gradients
from cqs.patterns import causal

pytestmark = pytest.mark.slow

BY_ONE_THREAD = "group must be used by one thread at a time"


class Passes:
    """Passes of causal attention over equal shards."""

    def __init__(self, group, length=40):
        case = Case("thread", length, length, 4, 4, is_causal=True)
        cuts = even_cuts(length, dist.get_world_size(group))
        self.problem = ShardedProblem(group, case, cuts)
        (_, *self.expected), _ = self.problem.expected()

    def differentiate(self, output):
        """Return whether the gradients are right."""
        results = self.problem.gradients(output, retain_graph=True)
        return all(map(torch.allclose, results, self.expected))


def outcomes_of_threads(group, num_groups, pass_, is_in_turn=False):
    """Call on new groups of all ranks from two threads, each with a problem of its own length.

    Args:
        group: The process group.
        num_groups: Number of groups: one for both threads, or one for each.
        pass_: The pass in which the threads overlap, "forward" or "backward".
        is_in_turn: Whether the second thread starts when the first has ended, on all ranks.

    Returns:
        For each thread, what it got from each call: ``True`` if the gradients are right, ``False``
        or the error.
    """
    groups = [dist.new_group() for _ in range(2)][:num_groups]
    rank, outcomes = dist.get_rank(group), ([], [])
    passes = [Passes(groups[0], 40), Passes(groups[-1], 64)]
    outputs = [each.problem.attend() for each in passes] if pass_ == "backward" else ()

    def run_passes(number):
        for _ in range(3):
            try:
                output = outputs[number] if outputs else passes[number].problem.attend()
                outcomes[number].append(passes[number].differentiate(output))
            except Exception as error:
                outcomes[number].append((type(error), str(error)))

    order = (0, 1) if rank or is_in_turn else (1, 0)
    threads = [threading.Thread(target=run_passes, args=(number,)) for number in order]
    if not rank:
        time.sleep(0.3)  # until both threads of all other ranks have called
    for thread in threads:
        thread.start()
        if is_in_turn:
            thread.join()
    for thread in threads:
        thread.join()
    return outcomes


@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_threads_that_share_a_group_get_an_error(ranks, pass_):
    """No process ends, and no rank whose threads overlap is left without an error."""
    for rank, of_threads in enumerate(ranks.run(8, outcomes_of_threads, 1, pass_)):
        outcomes = [outcome for of_thread in of_threads for outcome in of_thread]
        errors = [outcome for outcome in outcomes if not isinstance(outcome, bool)]
        if pass_ == "forward":
            assert all(of_thread[-1] in errors for of_thread in of_threads)
        else:
            assert False not in outcomes and (errors or rank == 0)
        for error, text in errors:
            assert error in (RuntimeError, ValueError) and BY_ONE_THREAD in text


def test_threads_may_call_on_groups_of_their_own_or_one_after_another(ranks):
    for arguments in ((2, "forward"), (2, "backward"), (1, "forward", True)):
        found = ranks.run(8, outcomes_of_threads, *arguments)
        assert found == [([True] * 3, [True] * 3)] * 8


def outcomes_of_steps(group, kind):
    """Return what two threads get that ask other ranks for more than their request.

    On rank 0 the second thread calls once the first has sent its request and waits for the rest, on
    other ranks between the two.
    """
    rank, outcomes, made = dist.get_rank(group), {}, dist.new_group()
    call = {
        "a mask": lambda size: masks.gather_mask(made, causal(), size, 0, is_padded=True),
        "gradients": lambda size: gradients._any_rank(size[0], made),
    }[kind]
    compare, is_second = agreement.GroupCalls.compare, threading.Event()

    def wait_between(*arguments, **options):
        agreed = compare(*arguments, **options)
        if threading.current_thread().name == "first" and rank:
            is_second.set()
            time.sleep(0.5)
        return agreed

    def run_call(size):
        bits = np.arange(2 * size).reshape(2, size) % 2 > 0
        outcomes[threading.current_thread().name] = raised(bits, call)

    first = threading.Thread(target=run_call, args=(300,), name="first")
    second = threading.Thread(target=run_call, args=(20_000,), name="second")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreement.GroupCalls, "compare", wait_between)
        first.start()
        if rank:
            is_second.wait(10)
        else:
            time.sleep(0.2)
        second.start()
        first.join()
        second.join()
    return outcomes


@pytest.mark.parametrize("kind", ["a mask", "gradients"])
def test_threads_do_not_interleave_the_messages_of_a_call(ranks, kind):
    """Requests and what follows them are one call."""
    for outcomes in ranks.run(8, outcomes_of_steps, kind):
        assert set(outcomes) == {"first", "second"}
        for error, text in outcomes.values():
            assert error is RuntimeError and BY_ONE_THREAD in text


def is_last(group):
    return dist.get_rank(group) == dist.get_world_size(group) - 1


def attend_without_the_last(group):
    made = dist.new_group(timeout=timedelta(seconds=2))
    if not is_last(group):
        Passes(made).problem.attend()


def test_a_rank_that_does_not_call_is_not_waited_for_beyond_the_timeout(ranks):
    *complaints, last = ranks.run(8, raised, attend_without_the_last)
    assert last is None
    for error, text in complaints:
        assert error is RuntimeError and "a rank of the group has failed" in text


def finish_call(group):
    """Return a tensor, the output and the group of a call and its backward pass."""
    made = dist.new_group()
    tensors = [torch.randn(1, 4, 5, 16).requires_grad_() for _ in range(3)]
    output = cqs.distributed.attention(*tensors, group=made, is_causal=True)
    output.sum().backward()
    dist.destroy_process_group(made)
    return {"output": output, "query": tensors[0], "group": made}


def test_a_finished_call_keeps_neither_tensors_nor_its_group(ranks):
    """Threads of a group that is destroyed late abort the interpreter as it exits."""
    assert ranks.run(8, partial(kept_without_a_collection, finish_call)) == [[]] * 8


def as_fake(tensor, group):
    with FakeTensorMode() as mode:
        return mode.from_tensor(tensor)


KINDS = {
    "DTensor": as_dtensor,
    "FakeTensor": as_fake,
    "MaskedTensor": lambda tensor, group: masked_tensor(tensor, tensor > 0),
    "sparse": lambda tensor, group: tensor.to_sparse(),
    "nested": lambda tensor, group: torch.nested.nested_tensor([*tensor], layout=torch.jagged),
    "meta": lambda tensor, group: tensor.to("meta"),
    "quantized": lambda tensor, group: torch.quantize_per_tensor(tensor, 0.1, 0, torch.qint8),
}


def attend_with_kind(group, kind):
    """Attend, on the last rank with a query of another kind, or inside torch.func.vmap."""
    tensors = [torch.randn(1, 4, 8, 16) for _ in range(3)]
    attend = partial(cqs.distributed.attention, group=group)
    if is_last(group) and kind in KINDS:
        tensors[0] = KINDS[kind](tensors[0], group)
    elif is_last(group):
        attend, tensors = torch.func.vmap(attend), [each.unsqueeze(0) for each in tensors]
    attend(*tensors)


@pytest.mark.parametrize("kind", [*KINDS, "vmap"])
def test_tensors_without_plain_memory_are_named_on_every_rank(ranks, kind):
    expected = NotImplementedError if kind in ("meta", "vmap") else TypeError
    *others, (error, text) = ranks.run(3, raised, attend_with_kind, kind)
    assert error is expected and "query" in text
    assert kind != "DTensor" or "query.to_local()" in text
    for error, text in others:
        assert error is ValueError and "query" in text
        assert text.startswith(f"rank 2 of the group failed: {expected.__name__}")


def check_asynchronous(group):
    """Compute with tensors of a collective that has not finished."""
    tensors = [torch.randn(1, 4, 8, 16, requires_grad=True) for _ in range(3)]
    mesh, rank = DeviceMesh.from_group(group, "cpu"), dist.get_rank(group)
    unfinished = [
        DTensor.from_local(tensor, mesh, [Shard(0)])
        .redistribute(mesh, [Replicate()], async_op=True)
        .to_local()
        for tensor in tensors
    ]
    assert all(type(each) is AsyncCollectiveTensor for each in unfinished)
    plain = [each.detach().clone().requires_grad_() for each in unfinished]
    output, expected = (
        cqs.distributed.attention(*each, group=group) for each in (unfinished, plain)
    )
    assert type(output) is torch.Tensor and torch.equal(output, expected)
    gradients = torch.autograd.grad(output.square().sum(), tensors)
    others = torch.autograd.grad(expected.square().sum(), plain)
    for gradient, other in zip(gradients, others, strict=True):
        assert torch.equal(gradient, other[rank : rank + 1])


def test_tensors_of_collectives_are_waited_for(ranks):
    ranks.run(2, check_asynchronous)


NO_GROUPS = {
    "NON_GROUP_MEMBER": (TypeError, lambda *_: dist.GroupMember.NON_GROUP_MEMBER),
    "ProcessGroup": (ValueError, lambda *of_rank: dist.ProcessGroup(dist.HashStore(), *of_rank)),
    "DeviceMesh": (ValueError, lambda *_: DeviceMesh("cpu", [[0, 1]], _init_backend=False)),
    "3": (TypeError, lambda *_: 3),
    "'x'": (TypeError, lambda *_: "x"),
}
"""What an error shows -> its type, and what is passed as a group by a rank of a number of ranks."""


def complaint_about_group(group, shown):
    passed = NO_GROUPS[shown][1](dist.get_rank(group), dist.get_world_size(group))
    return complaint(passed, None, {}, {})


@pytest.mark.parametrize("shown", NO_GROUPS)
def test_what_is_no_group_of_this_process_is_named(ranks, shown):
    for rank, (error, text) in enumerate(ranks.run(2, complaint_about_group, shown)):
        assert error is NO_GROUPS[shown][0]
        assert text.startswith("group must be") and shown in text
        assert shown not in ("NON_GROUP_MEMBER", "ProcessGroup") or f"rank {rank}" in text


def attend_on_another_device(group):
    """Attend with tensors on a device for which the group has no backend."""
    Passes(dist.new_group(backend="cuda:gloo")).problem.attend()


def test_tensors_on_a_device_without_a_backend_are_named(ranks):
    for error, text in ranks.run(8, raised, attend_on_another_device):
        assert error is ValueError and "query must be on a device of the group" in text
        assert "cpu" in text
