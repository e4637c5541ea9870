"""The resume directory: working files from which an interrupted computation continues."""

import errno
import fcntl
import json
import math
import os
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from cqs.executors.streaming.plan import START, HeldBlock, Position, StreamPlan
from cqs.executors.streaming.sources import InFile, Part, bytes_of
from cqs.executors.verify import VerificationError
from cqs.files import check_input_file
from cqs.partial import lse_dtype

_LOCK, _STATE, _NEW_STATE, _BLOCKS, _LSE = FILES = (
    "cqs-resume.lock", "state", "state.new", "blocks", "lse",
)  # fmt: skip
"""The files of a resume directory. The lock file identifies it as one."""
_FORMAT = 3
"""Version of the format; a change of the files' contents or of the order of blocks raises it."""
_CHOICES = ("heads_at_once", "rows", "chunk")
"""Attributes of a plan that are saved; the others follow from the call."""
_MOST_NAMED = 5
"""Changed results that an error message lists."""
_SECONDS_BETWEEN_SAVES = 1.0
"""Least interval of saves: fsync takes longer than the computation of a small block."""
_READ_BYTES = 2**20
"""Bytes of results that are read at a time to compute a digest."""
_RECORD = np.dtype(
    [(name, "<i8") for name in ("batch", "head", "start", "stop")]
    + [(name, "<u8") for name in ("output", "lse")]
)
"""Record of one head of a finished block: its rows, and the digests of output and LSE."""


