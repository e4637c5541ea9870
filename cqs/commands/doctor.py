"""Say what this machine has, which backends can run here, and why not the others."""

import argparse
import os
import platform

import torch

import cqs
from cqs.report.measurement import PACKAGES, installed_versions
from cqs.worker import BACKENDS, choose_backend
from cqs.worker.features import feature_table

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``cqs doctor``."""
    parser.add_argument("--all", action="store_true", help="also list the features of each backend")


def run(options: argparse.Namespace) -> None:
    """Print the findings."""
    found = installed_versions()
    print(f"cqs {cqs.__version__}, Python {found['python']}, {platform.platform()}")
    print(", ".join(f"{name} {found.get(name, 'not installed')}" for name in PACKAGES))
    print(f"CPU: {os.cpu_count()} cores, {torch.get_num_threads()} PyTorch threads")
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        print(
            f"GPU {index}: {properties.name}, {properties.total_memory / 2**30:.0f} GiB, "
            f"compute capability {properties.major}.{properties.minor}"
            + ("" if properties.major == 9 else ": runs, not tuned")
        )
    if not torch.cuda.is_available():
        print("GPU: none that PyTorch can use")
    for device in ("cpu", *(["cuda"] if torch.cuda.is_available() else [])):
        print(f"\nbackends for tensors on {device}, head_dim 64, by preference:")
        for name in BACKENDS:
            print(f"  {name}:")
            for dtype in _DTYPES:
                print(f"    {str(dtype).removeprefix('torch.')}: {_diagnose(name, dtype, device)}")
    if options.all:
        print("\nfeatures by backend, on every executor; shards and submit have no gradients:")
        rows = [[cell.replace("`", "") for cell in row] for row in feature_table()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            print("  " + "  ".join(cells).rstrip())


def _diagnose(backend: str, dtype: torch.dtype, device: str) -> str:
    """Say whether a backend is the default, can run, or why it cannot."""
    tensor = torch.zeros(1, 1, 2, 64, dtype=dtype, device=device)
    if reason := BACKENDS[backend].why_not(tensor, tensor, tensor):
        return f"no, it {reason}"
    is_default = choose_backend(tensor, tensor, tensor).name == backend
    return "yes, the default" if is_default else "yes"
