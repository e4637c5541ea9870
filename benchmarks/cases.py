"""Named attention problems and their masks, shared by tests and benchmarks."""

from dataclasses import dataclass

import torch
from torch import Tensor

from cqs.executors.verify import bound_mask
from cqs.patterns import Pattern
from cqs.problem import Problem, check_problem


@dataclass(frozen=True)
class Case:
    """Shapes and options of one problem, with random tensors that depend on its name alone."""

    name: str
    """Name of the case, which seeds the random tensors."""
    seqlen_q: int
    """Number of queries."""
    seqlen_kv: int
    """Number of keys."""
    num_heads: int = 4
    """Number of query heads."""
    num_kv_heads: int = 4
    """Number of KV heads."""
    head_dim: int = 16
    """Size of a head of query, key and value."""
    batch: int = 1
    """Number of batch elements."""
    is_causal: bool = False
    """Whether query i attends only to keys up to ``i + seqlen_kv - seqlen_q``."""
    pattern: Pattern | None = None
    """Query-key pairs that attend; ``None`` means all."""
    scale: float | None = None
    """Factor on the scores; ``None`` means ``head_dim ** -0.5``."""
    magnitude: float = 1.0
    """Standard deviation of query and key: scores grow with its square."""

    def make(self, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Problem:
        """Draw the tensors, equal for every dtype up to rounding.

        Args:
            dtype: Dtype of the tensors, which are drawn in float64.
            device: Device of the tensors.
        """
        generator = torch.Generator().manual_seed(sum(map(ord, self.name)))

        def draw(num_heads: int, seqlen: int, magnitude: float) -> Tensor:
            shape = self.batch, num_heads, seqlen, self.head_dim
            tensor = magnitude * torch.randn(shape, generator=generator, dtype=torch.float64)
            return tensor.to(device, dtype)

        return check_problem(
            draw(self.num_heads, self.seqlen_q, self.magnitude),
            draw(self.num_kv_heads, self.seqlen_kv, self.magnitude),
            draw(self.num_kv_heads, self.seqlen_kv, 1.0),
            is_causal=self.is_causal,
            pattern=self.pattern,
            scale=self.scale,
        )


CASES = (
    Case("full", 128, 128),
    Case("causal", 128, 128, is_causal=True),
    Case("ragged", 131, 131, batch=2),
    Case("ragged-causal", 131, 131, batch=2, is_causal=True),
    Case("gqa", 97, 97, num_heads=6, num_kv_heads=2),
    Case("gqa-causal", 97, 97, num_heads=6, num_kv_heads=2, is_causal=True),
    Case("one-kv-head", 60, 60, num_kv_heads=1, is_causal=True),
    Case("cross", 145, 450, batch=2),
    Case("cross-causal", 145, 450, batch=2, is_causal=True),
    Case("more-queries-causal", 450, 145, batch=2, is_causal=True),
    Case("one-query", 1, 77, is_causal=True),
    Case("two-tokens", 2, 2, is_causal=True),
    Case("odd-head-dim", 80, 80, head_dim=5),
    Case("wide-head-dim", 40, 40, head_dim=160),
    Case("user-scale", 64, 64, scale=-0.7),
    Case("large-scores", 300, 300, 8, 4, 64, batch=2, magnitude=43.0, is_causal=True),
)


def visible_mask(problem: Problem) -> Tensor | None:
    """Return the mask of a problem, True at live pairs, or None if no pair is masked out.

    Returns:
        Boolean ``[seqlen_q, seqlen_kv]``, or ``[batch, heads, seqlen_q, seqlen_kv]`` if the pattern
        differs by head.
    """
    if not (problem.is_causal or problem.pattern):
        return None
    if problem.differs_by_head:
        assert problem.pattern is not None
        mask = problem.pattern.to_mask(problem.query.shape[2], problem.key.shape[2])
        return torch.from_numpy(mask).to(problem.query.device)
    return torch.from_numpy(bound_mask(problem).to_mask()).to(problem.query.device)
