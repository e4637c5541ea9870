"""What ranks run: attention on their shards, compared with the whole."""

import gc
import logging
import sys
import threading
import time
import weakref
from dataclasses import replace
from datetime import timedelta
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.exact import assert_tracks_exact, eager_output, exact_answer
from torch._subclasses import FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.masked import masked_tensor

import cqs.distributed
from benchmarks.cases import Case
from cqs.executors.distributed import agreement, checked_call, layout, prepared, probe
from cqs.executors.distributed.agreement import make_control_group, swap
from cqs.executors.distributed.transport import transports
from cqs.integrations import masks
from cqs.nn import gradients
from cqs.patterns import causal
from cqs.scheduler.cost_model import predict
from cqs.worker import Worker


def shards_of(problem, cuts, rank):
    """Cut queries and keys at their own marks; return a rank's tensors and rows of queries."""
    rows, columns = (slice(*marks[rank : rank + 2]) for marks in cuts)
    tensors = problem.query[:, :, rows], problem.key[:, :, columns], problem.value[:, :, columns]
    return [tensor.clone().requires_grad_() for tensor in tensors], rows, columns


def run(group, case, dtype, cuts, options, device="cpu"):
    """Return output and gradients of this rank, its lse, and what they are to be compared with.

    That is a function of the dtype to compute in: output, gradients and lse of one process, for
    this rank's rows.
    """
    problem = case.make(dtype, device)
    tensors, rows, columns = shards_of(problem, cuts, dist.get_rank(group))
    output, lse = cqs.distributed.attention(
        *tensors,
        group=group,
        is_causal=case.is_causal,
        pattern=case.pattern,
        scale=case.scale,
        return_lse=True,
        **options,
    )
    generator = torch.Generator().manual_seed(1)
    shape = *problem.query.shape[:3], problem.value.shape[3]
    grad = torch.randn(shape, generator=generator, dtype=torch.float64).to(device)
    found = torch.autograd.grad(output, tensors, grad[:, :, rows].to(dtype))

    def expect(dtype):
        full = problem.query, problem.key, problem.value
        whole = [tensor.detach().to(dtype).requires_grad_() for tensor in full]
        given = replace(problem, **dict(zip(("query", "key", "value"), whole, strict=True)))
        exact = exact_answer(given) if dtype == torch.float64 else None
        answer = eager_output(given) if exact is None else exact.output
        gradients = torch.autograd.grad(answer, whole, grad.to(answer))
        parts = zip((answer, *gradients), (rows, rows, columns, columns), strict=True)
        return [each[:, :, part] for each, part in parts], exact and exact.lse[:, :, rows]

    return (output, *found), lse, expect


def largest_error(group, case, cuts, options):
    """Return the largest error of float64 results, relative to one process."""
    found, lse, expect = run(group, case, torch.float64, cuts, options)
    exact, exact_lse = expect(torch.float64)
    assert torch.equal(lse.isinf(), exact_lse.isinf())
    pairs = [
        *zip(found, exact, strict=True),
        (lse.nan_to_num(0, 0, 0), exact_lse.nan_to_num(0, 0, 0)),
    ]
    return max(float((a - b).abs().max()) for a, b in pairs if a.numel()) if lse.numel() else 0.0


def errors_without_gradients(group, problems):
    """Return the largest error of each output that is computed for no backward pass."""
    found = []
    for case, cuts, options in problems:
        problem, rank = case.make(torch.float64), dist.get_rank(group)
        tensors, rows, _ = shards_of(problem, cuts, rank)
        with torch.no_grad():
            answer = cqs.distributed.attention(
                *tensors, group=group, pattern=case.pattern, return_lse=True, **options
            )
        exact = exact_answer(problem)
        pairs = zip(answer, (each[:, :, rows] for each in exact), strict=True)
        errors = [torch.nan_to_num(a - b, 0.0).abs().max() for a, b in pairs if a.numel()]
        assert torch.equal(answer.lse.isinf(), exact.lse[:, :, rows].isinf())
        found.append(max(map(float, errors), default=0.0))
    return found


