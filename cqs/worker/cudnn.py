"""Backend ``cudnn``: cuDNN's fused attention, through the operator that returns its LSE."""

import torch
from torch import Tensor

from cqs.partial import Partial
from cqs.worker.backend import CallBackend
from cqs.worker.operands import (
    Operands,
    why_not_half_precision_on_gpu,
    with_adjacent_columns,
    with_positive_scale,
    with_sign_of,
)

_HEAD_DIMS = range(8, 129, 8)


class _Cudnn(CallBackend):
    """cuDNN's fused kernels. Gradients are accumulated in a nondeterministic order."""

    name = "cudnn"
    least_keys = 2

    def why_not(self, query: Tensor, key: Tensor, value: Tensor) -> str | None:
        if reason := why_not_half_precision_on_gpu(query, value, _HEAD_DIMS):
            return reason
        if key.shape[2] == 1:
            return "requires more than one key, got 1"
        if not torch.backends.cudnn.is_available():
            return "requires a PyTorch built with cuDNN"
        if torch.are_deterministic_algorithms_enabled():
            return "requires torch.use_deterministic_algorithms(False): its gradients differ by run"
        if (capability := torch.cuda.get_device_capability(query.device)) < (8, 0):
            return f"requires compute capability 8.0 or later, got {capability[0]}.{capability[1]}"
        return None

    def attend(self, operands: Operands) -> Partial:
        """Compute output and LSE of full or causal attention in one call of cuDNN."""
        query, key, value, is_causal, scale, *_ = operands
        query, scale = with_positive_scale(query, scale)
        output, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *with_adjacent_columns(query, key, value),
            None,
            True,
            0.0,
            is_causal,
            False,
            scale=scale,
        )
        return Partial(output, lse.view(query.shape[:3]))

    def differentiate(
        self, operands: Operands, grad_output: Tensor, output: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, is_causal, scale, *_ = operands
        positive_query, positive_scale = with_positive_scale(query, scale)
        # Where a row of the output is -inf, the kernel gives finite gradients to keys of other
        # calls, which are NaN in PyTorch. NaN in the output reaches them.
        output = output.nan_to_num(nan=torch.nan, posinf=torch.nan, neginf=torch.nan)
        no_seed = torch.zeros((), dtype=torch.int64, device=query.device)
        grad_query, grad_key, grad_value = (
            torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
                *with_adjacent_columns(grad_output, positive_query, key, value, output),
                lse.unsqueeze(-1).contiguous(),
                no_seed,
                no_seed,
                None,
                None,
                None,
                query.shape[2],
                key.shape[2],
                0.0,
                is_causal,
                scale=positive_scale,
            )
        )
        return with_sign_of(scale, grad_query), grad_key, grad_value


CUDNN = _Cudnn()
