"""Interface of a backend: one kind of kernels that compute attention on one device."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from cqs.partial import Partial
from cqs.worker.operands import Operands, TaskOperands


class Backend:
    """One kind of kernels. Backends have no state; each has one instance, in its own file."""

    name: str
    """Name of the backend, the value of ``backend=``."""
    supports_dropout = False
    supported_terms: frozenset[str] = frozenset()
    """Names of the score terms that the backend supports, see :attr:`ScoreTerms.names`."""
    required_terms: frozenset[str] = frozenset()
    """Names of score terms without which the backend does not compute a call."""
    supports_patterns = False
    """Whether the backend supports calls with a mask, into which sparse patterns are cut."""

    def why_not(self, query: Tensor, key: Tensor, value: Tensor) -> str | None:
        """Return why the backend does not support these tensors, or None if it does.

        Args:
            query: ``[batch, num_heads, seqlen_q, head_dim]``.
            key: ``[batch, num_kv_heads, seqlen_kv, head_dim]``.
            value: ``[batch, num_kv_heads, seqlen_kv, value_dim]``.
        """
        raise NotImplementedError


class CallBackend(Backend):
    """A backend whose kernels compute one rectangle or causal square a call."""

    joins_calls = False
    """Whether calls of one shape are joined into a batched call."""
    least_keys = 1
    """Fewest keys of a call that the kernels support; the reference computes smaller calls."""

    def attend(self, operands: Operands) -> Partial:
        """Compute output and LSE of one call; no tensor may be empty.

        Returns:
            Output ``[batch, num_heads, seqlen_q, value_dim]`` in the dtype of the query, and LSE
            ``[batch, num_heads, seqlen_q]``. Queries without a live pair get output 0 and LSE -inf.
        """
        raise NotImplementedError

    def unsound_rows(self, partial: Partial, visible: Tensor | None) -> Tensor | None:
        """Return the rows of a result that the kernels may have lost, or None if all are sound.

        Args:
            partial: The result of :meth:`attend`; rows without a live pair may be corrected in
                place.
            visible: The mask of the call, bool ``[seqlen_q, seqlen_kv]``, or None.

        Returns:
            bool ``[batch, num_heads, seqlen_q]``; the reference computes these rows again.
        """
        return None

    def differentiate(
        self, operands: Operands, grad_output: Tensor, output: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the contribution of one call's pairs to the gradients of query, key and value.

        Args:
            operands: Tensors and options of the call.
            grad_output: Gradient of the output, ``[batch, num_heads, seqlen_q, value_dim]``.
            output: Output of the whole problem, in the same shape.
            lse: LSE of the whole problem, ``[batch, num_heads, seqlen_q]``; +inf for queries
                without a live pair.

        Returns:
            Gradients of query, key and value in their shapes, in the dtype of the query or in
            float32 (float64 for float64 tensors).
        """
        raise NotImplementedError


class TaskBackend(Backend):
    """A backend whose kernels compute the work of any number of tasks in one launch."""

    supports_dropout = supports_patterns = True

    def attend(self, operands: TaskOperands, **options: Any) -> Partial:
        """Compute partial outputs; see :func:`cqs.worker.triton.launch.attend_block_rows`."""
        raise NotImplementedError

    def differentiate(
        self, operands: TaskOperands, *output_tensors: Tensor, **options: Any
    ) -> Sequence[Tensor]:
        """Compute gradients; see :func:`cqs.worker.triton.launch.gradients_of_block_rows`."""
        raise NotImplementedError