def largest_errors(group, problems):
    return [largest_error(group, *problem) for problem in problems]


def count_bytes(group, case, options):
    """Return the bytes that this rank sends in a forward pass, and in a backward pass."""
    num_ranks, post, sent = dist.get_world_size(group), dist.batch_isend_irecv, []

    def post_and_count(messages):
        sends = [each.op is dist.isend for each in messages]
        assert sends == sorted(sends), "gloo is slow unless receives are posted first"
        sent[-1] += sum(each.tensor.nbytes for each in messages if each.op is dist.isend)
        return post(messages)

    marks = [case.seqlen_q * rank // num_ranks for rank in range(num_ranks + 1)]
    tensors, *_ = shards_of(case.make(torch.float32), (marks, marks), dist.get_rank(group))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "batch_isend_irecv", post_and_count)
        sent.append(0)
        output = cqs.distributed.attention(
            *tensors, group=group, is_causal=case.is_causal, return_lse=True, **options
        ).output
        sent.append(0)
        output.sum().backward()
    return sent


def check_tracks_exact(group, case, dtype, cuts, options, device="cpu"):
    """Compare with float64 by the rule for rounding."""
    found, _, expect = run(group, case, dtype, cuts, options, device)
    eager, exact = (expect(each)[0] for each in (dtype, torch.float64))
    names = "output", "grad_query", "grad_key", "grad_value"
    for name, *each in zip(names, found, eager, exact, strict=True):
        assert_tracks_exact(*each, slack=4, name=name)


def bits(group, case, cuts, options, device="cpu", dtype=torch.float32):
    """Return output and gradients as they are."""
    found, *_ = run(group, case, dtype, cuts, options, device)
    return [each.detach().cpu() for each in found]


def calls_that_deviate(group, case, all_cuts):
    """List calls whose bits are others when calls follow each other at once, on uneven GPUs."""
    rank, device = dist.get_rank(group), torch.device("cuda", torch.cuda.current_device())
    problem, generator = case.make(torch.bfloat16, device), torch.Generator().manual_seed(rank)
    calls = [
        (cuts, {"head_parallel": head_parallel, "num_chunks": num_chunks})
        for cuts in all_cuts
        for head_parallel in ("auto", 1)
        for num_chunks in (1, 2, 4)
    ]

    def attend(cuts, options):
        tensors, *_ = shards_of(problem, cuts, rank)
        output = cqs.distributed.attention(
            *tensors, group=group, is_causal=case.is_causal, **options
        )
        return output, *torch.autograd.grad(output, tensors, output.detach())

    expected = []
    for call in calls:
        expected.append(attend(*call))
        torch.cuda.synchronize()
    found = []
    for call in calls * 3:
        torch.cuda._sleep(int(torch.randint(4_000_000, (), generator=generator)))
        found.append(attend(*call))
    return [
        number
        for number, results in enumerate(found)
        if not all(map(torch.equal, results, expected[number % len(calls)]))
    ]


def dropped(group, case, cuts, options):
    """Return the output with dropout; every rank would draw another seed."""
    problem = case.make()
    torch.manual_seed(dist.get_rank(group))
    tensors, *_ = shards_of(problem, cuts, dist.get_rank(group))
    return cqs.distributed.attention(*tensors, group=group, **options).detach()


def attend_with_shared_keys(group):
    """Return output and gradient of the keys, which have a batch of 1, of shards of 10 rows."""
    generator = torch.Generator().manual_seed(dist.get_rank(group))
    query, key, value = (torch.randn(b, 2, 10, 8, generator=generator) for b in (3, 1, 3))
    key.requires_grad_()
    output = cqs.distributed.attention(query, key, value, group=group)
    return (query, key.detach(), value), output.detach(), *torch.autograd.grad(output.sum(), key)


