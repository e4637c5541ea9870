"""Parsing of the ``memory_budget`` argument."""

import os
import re
from fractions import Fraction
from typing import Any

import torch

from cqs.arguments import as_integer

# Fractions of the free memory that "auto" takes.
_SHARE_OF_GPU, _SHARE_OF_HOST = 0.9, 0.5


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
        return _free_bytes(device)
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?)b)?\s*", budget.lower())
    if match is None:
        raise ValueError(f"memory_budget must be like '8GiB', '500MB' or 'auto', got {budget!r}")
    exponent = "kmgt".index(match[2]) + 1 if match[2] else 0
    unit = (1024 if match[3] else 1000) ** exponent
    return as_integer("memory_budget", int(Fraction(match[1]) * unit), 1)


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # Blocks that PyTorch's allocator caches are free for PyTorch, not for the driver.
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int((free + cached) * _SHARE_OF_GPU)
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(available * _SHARE_OF_HOST)
