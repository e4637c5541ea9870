"""Random programs in which one rank does something else: an error on every rank, and soon."""

import random
import time
from datetime import timedelta
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from programs import fail_in_computation, random_cuts
from support.options import grouped

import cqs.distributed
from cqs.patterns import sliding_window

pytestmark = pytest.mark.slow

NUM_PROGRAMS, BATCH = 2000, 25
SILENT = ("raise", "within")
"""Kinds of programs in which a rank does not answer: the others raise after the timeout."""
SECONDS = 1.5
"""Timeout of groups in which a rank does not answer."""
ARGUMENTS = {
    "is_causal": True,
    "pattern": sliding_window(3, 3),
    "dropout_p": 0.3,
    "seed": 11,
    "head_parallel": 1,
    "num_chunks": 2,
    "plan": "rows",
    "links": (1e9, 1e-5),
    "max_bytes": 10**6,
    "joint_position": "rear",
    "backend": "reference",
    "return_lse": True,
    "verify": True,
    "scale": 0.7,
}
INVALID = dict.fromkeys(ARGUMENTS, ...) | {
    "scale": float("nan"),
    "seed": -1,
    "head_parallel": 5,
    "num_chunks": 0,
    "plan": "ring",
    "links": (1e9,),
    "max_bytes": 0,
}
"""Values of another type, or which other arguments may decide."""
TENSORS = {
    "num_heads": (1, 2, 2, 8),
    "num_kv_heads": (1, 4, 2, 8),
    "head_dim": (1, 4, 4, 4),
    "batch": (2, 4, 4, 8),
}
"""Batch, heads, KV heads and head_dim of a call on one rank alone."""
KINDS = ("argument", "tensors", "gradients", "invalid", "skip", "extra", "swap", "raise", "within")
WEIGHTS = (25, 10, 5, 15, 15, 10, 15, 2, 3)


class Call(NamedTuple):
    """An attention call of all ranks."""

    cuts: list[list[int]]
    """Ends of the shards of queries and of keys."""
    options: dict
    is_prepared: bool


class Program(NamedTuple):
    """What the ranks do, and what one of them does instead."""

    seed: int
    calls: list[Call]
    events: list[tuple[str, int]]
    """Forward and backward passes, each with the index of its call."""
    kind: str
    of_rank: int
    at: int
    """Index of the event at which the rank differs."""
    name: str
    """Name of the argument that differs."""


def random_program(seed, num_ranks):
    """Return a program; every call has a scale of its own, by which ranks tell calls apart."""
    generator = random.Random(seed)
    calls, events, pending = [], [], []
    for i in range(generator.randint(2, 5)):
        queries = generator.choice([12, 16, 24])
        lengths = queries, generator.choice([queries, 20])
        cuts = random_cuts(generator, lengths, num_ranks)
        if calls and generator.random() < 0.5:
            cuts = calls[-1].cuts
        options = {"scale": 0.2 + 0.05 * i}
        for name in generator.sample(sorted(ARGUMENTS.keys() - {"seed", "scale"}), 2):
            if generator.random() < 0.3:
                options[name] = ARGUMENTS[name]
        if options.get("backend") or "dropout_p" in options:
            options |= {"backend": "reference", "seed": 3}
        calls.append(Call(cuts, options, generator.random() < 0.2))
        events.append(("forward", i))
        pending.append(i)
        while pending and generator.random() < 0.4:
            events.append(("backward", pending.pop(generator.randrange(len(pending)))))
    kind = generator.choices(KINDS, WEIGHTS)[0]
    forward = [i for i, (pass_, _) in enumerate(events) if pass_ == "forward"]
    at = generator.choice(forward)
    if kind in ("skip", "extra"):
        at = generator.randrange(len(events))
    if kind == "swap":
        at = generator.choice([i for i in range(len(events) - 1) if can_swap(*events[i : i + 2])])
    options = calls[events[at][1]].options
    names = {"argument": ARGUMENTS, "invalid": INVALID, "tensors": TENSORS}.get(kind, {"": 0})
    different = [name for name in names if options.get(name) != names[name]]
    name = generator.choice(different)
    # A last call, which a rank that has skipped the one before does not make in its place.
    calls.append(Call(calls[-1].cuts, {"scale": 0.9}, False))
    events.append(("forward", len(calls) - 1))
    return Program(seed, calls, events, kind, generator.randrange(num_ranks), at, name)


def can_swap(first, second):
    return not (first[1] == second[1] and first[0] == "forward")


def events_of(program, rank):
    """Return the passes of a rank."""
    events, at = list(program.events), program.at
    if rank != program.of_rank:
        return events
    if program.kind == "skip":
        backward = "backward", events[at][1]
        events = [each for i, each in enumerate(events) if i != at and each != backward]
    if program.kind == "extra":
        events.insert(at, events[at])
    if program.kind == "swap":
        events[at : at + 2] = reversed(events[at : at + 2])
    return events


