"""What one attention call computes: its tensors and options, validated once."""

from cqs.problem.check import (
    ProblemOptions,
    check_is_pattern,
    check_pattern,
    check_problem,
    draw_seed,
)
from cqs.problem.dropout import Dropout, DropoutBits
from cqs.problem.problem import GPU_TILE, Problem

__all__ = [
    "GPU_TILE",
    "Dropout",
    "DropoutBits",
    "Problem",
    "ProblemOptions",
    "check_is_pattern",
    "check_pattern",
    "check_problem",
    "draw_seed",
]
