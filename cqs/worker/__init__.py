"""One task on one device: torch, no ray."""

from cqs.worker.backends import WHY_NOT, check_backend_name, choose_backend
from cqs.worker.held_tokens import HeldTokens, JoinedTokens
from cqs.worker.worker import Worker

__all__ = [
    "WHY_NOT",
    "HeldTokens",
    "JoinedTokens",
    "Worker",
    "check_backend_name",
    "choose_backend",
]
