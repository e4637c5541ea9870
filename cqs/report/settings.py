"""What is measured, whatever the number of workers."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from cqs.commands.pattern_text import parse_pattern
from cqs.patterns import Pattern
from cqs.problem import Problem, check_problem


@dataclass(frozen=True)
class Settings:
    """One problem, and how it is measured."""

    executor: str
    """``"local"``, ``"ray"`` or ``"distributed"``."""
    tokens: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    """Name of a dtype of PyTorch."""
    is_causal: bool = False
    pattern: str | None = None
    """The expression that makes it; see :func:`cqs.commands.pattern_text.parse_pattern`."""
    repeats: int = 5
    seed: int = 0

    def make_pattern(self) -> Pattern | None:
        """Make the pattern, if there is one.

        Raises:
            ValueError: if the expression makes none.
        """
        return None if self.pattern is None else parse_pattern(self.pattern)

    def make_problem(self) -> tuple[Problem, Tensor]:
        """Draw the tensors and the gradient of the output, on a GPU where there is one.

        Raises:
            NotImplementedError: if heads differ in their patterns: their plans would differ too.
            ValueError: as :func:`cqs.problem.check_problem`.
        """
        device = "cuda" if torch.cuda.is_available() else "cpu"
        generator = torch.Generator(device).manual_seed(self.seed)
        query, key, value, grad_output = (
            torch.randn(
                (1, heads, self.tokens, self.head_dim),
                generator=generator,
                dtype=getattr(torch, self.dtype),
                device=device,
            )
            for heads in (self.num_heads, self.num_kv_heads, self.num_kv_heads, self.num_heads)
        )
        problem = check_problem(
            query, key, value, is_causal=self.is_causal, pattern=self.make_pattern()
        )
        if problem.differs_by_head:
            raise NotImplementedError(
                f"a report takes one pattern for all heads, got {self.pattern}"
            )
        return problem, grad_output

    @property
    def options(self) -> list[str]:
        """The options of ``cqs report`` but for ``--seqlen``, as a shell would split them."""
        found = [
            "--executor", self.executor,
            "--heads", str(self.num_heads),
            "--kv-heads", str(self.num_kv_heads),
            "--head-dim", str(self.head_dim),
            "--dtype", self.dtype,
            "--repeats", str(self.repeats),
            "--seed", str(self.seed),
        ]  # fmt: skip
        if self.is_causal:
            found.append("--causal")
        return found if self.pattern is None else [*found, "--pattern", self.pattern]

    def differences(self, other: "Settings") -> list[str]:
        """Say in what two settings differ: ``tokens 8192, not 4096``."""
        pairs = ((f.name, getattr(self, f.name), getattr(other, f.name)) for f in fields(self))
        return [f"{name} {ours}, not {theirs}" for name, ours, theirs in pairs if ours != theirs]
