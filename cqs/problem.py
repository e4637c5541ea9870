"""The public door: one attention problem, checked once and trusted inside."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd import forward_ad

from cqs.dropout import Dropout
from cqs.partial import Partial, lse_dtype
from cqs.scheduler import AttentionShape, Plan, make_plan
from cqs.scheduler.arguments import as_bool, as_integer, to_float

_GPU_TILE = 128
"""Tokens of a tile of the fast kernels."""
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Problem:
    """Tensors and options that fit together."""

    query: Tensor
    """``[batch, num_heads, seqlen_q, head_dim]``."""
    key: Tensor
    """``[batch, num_kv_heads, seqlen_kv, head_dim]``."""
    value: Tensor
    """``[batch, num_kv_heads, seqlen_kv, value_dim]``."""
    is_causal: bool
    scale: float
    dropout: Dropout | None = None

    @property
    def shape(self) -> AttentionShape:
        """What the scheduler needs to know to predict costs."""
        return AttentionShape(
            batch=self.query.shape[0],
            num_heads=self.query.shape[1],
            num_kv_heads=self.key.shape[1],
            head_dim=self.query.shape[3],
            value_dim=self.value.shape[3],
            itemsize=self.query.element_size(),
            has_dropout=self.dropout is not None,
        )

    def make_plan(self, num_workers: int, interest_set: Iterable[int] | None = None) -> Plan:
        """Plan this problem; see :func:`cqs.make_plan`."""
        return make_plan(
            self.query.shape[2],
            self.key.shape[2],
            num_workers=num_workers,
            is_causal=self.is_causal,
            interest_set=interest_set,
            tile=_GPU_TILE if self.query.is_cuda else 1,
        )

    def empty_answer(self) -> Partial:
        """Allocate the answer: output in the dtype and device of the query, and its lse."""
        shape = (*self.query.shape[:3], self.value.shape[3])
        return Partial(
            self.query.new_empty(shape),
            self.query.new_empty(shape[:3], dtype=lse_dtype(self.query.dtype)),
        )


def check_problem(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
) -> Problem:
    """Check what the user passed; fill in the default scale and, to drop out, a random seed.

    Raises:
        TypeError: if an argument is of the wrong type or the tensors of an unsupported dtype.
        ValueError: if shapes, dtypes or devices do not fit together, ``scale`` is not finite or
            ``dropout_p`` not in [0, 1).
        NotImplementedError: for devices other than CPU and CUDA, and for derivatives other than
            autograd's backward pass.
    """
    tensors = {"query": query, "key": key, "value": value}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
        if tensor.layout != torch.strided or tensor.is_nested:
            raise TypeError(f"{name} must be a dense tensor, got layout {tensor.layout}")
        if tensor.ndim != 4:
            raise ValueError(
                f"{name} must be [batch, num_heads, seqlen, head_dim], "
                f"got shape {tuple(tensor.shape)}"
            )
        if tensor.dtype not in _DTYPES:
            raise TypeError(
                f"{name} must be float64, float32, bfloat16 or float16, got {tensor.dtype}"
            )
        if tensor.device.type not in ("cpu", "cuda"):
            raise NotImplementedError(f"{name} must be on the CPU or a GPU, got {tensor.device}")
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            raise NotImplementedError(f"{name} is inside torch.func.vmap or grad: not supported")
        if forward_ad.unpack_dual(tensor).tangent is not None:
            raise NotImplementedError(f"{name} has a tangent: no forward-mode derivatives")
        if tensor.dtype != query.dtype:
            raise ValueError(f"{name} is {tensor.dtype} but query is {query.dtype}")
        if tensor.device != query.device:
            raise ValueError(f"{name} is on {tensor.device} but query is on {query.device}")
        if tensor.shape[0] != query.shape[0]:
            raise ValueError(f"{name} has batch {tensor.shape[0]} but query has {query.shape[0]}")
        if tensor.shape[3] == 0:
            raise ValueError(
                f"{name} must have a head_dim of at least 1, got {tuple(tensor.shape)}"
            )
    if key.shape[1:3] != value.shape[1:3]:
        raise ValueError(
            f"key and value must agree in heads and seqlen, got {tuple(key.shape)} "
            f"and {tuple(value.shape)}"
        )
    if key.shape[3] != query.shape[3]:
        raise ValueError(f"key has head_dim {key.shape[3]} but query has {query.shape[3]}")
    num_heads, num_kv_heads = query.shape[1], key.shape[1]
    if num_heads < 1 or num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(
            f"num_heads must be a positive multiple of num_kv_heads, got {num_heads} "
            f"and {num_kv_heads}"
        )
    is_causal = as_bool("is_causal", is_causal)
    if scale is None:
        scale = query.shape[3] ** -0.5
    factor = to_float(scale, "scale must be a number or None")
    if not math.isfinite(factor):
        raise ValueError(f"scale must be finite, got {scale}")
    dropout = _check_dropout(dropout_p, seed)
    return Problem(query, key, value, is_causal, factor, dropout)


def _check_dropout(dropout_p: float, seed: int | None) -> Dropout | None:
    probability = to_float(dropout_p, "dropout_p must be a number")
    if not 0 <= probability < 1:
        raise ValueError(f"dropout_p must lie in [0, 1), got {dropout_p}")
    if seed is not None:
        seed = as_integer("seed", seed, 0)
    if not probability:
        return None
    if seed is None:
        seed = int(torch.randint(2**63 - 1, (), device="cpu"))
    return Dropout(probability, seed)
