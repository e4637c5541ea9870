"""What the bits of a reproducible result depend on besides the problem."""

import hashlib
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from cqs.version import __version__

_LIBRARIES = "torch", "numpy", "numba", "triton"
_FOLDERS = "partial", "patterns", "problem", "scheduler", "tiler", "worker"
"""Folders of this package whose code determines bits."""


@cache
def describe_environment(device_type: str) -> tuple[tuple[str, str], ...]:
    """Return names and values of what must be equal on all processes of a reproducible call.

    Args:
        device_type: Type of the device that computes, ``"cpu"`` or ``"cuda"``.
    """
    if device_type == "cuda":
        device = f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
    else:
        models = [line for line in _read_cpu_info() if line.startswith("model name")]
        capability = torch.backends.cpu.get_cpu_capability()
        device = f"{''.join(models[:1]).partition(':')[2].strip() or 'CPU'}, {capability}"
    own = f"{__version__}, sources {_digest_sources()}"
    return ("device", device), ("cqs", own), *((name, _version_of(name)) for name in _LIBRARIES)


def _version_of(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return "none"


def _read_cpu_info() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def _digest_sources() -> str:
    """Return a digest of the code that determines bits."""
    digest, root = hashlib.blake2b(digest_size=8), Path(__file__).parents[1]
    for path in sorted(path for folder in _FOLDERS for path in (root / folder).rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