def complaint(group, of_rank, changed, options, rows=8, device="cpu"):
    """Return what is raised where one rank passes other options, tensors or nothing at all."""
    tensors = [torch.randn(1, 4, rows, 16, device=device) for _ in range(3)]
    mine = dict(options)
    if dist.get_rank(group) == of_rank:
        mine |= {name: value for name, value in changed.items() if name != "tensors"}
        tensors = changed.get("tensors", tensors)
    try:
        cqs.distributed.attention(*tensors, **{"group": group, **mine})
    except Exception as error:
        return type(error), str(error)
    return None


def complaint_of_one(group, of_rank, name, found):
    """Return what is raised where a function of the module finds otherwise on one rank."""
    module = next(each for each in (checked_call, prepared) if hasattr(each, name))
    function = getattr(module, name)
    other = type(found)(0)
    setattr(module, name, lambda _: found if dist.get_rank(group) == of_rank else other)
    try:
        return complaint(group, of_rank, {}, {})
    finally:
        setattr(module, name, function)


def replays_that_deviate(group, case, cuts, options):
    """List turns whose replay of a CUDA graph has other bits than the calls, on uneven GPUs."""
    rank = dist.get_rank(group)
    generator, on_gpu = torch.Generator().manual_seed(rank), torch.Generator("cuda")
    problem = case.make(torch.bfloat16, "cuda")
    tensors, *_ = shards_of(problem, cuts, rank)

    def attend(scale=0.1):
        output = cqs.distributed.attention(
            *tensors,
            group=group,
            is_causal=case.is_causal,
            pattern=case.pattern,
            scale=scale,
            **options,
        )
        return output.detach(), *torch.autograd.grad(output, tensors, output.detach())

    attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # at once: what the call before had begun may not be done
        found = attend()
    replayed, expected = [], []
    for turn in range(6):
        torch.cuda._sleep(int(torch.randint(4_000_000, (), generator=generator)))
        with torch.no_grad():
            for tensor in tensors:
                tensor.normal_(generator=on_gpu.manual_seed(turn))
        graph.replay()
        replayed.append([each.clone() for each in found])
        if turn % 2:
            attend(0.2)
        expected.append(attend())
    return [turn for turn in range(6) if not all(map(torch.equal, replayed[turn], expected[turn]))]


def deviation_of_graphed_training(group, case, cuts):
    """Return the largest difference of two steps' gradients, captured as PyTorch does it or not."""
    tensors, *_ = shards_of(case.make(torch.bfloat16, "cuda"), cuts, dist.get_rank(group))

    def attend(query, key, value):
        return cqs.distributed.attention(query, key, value, group=group, is_causal=case.is_causal)

    graphed = torch.cuda.make_graphed_callables(attend, tuple(tensors))
    worst = 0.0
    for scale in (1.0, -0.5):
        changed = [(tensor.detach() * scale).requires_grad_() for tensor in tensors]
        found, expected = (
            torch.autograd.grad(call(*changed).square().sum(), changed)
            for call in (graphed, attend)
        )
        errors = [float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)]
        worst = max(worst, *errors)
    return worst


def chosen_by_links(group, links):
    """Return the kind of plan and the degree that this rank chooses for one KV head."""
    found = []

    def choose(*arguments, **options):
        prediction = predict(*arguments, **options)
        found.append((prediction.kind, prediction.head_parallel))
        return prediction

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "predict", choose)
        patch.setattr(prepared, "_prepared", {})
        layout.lay_out.cache_clear()
        tensors = [torch.randn(1, heads, 6000, 8) for heads in (4, 1, 1)]
        cqs.distributed.attention(*tensors, group=group, links=links)
    return found


