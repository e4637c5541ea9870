"""Compile every kernel for Hopper GPUs, or the plain ones for others, where no GPU is.

The tensors are of the CPU and the driver claims a GPU, but launches are only recorded. Every launch
is made twice, because Triton binds the arguments of the first and cqs those of the second. To be
run as a program: Triton either compiles kernels or interprets them in all of a process.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton
from hopper import plan_work
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from cqs.executors.distributed.transport import fused_copies
from cqs.executors.distributed.transport.exchange import RowCopy
from cqs.partial import Partial, fused_merge
from cqs.patterns import Pattern, dilated, from_mask, sliding_window
from cqs.problem.dropout import Dropout
from cqs.problem.score_terms import ScoreTerms
from cqs.worker.operands import TaskOperands
from cqs.worker.triton import launch, rectangle_launch, tile_sizes
from cqs.worker.triton.rectangle_launch import takes_rectangle_kernel, takes_visits

TOKENS = 384
SHARED_MEMORY = {80: 166_912, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
"""Bytes that a program can have, by compute capability. Launches that need more fail."""

launched: list[tuple[Any, ...]] = []
"""The arguments of all launches: grid, stream, function, metadata and hooks, and the kernel's."""


class Driver:
    """Of a GPU that is not there."""

    utils = SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": SHARED_MEMORY[target]},
        load_binary=lambda name, *_: (name, name, 32, 0, 1024),  # it has up to 1,024 threads
    )

    def launcher_cls(self, src: Any, metadata: Any) -> Callable[..., None]:
        return lambda *arguments: launched.append(tuple(map(opened, arguments)))

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", target, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def opened(argument: Any) -> Any:
    """Return the type and the attributes of a descriptor, which a later launch may change."""
    return (type(argument), *vars(argument).values()) if hasattr(argument, "base") else argument


def compile_both_passes(
    dtype: torch.dtype,
    head_dim: int,
    pattern: Pattern,
    *,
    on_hopper: bool = False,
    dropout: Dropout | None = None,
    terms: ScoreTerms | None = None,
) -> None:
    tile_sizes.is_for_hopper = lambda query: on_hopper
    whole = (range(TOKENS),)
    work = plan_work(TOKENS, TOKENS, pattern=pattern, distance=terms and terms.distance)

    def run() -> list[Tensor]:
        query = torch.randn(1, 2, TOKENS, head_dim, dtype=dtype)
        key, value = (torch.randn(1, 1, TOKENS, head_dim, dtype=dtype) for _ in range(2))
        bits = None if dropout is None else dropout.random_bits(query, whole, whole)
        pair_terms = terms and terms.pair_terms(query.device, whole, whole)
        operands = TaskOperands(query, key, value, work, 0.1, dropout, bits, pair_terms)
        answer, grad_output = launch.attend_block_rows(operands), torch.randn_like(query)
        gradients = launch.gradients_of_block_rows(operands, grad_output, *answer)
        return [query, key, value, *answer, grad_output, *gradients]

    run_twice(run, is_prepared=dropout is None)


def compile_three_consumers(dtype: torch.dtype, head_dim: int, pattern: Pattern) -> None:
    least, suits = launch._MIN_ITEMS_OF_THREE, launch._suits_three_consumers
    launch._MIN_ITEMS_OF_THREE, launch._suits_three_consumers = 0, lambda *_: True
    compile_both_passes(dtype, head_dim, pattern, on_hopper=True)
    launch._MIN_ITEMS_OF_THREE, launch._suits_three_consumers = least, suits


def compile_five_products(
    takes: Callable[[TaskOperands], bool],
    dtype: torch.dtype,
    head_dim: int,
    lengths: tuple[int, int],
    gradient_dtype: torch.dtype | None,
    **options: Any,
) -> None:
    """Compile the backward kernel for which a function chooses a plan with these options."""
    tile_sizes.is_for_hopper = lambda query: True
    rectangle_launch._MIN_PAIRS = rectangle_launch._MIN_PAIRS_OF_SEVERAL = 0.0
    rectangle_launch._MIN_VISITS = {64: 0, 128: 0}
    seqlen_q, seqlen_kv = lengths
    work = plan_work(seqlen_q, seqlen_kv, **options)

    def run() -> list[Tensor]:
        query = torch.randn(1, 4, seqlen_q, head_dim, dtype=dtype)
        key, value = (torch.randn(1, 2, seqlen_kv, head_dim, dtype=dtype) for _ in range(2))
        output, grad_output, lse = query.clone(), query.clone(), torch.zeros(1, 4, seqlen_q)
        operands = TaskOperands(query, key, value, work, 0.1)
        assert takes(operands)
        gradients = launch.gradients_of_block_rows(
            operands, grad_output, output, lse, dtype=gradient_dtype
        )
        return [query, key, value, output, grad_output, lse, *gradients]

    run_twice(run)


