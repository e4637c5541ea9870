"""Say whether this machine is ready, and what to do next."""

import argparse
import os
import platform
import shutil
from collections import Counter
from collections.abc import Iterator

import torch

import cqs
from cqs.report.measurement import PACKAGES, installed_versions
from cqs.report.table import Table, show
from cqs.worker import BACKENDS, choose_backend
from cqs.worker.features import feature_table

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``cqs doctor``."""
    parser.add_argument(
        "--all",
        action="store_true",
        help="also say which backend supports which dtypes and features, and why not",
    )


def run(options: argparse.Namespace) -> None:
    """Print a verdict, the next step and the findings, and with ``--all`` two tables."""
    versions = installed_versions()
    print("\n".join(_judge()))
    print(f"\ncqs {cqs.__version__}, Python {versions['python']}, {platform.platform()}")
    print(", ".join(f"{name} {versions.get(name, 'not installed')}" for name in PACKAGES))
    print(f"CPU: {os.cpu_count()} cores, {torch.get_num_threads()} PyTorch threads")
    gpus = Counter(map(_describe_gpu, range(torch.cuda.device_count())))
    for gpu, number in gpus.items():
        print(f"GPU: {number} x {gpu}")
    if not torch.cuda.is_available():
        print("GPU: none that PyTorch can use")
    rows = [row for device in _devices() for row in _support(device)]
    for device in _devices():
        names = dict.fromkeys(row[1] for row in rows if row[0] == device and row[3][:3] == "yes")
        print(f"Backends for tensors on {device}: {', '.join(names)}")
    if not options.all:
        print("All dtypes, features and reasons: cqs doctor --all")
        return
    print("\nhead_dim 64, by preference:")
    show(Table(["device", "backend", "dtypes", "supported"], rows))
    print("\nfeatures by backend, on every executor; shards and submit have no gradients:")
    header, *features = ([cell.replace("`", "") for cell in row] for row in feature_table())
    show(Table(header, features))


def _judge() -> list[str]:
    """Return the verdict and the next step."""
    if torch.cuda.is_available():
        backend = _default(torch.bfloat16, "cuda")
        if backend != "reference":
            return [f"Ready: attention runs on the GPU, with {backend}.", "Next: cqs demo"]
        reason = BACKENDS["triton"].why_not(*_tensors(torch.bfloat16, "cuda"))
        verdict = f"Not ready: no fast backend supports the GPU; triton {reason}."
        return [verdict, "Next: pip install triton, or use a GPU of another kind"]
    if not shutil.which("nvidia-smi"):
        return ["Ready: attention runs on the CPU; there is no GPU.", "Next: cqs demo"]
    if torch.version.cuda is None:
        step = "install PyTorch with CUDA: https://pytorch.org/get-started/locally/"
    else:
        step = "python -c 'import torch; torch.cuda.init()', which prints the reason"
    return ["Not ready: this machine has a GPU, and PyTorch cannot use it.", f"Next: {step}"]


def _devices() -> list[str]:
    return ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]


def _describe_gpu(index: int) -> str:
    properties = torch.cuda.get_device_properties(index)
    return (
        f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, "
        f"compute capability {properties.major}.{properties.minor}"
        + ("" if properties.major == 9 else ": runs, not tuned")
    )


def _support(device: str) -> Iterator[tuple[str, str, str, str]]:
    """Yield device, backend, dtypes, and whether the backend is the default or why it cannot run.

    Dtypes with equal answers share a row.
    """
    for name, backend in BACKENDS.items():
        dtypes: dict[str, list[str]] = {}
        for dtype in _DTYPES:
            if reason := backend.why_not(*_tensors(dtype, device)):
                answer = f"no, it {reason}"
            else:
                answer = "yes, the default" if _default(dtype, device) == name else "yes"
            dtypes.setdefault(answer, []).append(str(dtype).removeprefix("torch."))
        yield from ((device, name, ", ".join(names), answer) for answer, names in dtypes.items())


def _default(dtype: torch.dtype, device: str) -> str:
    return choose_backend(*_tensors(dtype, device)).name


def _tensors(dtype: torch.dtype, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tensor = torch.zeros(1, 1, 2, 64, dtype=dtype, device=device)
    return tensor, tensor, tensor
