"""What the bits of a reproducible result depend on besides the problem."""

import hashlib
from functools import cache
from importlib.metadata import version
from pathlib import Path

import torch

from cqs.partial import has_triton
from cqs.version import __version__

_FOLDERS = "partial", "patterns", "problem", "scheduler", "tiler", "worker"
"""Folders of this package whose code determines bits."""


@cache
def describe_environment(device_type: str) -> tuple[tuple[str, str], ...]:
    """Return names and values of what must be equal on all processes of a reproducible call.

    Args:
        device_type: Type of the device that computes, ``"cpu"`` or ``"cuda"``.
    """
    device, triton = torch.backends.cpu.get_cpu_capability(), "none"
    if device_type == "cuda":
        device = f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
        triton = version("triton") if has_triton() else triton
    sources, root = hashlib.blake2b(digest_size=8), Path(__file__).parents[1]
    for path in sorted(path for folder in _FOLDERS for path in (root / folder).rglob("*.py")):
        sources.update(path.read_bytes())
    own = f"{__version__}, sources {sources.hexdigest()}"
    return ("device", device), ("cqs", own), ("torch", torch.__version__), ("triton", triton)