class WorkingDirectory:
    """The resume directory of one computation, used by one process at a time.

    As a context manager it creates the directory, or opens that of an earlier run, and locks it. On
    exit it removes the files and the directory, unless an error occurred and some results are
    final; then both stay for the next run. It never changes files that it did not create.
    """

    def __init__(self, path: str | os.PathLike[str]):
        """Store the absolute path of the directory, which is not created yet."""
        self.path = Path(os.path.realpath(path))

    def __enter__(self) -> "WorkingDirectory":
        """Create the directory, or open an empty one or that of an earlier run, and lock it.

        Raises:
            ValueError: The path exists, and is neither an empty directory nor that of a run.
            BlockingIOError: Another process or thread uses the directory.
            OSError: The directory cannot be created.
        """
        lock = self.path / _LOCK
        try:
            self.path.mkdir()
        except FileExistsError:
            # A run that was killed before it created the lock file leaves an empty directory.
            is_empty = self.path.is_dir() and not any(self.path.iterdir())
            if not is_empty and not lock.is_file():
                raise ValueError(
                    "resume must be a new path, an empty directory or that of an earlier run, got "
                    f"'{self.path}', which has other files"
                ) from None
        self._process = os.getpid()
        try:
            self._lock = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
            self._close = weakref.finalize(self, os.close, self._lock)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not self.is_in_place:
                raise FileNotFoundError  # the owner removed it between our open and our lock
        except (BlockingIOError, FileNotFoundError):
            raise BlockingIOError(
                errno.EWOULDBLOCK,
                "resume must be a directory that no other process uses: wait for that process, or "
                "pass another directory",
                str(self.path),
            ) from None
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Remove the files and the directory unless the run can be resumed; release the lock."""
        if not self.is_owned:
            return
        try:
            if self.is_in_place:
                if error is None:
                    self.forget()
                if not (self.path / _STATE).exists():
                    for name in reversed(FILES):
                        (self.path / name).unlink(missing_ok=True)
                    if not any(self.path.iterdir()):
                        self.path.rmdir()
        finally:
            # Closing alone does not unlock: processes forked meanwhile share the open file.
            fcntl.flock(self._lock, fcntl.LOCK_UN)
            self._close()

    @property
    def is_owned(self) -> bool:
        """Whether this process entered the directory, and not a process that forked it."""
        return os.getpid() == self._process

    @property
    def is_in_place(self) -> bool:
        """Whether the path still names the directory that this process has locked."""
        try:
            return os.path.samestat(os.fstat(self._lock), os.stat(self.path / _LOCK))
        except (FileNotFoundError, NotADirectoryError):
            return False

    def forget(self) -> None:
        """Remove the saved state, so that the next run starts from the beginning."""
        (self.path / _STATE).unlink(missing_ok=True)

    def read(self) -> dict[str, Any] | None:
        """Return the state that was saved last, ``None`` if there is none.

        Raises:
            ValueError: The state file is damaged (its digest does not match), or another version
                of cqs wrote it.
        """
        path = self.path / _STATE
        if not path.exists():
            return None
        check_input_file(path)
        digest, _, content = path.read_bytes().partition(b"\n")
        if digest != xxhash.xxh3_128_hexdigest(content).encode():
            raise self.damaged(path)
        found: dict[str, Any] = json.loads(content)
        if (version := found["request"]["format"]) != _FORMAT:
            raise ValueError(
                f"'{self.path}' must have resume format {_FORMAT} of this version of cqs, got "
                f"format {version}: resume it with the version that began it, or remove it to "
                "begin anew"
            )
        return found

    def save(self, state: Mapping[str, Any]) -> None:
        """Replace the saved state atomically: write a new file, fsync it, rename it."""
        content = json.dumps(state).encode()
        (self.path / _NEW_STATE).unlink(missing_ok=True)
        with open(self.path / _NEW_STATE, "xb") as file:
            file.write(xxhash.xxh3_128_hexdigest(content).encode() + b"\n" + content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(self.path / _NEW_STATE, self.path / _STATE)

    @property
    def output(self) -> Path | None:
        """Path of the output file of an interrupted run, ``None`` without a saved state."""
        state = self.read()
        return None if state is None else Path(state["request"]["output"][0])

    def has_made(self, path: Path) -> bool:
        """Return whether ``path`` is the output file of an interrupted run, even if renamed."""
        state = self.read()
        if state is None or not path.is_file():
            return False
        found = path.stat()
        return bool(state.get("file") == [found.st_dev, found.st_ino])

    def damaged(self, path: Path) -> ValueError:
        """Return the error for a working file that is missing or damaged."""
        return ValueError(
            f"'{path}' is missing or damaged: restore it, or remove '{self.path}' to begin anew"
        )


class Checkpoint:
    """The saved progress of a computation, with digests of all final results."""

    def __init__(
        self,
        directory: WorkingDirectory,
        request: Mapping[str, Any],
        output: InFile,
        plans: Sequence[StreamPlan],
    ):
        """Load the progress of an interrupted run, or create the files of a new one.

        Args:
            directory: The entered resume directory.
            request: Options and input files of the computation, of JSON types.
            output: Destination of the output, ``[batch, num_heads, seqlen_q, value_dim]``.
            plans: The plan of each part of the problem, for the current memory budget. Those of an
                interrupted run replace them.

        Raises:
            ValueError: A working file is damaged, or belongs to another computation or to changed
                inputs; final results have changed; or a plan exceeds the memory budget.
            OSError: A file cannot be read or written.
        """
        self._directory, self._output, self._plans = directory, output, list(plans)
        self._request = {"format": _FORMAT, **request}
        self._blocks, self._lse = directory.path / _BLOCKS, directory.path / _LSE
        self._num_records, self._hasher = 0, xxhash.xxh3_128()
        self._unsaved_records, self._next_save = b"", -math.inf
        self._part, self._reached = -1, (0, START)
        if (state := directory.read()) is None:
            self._begin()
        else:
            self._load(state)

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Save the progress; after a failed verification forget all of it."""
        if isinstance(error, VerificationError):
            self._directory.forget()
        else:
            self.save()

    def next_part(self) -> tuple[StreamPlan, Position]:
        """Begin the next part of the problem; return its plan and the position to continue from."""
        self._part += 1
        plan, (last, position) = self._plans[self._part], self._reached
        if self._part == last:
            return plan, position
        return plan, Position(plan.num_groups, 0) if self._part < last else START

    def add(self, plan: StreamPlan, block: HeldBlock, results: Any) -> None:
        """Record a finished block, and save if the last save was a second or more ago.

        Args:
            plan: The current plan of the part that was begun last.
            block: The block, all of whose results are written.
            results: Output and LSE of this part, each a :class:`Part` of the whole.
        """
        output, _ = results
        batch, rows, self._plans[self._part] = block.batch, block.tokens, plan
        records = [
            (output.batches[batch], output.heads[head], rows.start, rows.stop)
            + tuple(_digest(each, batch, head, rows) for each in results)
            for head in block.heads
        ]
        self._unsaved_records += np.array(records, _RECORD).tobytes()
        self._reached = self._part, block.end
        if time.monotonic() >= self._next_save:
            self.save()

    def save(self) -> None:
        """Write the progress since the last save to disk; does nothing in forked processes.

        Progress of a failed save is discarded, because a file system may report lost data only
        once: the next fsync may succeed although the data were not written.
        """
        records, self._unsaved_records = self._unsaved_records, b""
        if not records or not self._directory.is_owned:
            return
        if not self._directory.is_in_place:
            raise OSError(f"'{self._directory.path}' was moved or removed while it was in use")
        # The order matters: results, then their records, then the state that refers to both.
        self._output.flush()
        self.lse.flush()
        with open(self._blocks, "r+b") as file:
            file.seek(self._num_records * _RECORD.itemsize)
            file.write(records)
            file.flush()
            os.fsync(file.fileno())
        self._num_records += len(records) // _RECORD.itemsize
        self._hasher.update(records)
        part, position = self._reached
        self._directory.save(
            {
                "request": self._request,
                "plans": [{name: getattr(plan, name) for name in _CHOICES} for plan in self._plans],
                "part": part,
                "position": position,
                "blocks": [self._num_records, self._hasher.hexdigest()],
                "file": self._output.identity,
            }
        )
        self._next_save = time.monotonic() + _SECONDS_BETWEEN_SAVES

    @cached_property
    def lse(self) -> InFile:
        """The LSE, ``[batch, num_heads, seqlen_q]``, in a working file."""
        _, heads, tokens = shape = self._output.shape[:3]
        dtype = lse_dtype(self._output.dtype)
        strides = heads * tokens * dtype.itemsize, tokens * dtype.itemsize
        return InFile(self._lse, shape, dtype, 0, strides, is_writable=True)

    def _begin(self) -> None:
        """Create the files of blocks and LSEs, without final results."""
        lse_bytes = math.prod(self._output.shape[:3]) * lse_dtype(self._output.dtype).itemsize
        for path, size in ((self._blocks, 0), (self._lse, lse_bytes)):
            path.unlink(missing_ok=True)
            with open(path, "xb") as file:
                file.truncate(size)
        directory = os.open(self._directory.path, os.O_RDONLY)
        try:
            os.fsync(directory)  # the state file must not reach the disk before these
        finally:
            os.close(directory)

    def _load(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of an interrupted run; see the constructor for errors."""
        for name, value in self._request.items():
            if state["request"].get(name) != value:
                raise ValueError(
                    f"resume must be the directory of this computation, got "
                    f"'{self._directory.path}', whose {name} is {state['request'].get(name)} "
                    f"instead of {value}: pass another directory"
                )
        begun = zip(self._plans, state["plans"], strict=True)
        self._plans = [replace(plan, **sizes) for plan, sizes in begun]
        for plan in self._plans[state["part"] :]:
            if plan.peak_bytes > plan.budget:
                raise ValueError(
                    f"memory_budget must be at least {plan.peak_bytes} bytes to resume "
                    f"'{self._directory.path}', got {plan.budget}"
                )
        self._check_results(*state["blocks"])
        self._reached = state["part"], Position(*state["position"])

    def _check_results(self, num_records: int, digest: str) -> None:
        """Raise ValueError if a final result no longer matches its digest."""
        path = self._blocks
        content = path.read_bytes()[: num_records * _RECORD.itemsize] if path.is_file() else b""
        self._num_records = num_records
        self._hasher.update(content)
        if self._hasher.hexdigest() != digest:
            raise self._directory.damaged(path)
        try:
            self.lse  # noqa: B018
        except (OSError, ValueError):
            raise self._directory.damaged(self._lse) from None
        differing = []
        for batch, head, start, stop, *digests in np.frombuffer(content, _RECORD).tolist():
            rows = f"rows {start} to {stop - 1} of head {head} of batch element {batch}"
            for results, expected in zip((self._output, self.lse), digests, strict=True):
                if _digest(results, batch, head, range(start, stop)) != expected:
                    differing.append(f"{rows} in '{results.path}'")
        if differing:
            raise ValueError(
                f"final results of '{self._directory.path}' have changed: "
                f"{'; '.join(differing[:_MOST_NAMED])}"
                f"{'; ...' if len(differing) > _MOST_NAMED else ''}. Restore them, or remove "
                f"'{self._directory.path}' to begin anew"
            )


def _digest(results: InFile | Part, batch: int, head: int, rows: range) -> int:
    """Return the XXH3 digest of rows of one head in their file, read 1 MiB at a time."""
    row_bytes = math.prod(results.shape[3:]) * results.dtype.itemsize
    length, hasher = max(_READ_BYTES // row_bytes, 1), xxhash.xxh3_64()
    for first in range(0, len(rows), length):
        part = rows[first : first + length]
        found = torch.empty((len(part), *results.shape[3:]), dtype=results.dtype, device="cpu")
        results.read(batch, head, part, found)
        hasher.update(bytes_of(found))
    return hasher.intdigest()
