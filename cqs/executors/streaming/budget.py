"""Parsing of the ``memory_budget`` argument."""

import re
from fractions import Fraction
from typing import Any

import torch

from cqs.arguments import as_integer
from cqs.worker.memory import free_bytes


def parse_budget(budget: Any, device: torch.device) -> int:
    """Return a memory budget in bytes.

    Args:
        budget: An integer number of bytes, a string such as ``"8GiB"`` or ``"500 MB"``, or
            ``"auto"``: 90 % of the free memory of a GPU, 50 % of the free memory of the host.
        device: The device whose memory ``"auto"`` measures.

    Raises:
        TypeError: ``budget`` is neither an integer nor a string.
        ValueError: ``budget`` is not positive, or a string that is not a number of bytes.

    Example:
        >>> parse_budget("1.5GiB", torch.device("cpu"))
        1610612736
    """
    if not isinstance(budget, str):
        return as_integer("memory_budget", budget, 1)
    if budget == "auto":
        return free_bytes(device)
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?)b)?\s*", budget.lower())
    if match is None:
        raise ValueError(f"memory_budget must be like '8GiB', '500MB' or 'auto', got {budget!r}")
    exponent = "kmgt".index(match[2]) + 1 if match[2] else 0
    unit = (1024 if match[3] else 1000) ** exponent
    return as_integer("memory_budget", int(Fraction(match[1]) * unit), 1)
