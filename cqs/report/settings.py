"""The settings of a report: the problem and the options of its measurement."""

from dataclasses import KW_ONLY, dataclass
from functools import partial

import torch
from torch import Tensor

from cqs.patterns import Pattern
from cqs.patterns.text import parse_pattern
from cqs.problem import Problem, check_problem


@dataclass(frozen=True)
class Settings:
    """A problem and the options of its measurement, without the number of tasks."""

    executor: str
    """``"local"`` or ``"ray"``."""
    tokens: int
    """Number of queries and of keys."""
    num_heads: int
    """Number of query heads."""
    num_kv_heads: int
    """Number of KV heads."""
    head_dim: int
    """Size of a head."""
    dtype: str
    """Name of a PyTorch dtype, such as ``"bfloat16"``."""
    _: KW_ONLY
    is_causal: bool = False
    """Whether attention is causal."""
    pattern: str | None = None
    """Expression of the pattern, see :func:`cqs.patterns.text.parse_pattern`, or None."""
    backend: str | None = None
    """Name of the backend, ``None`` for the default of :func:`cqs.attention`."""
    repeats: int = 5
    """Number of repeats, of which medians are reported."""
    seed: int = 0
    """Random seed of the tensors."""

    def make_pattern(self) -> Pattern | None:
        """Return the pattern, or ``None`` without one.

        Raises:
            ValueError: The expression is not a pattern.
        """
        return None if self.pattern is None else parse_pattern(self.pattern)

    def make_problem(self) -> tuple[Problem, Tensor]:
        """Draw random tensors and a gradient of the output, on the GPU if there is one.

        Returns:
            The checked problem, and the gradient ``[1, num_heads, tokens, head_dim]``.

        Raises:
            NotImplementedError: The pattern differs by head.
            ValueError: Sizes or pattern do not fit together, see
                :func:`cqs.problem.check_problem`.
        """
        device = "cuda" if torch.cuda.is_available() else "cpu"
        generator = torch.Generator(device).manual_seed(self.seed)
        draw = partial(
            torch.randn, generator=generator, dtype=getattr(torch, self.dtype), device=device
        )
        query, key, value, grad_output = (
            draw((1, heads, self.tokens, self.head_dim))
            for heads in (self.num_heads, self.num_kv_heads, self.num_kv_heads, self.num_heads)
        )
        problem = check_problem(
            query, key, value, is_causal=self.is_causal, pattern=self.make_pattern()
        )
        if problem.differs_by_head:
            raise NotImplementedError(
                f"pattern must be the same for all heads in a report, got {self.pattern}"
            )
        return problem, grad_output