def outcomes_of_programs(group, num_ranks, programs):
    """Run programs on the first ranks of a group; return for each what this rank found.

    That is the number of right and of wrong results, the type and the text of the error, and the
    seconds from the start of the failing pass to the error.
    """
    made, found = None, []
    for program in programs:
        of_program = made
        if program.kind in SILENT:  # cannot be used afterwards
            timeout = timedelta(seconds=SECONDS)
            of_program = dist.new_group(range(num_ranks), timeout=timeout)
        elif made is None:
            of_program = made = dist.new_group(range(num_ranks))
        if dist.get_rank(group) < num_ranks:
            found.append(outcome(of_program, program))
        dist.barrier(group)
    return found


def outcome(group, program):
    """Run the passes of this rank until one fails."""
    rank, passes = dist.get_rank(group), {}
    differs = rank == program.of_rank and program.kind in (*KINDS[:4], *SILENT)
    right = wrong = 0
    for i, (pass_, number) in enumerate(events_of(program, rank)):
        start = time.monotonic()
        try:
            if differs and i == program.at and program.kind == "raise":
                raise KeyError("as if")
            if pass_ == "forward":
                kind = program.kind if differs and i == program.at else ""
                passes[number] = run_forward(group, program, number, kind)
                _, output, right_results = passes[number]
                is_right = are_close([output], right_results[:1])
            else:
                shards, output, right_results = passes[number]
                loss = output.square().sum()
                gradients = torch.autograd.grad(loss, shards, retain_graph=True)
                is_right = are_close(gradients, right_results[1:])
        except Exception as error:
            return right, wrong, type(error).__name__, str(error), time.monotonic() - start
        right, wrong = right + is_right, wrong + (not is_right)
    return right, wrong, "", "", 0.0


def run_forward(group, program, number, kind):
    """Return shards, output, and the right output and gradients of this rank's rows."""
    call, rank = program.calls[number], dist.get_rank(group)
    batch, *heads, dim = TENSORS[program.name] if kind == "tensors" else (1, 4, 4, 8)
    options = dict(call.options)
    if kind in ("argument", "invalid"):
        options[program.name] = {"argument": ARGUMENTS, "invalid": INVALID}[kind][program.name]
    generator = torch.Generator().manual_seed(1000 * program.seed + number)
    whole, shards, rows = [], [], []
    for side in (0, 1, 1):
        shape = batch, heads[side], call.cuts[side][-1], dim
        tensor = torch.randn(shape, generator=generator, dtype=torch.float64)
        rows.append(slice(*call.cuts[side][rank : rank + 2]))
        shards.append(tensor[:, :, rows[-1]].clone().requires_grad_(kind != "gradients"))
        whole.append(tensor.requires_grad_())
    with pytest.MonkeyPatch.context() as patch:
        if kind == "within":
            fail_in_computation(patch)
        if call.is_prepared and not kind:
            seed = options.pop("seed", None)
            answer = cqs.distributed.prepare(*shards, group=group, **grouped(options))(
                *shards, seed=seed
            )
            options["seed"] = seed
        else:
            answer = cqs.distributed.attention(*shards, group=group, **grouped(options))
    output = answer.output if isinstance(answer, tuple) else answer
    known = {"is_causal", "pattern", "scale", "dropout_p", "seed", "backend"}
    expected = cqs.attention(*whole, **{k: v for k, v in options.items() if k in known})
    gradients = torch.autograd.grad(expected.square().sum(), whole)
    of_rank = zip((expected, *gradients), (rows[0], *rows), strict=True)
    return shards, output, [each[:, :, own] for each, own in of_rank]


def are_close(found, right):
    return all(torch.allclose(*pair, atol=1e-9) for pair in zip(found, right, strict=True))


@pytest.mark.sample(25)
@pytest.mark.parametrize("batch", range(NUM_PROGRAMS // BATCH))
def test_ranks_of_which_one_differs_find_out(ranks, batch):
    num_ranks = 2 + batch % 5
    programs = [random_program(BATCH * batch + i, num_ranks) for i in range(BATCH)]
    found = ranks.run(8, outcomes_of_programs, num_ranks, programs)[:num_ranks]
    for program, *of_ranks in zip(programs, *found, strict=True):
        check(program, of_ranks)


def check(program, found):
    """Every rank has an error within 5 s, and no rank has a wrong result."""
    for rank, (_, wrong, error, text, seconds) in enumerate(found):
        about = f"rank {rank}: {error} {text} after {seconds:.1f} s; {program}"
        assert not wrong and error and seconds < 5, about
        if program.kind in SILENT:
            continue
        # The first rank that differs from rank 0.
        named = program.of_rank or (1 if program.kind != "invalid" else 0)
        if program.kind != "invalid":
            assert error == "ValueError" and ", rank 0 has " in text, about
            assert text.startswith(f"rank {named} of the group has "), about
        elif rank != program.of_rank:
            assert error == "ValueError", about
            assert text.startswith(f"rank {named} of the group failed: "), about
    if program.kind not in SILENT:  # all found it in the same pass
        assert len({right for right, *_ in found}) == 1
