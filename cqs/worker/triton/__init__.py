"""Backend ``triton``: kernels that compute whole tasks, one or many in one launch.

Triton is imported on the first call, because planning must run without it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cqs.partial import Partial, has_triton
from cqs.worker.backend import TaskBackend
from cqs.worker.operands import TaskOperands

_HEAD_DIMS = range(16, 513, 8)
_LARGEST_FLOAT32 = 128
_SMALL_MEMORY = (8, 6), (8, 9)
"""Compute capabilities with 99 KiB of shared memory for a program and no TMA: too little for the
smallest tiles of larger float32 heads."""


class _Triton(TaskBackend):
    """Kernels of this project: for Hopper GPUs in half precision, and for all other GPUs."""

    name = "triton"
    supported_terms = frozenset(("softcap", "alibi_slopes", "bias"))

    def why_not(self, query: Tensor, key: Tensor, value: Tensor) -> str | None:
        dtypes = [torch.float32, torch.float16, torch.bfloat16]
        on_gpu = query.device.type == "cuda"
        if not on_gpu:
            if not (has_triton() and _is_interpreted()):
                return f"requires CUDA tensors, got {query.device}"
            dtypes.remove(torch.bfloat16)  # the interpreter multiplies its bits as integers
        if not has_triton():
            return "requires Triton, which is not installed"
        if query.dtype not in dtypes:
            names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            return f"requires {names}, got {query.dtype}"
        for name, tensor in (("head_dim", query), ("value_dim", value)):
            if tensor.shape[-1] not in _HEAD_DIMS:
                return (
                    f"requires a {name} that is a multiple of 8 from 16 to 512, "
                    f"got {tensor.shape[-1]}"
                )
        largest = max(query.shape[-1], value.shape[-1])
        if query.dtype == torch.float32 and largest > _LARGEST_FLOAT32 and on_gpu:
            capability = torch.cuda.get_device_capability(query.device)
            if capability in _SMALL_MEMORY:
                return f"requires dims up to {_LARGEST_FLOAT32} in float32 here, got {largest}"
        return None

    def attend(self, operands: TaskOperands, **options: Any) -> Partial:
        from cqs.worker.triton import launch

        with torch.cuda.device_of(operands.query):  # Triton launches on the current device
            return launch.attend_block_rows(operands, **options)

    def differentiate(
        self, operands: TaskOperands, *output_tensors: Tensor, **options: Any
    ) -> Sequence[Tensor]:
        from cqs.worker.triton import launch

        with torch.cuda.device_of(operands.query):
            return launch.gradients_of_block_rows(operands, *output_tensors, **options)


def _is_interpreted() -> bool:
    import triton

    return bool(triton.knobs.runtime.interpret)


TRITON = _Triton()