def compile_row_copies(dtype: torch.dtype) -> None:
    schedule = tuple(RowCopy(i, 0, 64, 128, 0, 1, 1) for i in range(2))

    def run() -> list[Tensor]:
        answer = Partial(torch.empty(1, 2, TOKENS, 64, dtype=dtype), torch.empty(1, 2, TOKENS))
        fused_merge.merge_rows(answer, [(answer, slice(0, 128)), (answer, slice(64, None))])
        tensors = [answer.output, torch.empty(1, TOKENS, 2, 64, dtype=dtype).transpose(1, 2)]
        fused_copies.copy_rows(tensors, tensors[::-1], schedule)
        total = torch.empty(1, 2, TOKENS, 64, dtype=dtype)
        fused_merge.sum_rows(total, [(tensors[0], slice(None)), (tensors[1], slice(64, None))])
        return [*tensors, answer.lse, total]

    run_twice(run)


def run_twice(run: Callable[[], list[Tensor]], *, is_prepared: bool = True) -> None:
    """Check that launches with other tensors are those that Triton would make."""
    launched.clear()
    first, number = described(run()), num_bound
    launched.clear()
    assert described(run()) == first
    assert (num_bound == number) == is_prepared


def described(tensors: list[Tensor]) -> list[Any]:
    """Return the recorded launches, with the index of each tensor of ``tensors`` in its place."""
    names = {tensor.data_ptr(): number for number, tensor in enumerate(tensors)}

    def describe(argument: Any) -> Any:
        if isinstance(argument, Tensor):
            return names.get(argument.data_ptr()), argument.dtype, argument.stride()
        if isinstance(argument, tuple):
            return tuple(map(describe, argument))
        return argument

    # Grid, stream, function and metadata come first, then three arguments for hooks.
    return [(*values[:6], *map(describe, values[9:])) for values in launched]


def compile_for_hopper() -> None:
    window, streams = sliding_window(100, 100), dilated(TOKENS, TOKENS, 2)
    irregular = from_mask(np.random.default_rng(0).random((TOKENS, TOKENS)) < 0.5)
    for dtype in (torch.float32, torch.bfloat16):
        compile_row_copies(dtype)
        compile_both_passes(dtype, 64, window | streams)
        compile_both_passes(dtype, 80, irregular)
        compile_both_passes(dtype, 256, window, dropout=Dropout(0.5, seed=0))
    for head_dim, pattern in ((64, irregular), (128, window), (128, streams), (128, irregular)):
        compile_both_passes(torch.bfloat16, head_dim, pattern, on_hopper=True)
    compile_both_passes(torch.float16, 256, irregular, on_hopper=True)
    for dtype in (torch.float16, torch.bfloat16):
        compile_three_consumers(dtype, 64, window | streams)
    for head_dim in (64, 128):
        for dtype, lengths in ((torch.bfloat16, (TOKENS, TOKENS)), (torch.float16, (300, 333))):
            kind = dtype, head_dim, lengths
            compile_five_products(takes_rectangle_kernel, *kind, None)
            compile_five_products(takes_rectangle_kernel, *kind, dtype, is_causal=True)
            compile_five_products(takes_visits, *kind, dtype, pattern=window)
    kind = torch.bfloat16, 128, (300, 333), torch.bfloat16
    compile_five_products(takes_rectangle_kernel, *kind, is_causal=True, num_tasks=2)
    capped, slanted = ScoreTerms(softcap=50.0), ScoreTerms(alibi_slopes=torch.rand(1, 2))
    both = replace(slanted, softcap=50.0)
    for terms in (capped, slanted, both):
        compile_both_passes(torch.bfloat16, 128, irregular, on_hopper=True, terms=terms)
        compile_both_passes(torch.bfloat16, 64, streams, on_hopper=True, terms=terms)
    both = replace(both, bias=torch.randn(1, 1, TOKENS, TOKENS))
    for dtype in (torch.float32, torch.bfloat16):
        compile_both_passes(dtype, 64, window | streams, terms=both)


def compile_for_others() -> None:
    terms = ScoreTerms(softcap=50.0, alibi_slopes=torch.rand(1, 2))
    for dtype in (torch.float32, torch.bfloat16):
        compile_row_copies(dtype)
        for head_dim in map(int, sys.argv[2:]):
            compile_both_passes(dtype, head_dim, sliding_window(100, 100), terms=terms)


if __name__ == "__main__":
    target = int(sys.argv[1])
    triton.runtime.driver.set_active(Driver())
    bind, num_bound = JITFunction.run, 0

    def bind_and_count(*args: Any, **options: Any) -> Any:
        global num_bound
        num_bound += 1
        return bind(*args, **options)

    JITFunction.run = bind_and_count
    launch.new_counter = lambda device: torch.zeros(4, dtype=torch.int32)
    launch.num_processors = tile_sizes.num_processors = lambda device: 132
    tile_sizes.is_tuned_for = lambda query: target == 90
    compile_for_hopper() if target == 90 else compile_for_others()
