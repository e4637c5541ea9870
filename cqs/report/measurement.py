"""Rows of measurements: one JSON object per line, with all that is needed to read it later."""

import errno
import fcntl
import json
import os
import platform
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

import cqs
from cqs.files import check_input_file, read_lines
from cqs.report.table import Table, tabulate

PACKAGES = ("torch", "triton", "flash-attn-4", "numba", "numpy", "ray", "matplotlib", "safetensors")
"""Packages that affect results, or that commands require."""
_RENAMED = {"num_workers": "num_tasks"}
"""Names of fields in rows of earlier commits, and their names today."""

_MOST_LOAD = 1.25
"""Load per core above which times are unreliable. A benchmark may use all cores itself, which is a
load of 1; with a quarter more, processes waited for each other."""

Item = TypeVar("Item")
RowKind = TypeVar("RowKind", bound="Measurement")


@dataclass(frozen=True)
class Measurement:
    """A timed configuration and its ratio to a baseline of the same run."""

    benchmark: str
    case: str
    baseline: str
    num_tasks: int
    executor: str
    dtype: str
    median_ms: float
    p20_ms: float
    p80_ms: float
    ratio: float
    """Median over the repeats of (this time / the baseline's time in the same repeat)."""
    repeats: int
    details: dict[str, float] = field(default_factory=dict)
    load_average: float | None = None
    """Mean number of runnable processes in the last minute, when the row was made."""
    num_cores: int | None = None
    device: str = field(default_factory=lambda: describe_device())
    torch_version: str = torch.__version__
    cqs_version: str = cqs.__version__
    commit: str = field(default_factory=lambda: _commit())
    utc: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    @property
    def warning(self) -> str:
        """``"unreliable: load 9.9 on 2 cores"``, or nothing if the machine was not overloaded."""
        if (self.load_average or 0) <= _MOST_LOAD * (self.num_cores or 1):
            return ""
        return f"unreliable: load {self.load_average:.1f} on {self.num_cores} cores"


def summarize(seconds: list[float]) -> dict[str, float]:
    """Return median, 20th and 80th percentile in milliseconds, and the load of the machine."""
    low, median, high = (1e3 * np.quantile(seconds, (0.2, 0.5, 0.8))).tolist()
    load = {"load_average": os.getloadavg()[0], "num_cores": os.cpu_count() or 1}
    return {"median_ms": median, "p20_ms": low, "p80_ms": high, **load}


def format_rows(
    rows: Sequence[RowKind], columns: Mapping[str, Callable[[RowKind], object]]
) -> Table:
    """Return a table of rows; a last column names those that an overloaded machine measured.

    Args:
        rows: The rows.
        columns: Header of a column, and what it shows of a row.
    """
    if any(row.warning for row in rows):
        columns = {**columns, "": lambda row: row.warning}
    return tabulate(rows, columns)


def append_rows(rows: Sequence[Measurement], out: str | None) -> None:
    """Append rows to a file of one JSON object per line, unless ``out`` is None.

    Raises:
        ValueError: The file has other content.
        OSError: The file cannot be written.
    """
    if out is not None:
        if Path(out).exists():
            check_input_file(out)  # to open a pipe may wait forever
        Path(out).parent.mkdir(parents=True, exist_ok=True)
        content = b"".join(json.dumps(asdict(row)).encode() + b"\n" for row in rows)
        with open(out, "a+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # another process may be writing a row
            check_rows(out)
            end = file.seek(0, os.SEEK_END)
            file.seek(max(end - 1, 0))
            if file.read(1) not in (b"", b"\n"):  # an editor has removed the end of the line
                content = b"\n" + content
            if file.write(content) < len(content):
                file.truncate(end)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), out)


def check_rows(path: str) -> None:
    """Raise ValueError unless a file is new, or has a JSON object on each line."""
    if Path(path).exists():
        read_rows(path, lambda row: [])


def read_rows(path: str | Path, parse: Callable[[Any], Iterable[Item]]) -> list[Item]:
    """Return the items that ``parse`` makes of the rows of a file, in one list.

    Args:
        path: The file.
        parse: Takes the JSON object of a row, with today's names of fields. It raises LookupError,
            TypeError or ValueError if the object is not such a row.

    Raises:
        ValueError: The file is not a regular file of at most 64 MiB, or a line is not such a row.
    """
    items: list[Item] = []
    for number, line in enumerate(read_lines(path), 1):
        try:
            items += parse(_rename(json.loads(line)))
        except (LookupError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"'{path}', line {number}: {error!r}") from error
    return items


def _rename(row: Any) -> Any:
    if not isinstance(row, dict):
        raise TypeError(f"a row must be an object, got {row!r:.40}")
    return {_RENAMED.get(name, name): value for name, value in row.items()}


def installed_versions() -> dict[str, str]:
    """Return the versions of Python and of those of :data:`PACKAGES` that are installed."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


def describe_device() -> str:
    """Name the GPU, or the processor and the number of cores that PyTorch uses."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    model = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        model = names[0] if names else model
    return f"{model}, {torch.get_num_threads()} threads"


def _commit() -> str:
    """Return the commit of this package's repository, or an empty string without one."""
    command = ["git", "describe", "--always", "--dirty"]
    try:
        output = subprocess.check_output(
            command, cwd=Path(__file__).parent, stderr=subprocess.DEVNULL, text=True
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return output.strip()
