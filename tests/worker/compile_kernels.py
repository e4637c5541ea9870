"""Compile every kernel for Hopper GPUs as the launches ask for it, where no GPU is.

The tensors are of the CPU and the driver claims a GPU, but nothing is launched. To be run as a
program: Triton either compiles kernels or interprets them in all of a process.
"""

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from cqs.executors.distributed.transport import fused_copies
from cqs.executors.distributed.transport.row_copies import RowCopy
from cqs.partial import Partial, fused_merge
from cqs.patterns import Pattern, dilated, from_mask, sliding_window
from cqs.problem.dropout import Dropout
from cqs.scheduler import make_plan
from cqs.worker.operands import TaskOperands
from cqs.worker.triton import launch
from cqs.worker.work import make_work

TOKENS = 384


class Driver:
    """Of a GPU that is not there."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_both_passes(
    dtype: torch.dtype,
    head_dim: int,
    pattern: Pattern,
    *,
    on_hopper: bool = False,
    dropout: Dropout | None = None,
) -> None:
    launch._is_for_hopper = lambda query, value: on_hopper
    whole = (range(TOKENS),)
    query = torch.randn(1, 2, TOKENS, head_dim, dtype=dtype)
    key, value = (torch.randn(1, 1, TOKENS, head_dim, dtype=dtype) for _ in range(2))
    steps = make_plan(TOKENS, num_tasks=1, pattern=pattern).task(0).steps
    work = make_work(steps, pattern.bind(TOKENS), whole, whole)
    bits = None if dropout is None else dropout.random_bits(query, whole, whole)
    operands = TaskOperands(query, key, value, work, 0.1, dropout, bits)
    answer = launch.attend_block_rows(operands)
    launch.gradients_of_block_rows(operands, query, *answer)


def compile_row_copies(dtype: torch.dtype) -> None:
    answer = Partial(torch.empty(1, 2, TOKENS, 64, dtype=dtype), torch.empty(1, 2, TOKENS))
    fused_merge.merge_rows(answer, [(answer, slice(0, 128)), (answer, slice(64, None))])
    tensors = [answer.output, torch.empty(1, TOKENS, 2, 64, dtype=dtype).transpose(1, 2)]
    schedule = tuple(RowCopy(i, 0, 64, 128, 0, 1, 1) for i in range(2))
    fused_copies.copy_rows(tensors, tensors[::-1], schedule)


if __name__ == "__main__":
    triton.runtime.driver.set_active(Driver())
    compile_or_run = JITFunction.run
    JITFunction.run = lambda *args, warmup, **options: compile_or_run(*args, warmup=True, **options)
    launch._persistent = lambda num_items, device: (num_items,)
    window, streams = sliding_window(100, 100), dilated(TOKENS, TOKENS, 2)
    irregular = from_mask(np.random.default_rng(0).random((TOKENS, TOKENS)) < 0.5)
    for dtype in (torch.float32, torch.bfloat16):
        compile_row_copies(dtype)
        compile_both_passes(dtype, 64, window | streams)
        compile_both_passes(dtype, 80, irregular)
        compile_both_passes(dtype, 256, window, dropout=Dropout(0.5, seed=0))
    for head_dim, pattern in ((64, irregular), (128, window), (128, streams), (128, irregular)):
        compile_both_passes(torch.bfloat16, head_dim, pattern, on_hopper=True)
