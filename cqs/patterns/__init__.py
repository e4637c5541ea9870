"""What may attend to what: patterns of any length in a few integers, with exact counts."""

from cqs.patterns.bound import BoundPattern
from cqs.patterns.pattern import Pattern
from cqs.patterns.piece import FAR, Axis, Piece
from cqs.patterns.regular import (
    block_diagonal,
    causal,
    dilated,
    fixed,
    sliding_window,
    strided,
)
from cqs.patterns.runs import KeyRun

__all__ = [
    "FAR",
    "Axis",
    "BoundPattern",
    "KeyRun",
    "Pattern",
    "Piece",
    "block_diagonal",
    "causal",
    "dilated",
    "fixed",
    "sliding_window",
    "strided",
]
