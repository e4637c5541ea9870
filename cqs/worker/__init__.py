"""Computation of tasks on one device, with torch and without Ray."""

from cqs.worker.backends import ATTEND_BLOCK_ROWS, WHY_NOT, choose_backend
from cqs.worker.held_tokens import HeldTokens
from cqs.worker.worker import Worker

__all__ = [
    "ATTEND_BLOCK_ROWS",
    "WHY_NOT",
    "HeldTokens",
    "Worker",
    "choose_backend",
]