def probe_of_hosts(group, hosts):
    """Return what a call has measured, and the links that this rank uses afterwards, twice."""
    rank, device, calls = dist.get_rank(group), torch.device("cpu"), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transports, "_hosts", {})
        patch.setattr(transports, "_host", lambda: hosts[rank])
        patch.setattr(probe, "_measured", {})
        patch.setattr(prepared, "_prepared", {})
        real = probe._measure
        patch.setattr(probe, "_measure", lambda *a: calls.append(a[2:]) or real(*a))
        tensors = [torch.randn(1, 2, 30, 8) for _ in range(3)]
        cqs.distributed.attention(*tensors, group=group)
        measured = list(calls)
        return measured, [probe.probe_links(group, device) for _ in range(2)]


def links_of_later_groups(group, hosts, links):
    """Return the links that a group pins, without and with those of an earlier group."""
    rank, device = dist.get_rank(group), torch.device("cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transports, "_hosts", {})
        patch.setattr(transports, "_host", lambda: hosts[rank])
        patch.setattr(probe, "_measured", {})
        measured = probe.pin_links(group, None, device)
        patch.setattr(probe, "_measure", None)  # an earlier group's links are not measured again
        pinned = probe.pin_links(group, links, device)
        return measured, pinned, probe.probe_links(group, device)


def seen_of_hosts(group, hosts):
    """Return what is known of neighbours on a host, by what layouts choose and by the
    transports."""
    rank, found = dist.get_rank(group), []

    def choose(method, workload, num_ranks, machine, *arguments, **options):
        found.append(machine.devices_per_node)
        return predict(method, workload, num_ranks, machine, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transports, "_hosts", {})
        patch.setattr(transports, "_host", lambda: hosts[rank])
        patch.setattr(layout, "predict", choose)
        patch.setattr(prepared, "_prepared", {})
        layout.lay_out.cache_clear()
        cqs.distributed.attention(*(torch.randn(1, 4, 3, 8) for _ in range(3)), group=group)
        return *found, transports.ranks_per_host(group)


def capture_something_else(group):
    """Capture for longer than it takes until somebody asks whether a call is done."""
    tensors = [torch.randn(1, 4, 8, 16, device="cuda") for _ in range(3)]
    cqs.distributed.attention(*tensors, group=group)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        double = tensors[0] * 2
        time.sleep(2.5)
    graph.replay()
    assert torch.equal(double, tensors[0] * 2)


def complaint_in_a_graph(group, rows):
    """Return what is raised where a CUDA graph is captured of a call longer than any before."""
    with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
        return complaint(group, 0, {}, {}, rows, device="cuda")


def swap_with_unequal_groups(group):
    """Exchange numbers by a control group, made where ranks know other numbers of groups."""
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    alone = [dist.new_group([rank], use_local_synchronization=True) for _ in range(rank)]
    control = make_control_group(group)
    for each in alone:
        dist.destroy_process_group(each)
    return swap(control, [rank] * (rank + 1), range(1, num_ranks + 1))


def check_local(group, case, options):
    """One rank alone gives what one process gives."""
    problem = case.make()
    tensors = problem.query, problem.key, problem.value
    output = cqs.distributed.attention(*tensors, group=group, **options)
    assert torch.equal(output, cqs.attention(*tensors, **options))


def error_beside_messages(group, case, cuts, options):
    """The same while a message of the caller, as long as one of ours may be, is being sent."""
    rank, own = dist.get_rank(group), torch.full((512,), 7.0, dtype=torch.float64)
    sent = dist.isend(own, group=group, group_dst=0) if rank == 1 else None
    error = largest_error(group, case, cuts, options)
    if sent is not None:
        sent.wait()
    if rank == 0:
        received = torch.zeros_like(own)
        dist.recv(received, group=group, group_src=1)
        assert torch.equal(received, own)
    return error


def error_after_failure(group, case, cuts, options):
    """The same after a call that failed on all ranks with messages in flight."""
    whole = Worker.run_together, Worker.run_steps

    def fail(self, *arguments, **options):
        Worker.run_together, Worker.run_steps = whole
        raise torch.OutOfMemoryError("as if")

    tensors, *_ = shards_of(case.make(torch.float64), cuts, dist.get_rank(group))
    Worker.run_together = Worker.run_steps = fail
    with pytest.raises(torch.OutOfMemoryError):
        cqs.distributed.attention(*tensors, group=group, is_causal=case.is_causal, **options)
    return largest_error(group, case, cuts, options)


def gradients_after_writing(group, case, cuts, is_written):
    """Gradients of queries, whether keys and values are written to after the call or not."""
    (query, *others), *_ = shards_of(case.make(torch.float64), cuts, dist.get_rank(group))
    key, value = (tensor.detach() for tensor in others)
    output = cqs.distributed.attention(query, key, value, group=group, is_causal=case.is_causal)
    if is_written:
        key.zero_(), value.zero_()
    (gradient,) = torch.autograd.grad(output.square().sum(), query)
    return gradient


def outcomes_of_threads(group, num_groups, pass_, num_calls=3):
    """Call on new groups of all ranks from two threads, each with a problem of its own length.

    Returns:
        For each thread, what it got from each call: ``"right"``, ``"wrong"`` or the error.
    """
    one, other = dist.new_group(), dist.new_group()
    groups = one, (one, other)[num_groups - 1]
    rank, outcomes = dist.get_rank(group), ([], [])
    cases = [case_of_length(40), case_of_length(64)]
    passes = [expect(each, case) for each, case in zip(groups, cases, strict=True)]
    outputs = [attend() for attend, *_ in passes] if pass_ == "backward" else ()

    def run_passes(number):
        attend, differentiate, expected = passes[number]
        for _ in range(num_calls):
            try:
                found = differentiate(outputs[number] if outputs else attend())
            except Exception as error:
                outcomes[number].append((type(error), str(error)))
            else:
                is_right = all(map(torch.allclose, found, expected))
                outcomes[number].append("right" if is_right else "wrong")

    order = (0, 1) if rank else (1, 0)
    threads = [threading.Thread(target=run_passes, args=(number,)) for number in order]
    if not rank:
        time.sleep(0.3)  # until both threads of all other ranks have called
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def case_of_length(length):
    return Case("thread", length, length, 4, 4, is_causal=True)


def expect(group, case):
    """Return a forward and a backward pass of this rank's shards, and the right gradients."""
    problem, num_ranks = case.make(torch.float64), dist.get_world_size(group)
    marks = [case.seqlen_q * rank // num_ranks for rank in range(num_ranks + 1)]
    tensors, rows, _ = shards_of(problem, (marks, marks), dist.get_rank(group))
    whole = [
        tensor.clone().requires_grad_() for tensor in (problem.query, problem.key, problem.value)
    ]
    gradients = torch.autograd.grad(cqs.attention(*whole, is_causal=True).sum(), whole)

    def attend():
        return cqs.distributed.attention(*tensors, group=group, is_causal=True)

    def differentiate(output):
        return torch.autograd.grad(output.sum(), tensors, retain_graph=True)

    return attend, differentiate, [gradient[:, :, rows] for gradient in gradients]


def calls_of_threads_in_turn(group):
    """Return whether calls of several threads, one after another, are right."""
    attend, differentiate, expected = expect(group, case_of_length(40))
    are_right = []
    for _ in range(3):
        thread = threading.Thread(
            target=lambda: are_right.append(
                all(map(torch.allclose, differentiate(attend()), expected))
            )
        )
        thread.start()
        thread.join()
    return are_right


def kept_without_a_collection(group):
    """Return which tensors and groups of a finished call still exist before a collection."""
    gc.collect()
    gc.disable()
    try:
        made = dist.new_group()
        problem, rank = case_of_length(40).make(), dist.get_rank(group)
        marks = [40 * number // dist.get_world_size(group) for number in range(9)]
        tensors, *_ = shards_of(problem, (marks, marks), rank)
        output = cqs.distributed.attention(*tensors, group=made, is_causal=True)
        output.sum().backward()
        kept = {
            "output": weakref.ref(output),
            "query": weakref.ref(tensors[0]),
            "group": weakref.ref(made),
        }
        dist.destroy_process_group(made)
        del tensors, output, made
        return [name for name, reference in kept.items() if reference() is not None]
    finally:
        gc.enable()


def complaint_out_of_order(group, seconds):
    """Return what is raised where the last rank runs its backward passes in another order."""
    made = dist.new_group(timeout=timedelta(seconds=seconds))
    passes = [expect(made, case_of_length(40))[:2] for _ in range(2)]
    outputs = [attend() for attend, _ in passes]
    is_last = dist.get_rank(group) == dist.get_world_size(group) - 1
    try:
        for number in (1, 0) if is_last else (0, 1):
            passes[number][1](outputs[number])
    except Exception as error:
        return type(error), str(error)
    return None


def complaint_without_the_last(group, seconds):
    """Return what is raised where the last rank does not call."""
    made = dist.new_group(timeout=timedelta(seconds=seconds))
    if dist.get_rank(group) < dist.get_world_size(group) - 1:
        return complaint(made, 0, {}, {})
    return None


def as_dtensor(tensor, group):
    return DTensor.from_local(tensor, DeviceMesh.from_group(group, "cpu"), [Shard(2)])


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


def complaint_about_kind(group, kind, of_ranks):
    """Return what is raised where some ranks pass a query of another kind, and after how long."""
    query = torch.randn(1, 4, 8, 16)
    if dist.get_rank(group) in of_ranks:
        query = KINDS[kind](query, group)
    start = time.monotonic()
    try:
        cqs.distributed.attention(query, *(torch.randn(1, 4, 8, 16) for _ in "kv"), group=group)
    except Exception as error:
        return type(error), str(error), time.monotonic() - start
    return None


def complaint_in_vmap(group, of_rank):
    """Return what is raised where one rank calls inside torch.func.vmap."""
    tensors = [torch.randn(2, 1, 4, 8, 16) for _ in range(3)]

    def attend(*tensors):
        return cqs.distributed.attention(*tensors, group=group)

    try:
        if dist.get_rank(group) == of_rank:
            torch.func.vmap(attend)(*tensors)
        else:
            attend(*(tensor[0] for tensor in tensors))
    except Exception as error:
        return type(error), str(error)
    return None


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


def complaint_about_group(group, kind):
    """Return what is raised for something other than a group of this process."""
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    passed = {
        "not a member": dist.GroupMember.NON_GROUP_MEMBER,
        "unknown": dist.ProcessGroup(dist.HashStore(), rank, num_ranks),
        "mesh": DeviceMesh("cpu", [[*range(num_ranks)]], _init_backend=False),
        "integer": 3,
        "string": "x",
    }[kind]
    tensors = [torch.randn(1, 4, 8, 16) for _ in range(3)]
    try:
        cqs.distributed.attention(*tensors, group=passed)
    except Exception as error:
        return type(error), str(error)
    return None


def complaint_on_another_device(group):
    """Return what is raised for tensors on a device for which the group has no backend."""
    return complaint(dist.new_group(backend="cuda:gloo"), 0, {}, {})


def outcomes_of_steps(group, kind):
    """Return what two threads get that ask other ranks for more than their request.

    On rank 0 the second thread calls once the first has sent its request and waits for the rest, on
    other ranks between the two.
    """
    rank, outcomes, made = dist.get_rank(group), {}, dist.new_group()
    call = {
        "a mask": lambda size: masks.of_group(made, causal(), size, 0, is_padded=True),
        "gradients": lambda size: gradients._of_any(size[0], made),
    }[kind]
    agree, is_second = agreement.agree, threading.Event()

    def wait_between(*arguments, **options):
        agreed = agree(*arguments, **options)
        if threading.current_thread().name == "first" and rank:
            is_second.set()
            time.sleep(0.5)
        return agreed

    def run_call(size):
        try:
            call(np.arange(2 * size).reshape(2, size) % 2 > 0)
            outcomes[threading.current_thread().name] = "done"
        except Exception as error:
            outcomes[threading.current_thread().name] = type(error), str(error)

    first = threading.Thread(target=run_call, args=(300,), name="first")
    second = threading.Thread(target=run_call, args=(20_000,), name="second")
    agreement.agree = wait_between
    try:
        first.start()
        if rank:
            is_second.wait(10)
        else:
            time.sleep(0.2)
        second.start()
        first.join()
        second.join()
    finally:
        agreement.agree = agree
    return outcomes


class Messages(logging.Handler):
    def __init__(self):
        super().__init__()
        self.found = []

    def emit(self, record):
        self.found.append(record.getMessage())


def logged_by(group, length):
    """Return what this rank logs in a forward and a backward pass."""
    tensors = [torch.randn(1, 2, length, 16, requires_grad=True) for _ in range(3)]
    messages, logger = Messages(), logging.getLogger("cqs")
    logger.addHandler(messages)
    logger.setLevel(logging.DEBUG)
    try:
        cqs.distributed.attention(*tensors, group=group).sum().backward()
    finally:
        logger.setLevel(logging.NOTSET)
        logger.removeHandler(messages)
    return messages.found


def compare_prepared(group, case, options):
    """Return whether prepared calls have the bits of calls, for some lengths and gradients."""
    num_ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    problem, marks = case.make(), {}
    for name, share in (("even", 1.0), ("uneven", 0.7)):
        marks[name] = [
            [int(length * (i / num_ranks) ** share) for i in range(num_ranks + 1)]
            for length in (case.seqlen_q, case.seqlen_kv)
        ]
    masks = {"is_causal": case.is_causal, "pattern": case.pattern}
    prepared_call = cqs.distributed.prepare(
        *shards_of(problem, marks["even"], rank)[0], group=group, **masks, **options
    )
    seed, found = {"seed": 5} if "dropout_p" in options else {}, []
    for cuts in marks.values():
        for has_gradients in (True, False):
            tensors, *_ = shards_of(problem, cuts, rank)
            answers = []
            for call in (
                prepared_call,
                partial(cqs.distributed.attention, group=group, **masks, **options),
            ):
                with torch.set_grad_enabled(has_gradients):
                    answer = call(*tensors, **seed)
                parts = list(answer) if isinstance(answer, tuple) else [answer]
                if has_gradients:
                    parts += torch.autograd.grad(parts[0].square().sum(), tensors)
                answers.append(parts)
            found.append(all(map(torch.equal, *answers)))
    return found


def complaint_about_prepared(group, of_rank, shape, dtype):
    """Return what is raised where one rank calls what it prepared with other tensors."""
    tensors = [torch.randn(1, 4, 8, 16) for _ in range(3)]
    call = cqs.distributed.prepare(*tensors, group=group)
    if dist.get_rank(group) == of_rank:
        tensors = [torch.randn(shape, dtype=dtype) for _ in range(3)]
    try:
        call(*tensors)
    except Exception as error:
        return type(error), str(error)
    return None


def complaint_of_prepare(group, of_rank):
    """Return what is raised where one rank prepares causal calls."""
    tensors = [torch.randn(1, 4, 8, 16) for _ in range(3)]
    try:
        cqs.distributed.prepare(*tensors, group=group, is_causal=dist.get_rank(group) == of_rank)
    except Exception as error:
        return type(error), str(error)
    return None


def python_calls_of_attention(group, has_gradients):
    """Return the number of Python functions that a repeated call of attention calls."""
    tensors = [torch.randn(1, 4, 32, 16).requires_grad_(has_gradients) for _ in range(3)]
    calls = []

    def run_passes():
        output = cqs.distributed.attention(*tensors, group=group, is_causal=True)
        if has_gradients:
            torch.autograd.grad(output, tensors, output.detach())

    for _ in range(2):
        run_passes()
    sys.setprofile(lambda frame, event, argument: calls.append(event) if event == "call" else None)
    try:
        run_passes()
    finally:
        sys.setprofile(None)
    return len(calls)
