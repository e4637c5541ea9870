"""What a computation needs to be resumed: working files in a directory of its own."""

import errno
import fcntl
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash

from cqs.input_files import check_input_file
from cqs.partial import lse_dtype
from cqs.streaming.plan import START, Position, StreamPlan
from cqs.streaming.sources import InFile, OpenFile, bytes_of

_LOCK, _STATE, _NEW_STATE, _BLOCKS, _LSE = FILES = (
    "cqs-resume.lock", "state", "state.new", "blocks", "lse",
)  # fmt: skip
"""The files of a working directory. The lock tells it from directories of others."""
_CHOICES = ("heads_at_once", "rows", "chunk")
_MOST_NAMED = 5
_SECONDS_BETWEEN_SAVES = 1.0
"""A save waits for the disk, which takes longer than to compute a small block."""
_PIECE_BYTES = 2**20
"""Bytes of results that are read at a time to compute their digest."""
_RECORD = np.dtype(
    [(name, "<i8") for name in ("batch", "head", "start", "stop")]
    + [(name, "<u8") for name in ("output", "lse")]
)
"""One head of a finished block: its rows, and the digests of both results."""


class WorkingDirectory:
    """A directory that holds the working files of one computation, for one process at a time.

    As a context manager it makes the directory, or accepts one that an earlier run has made and
    left, and locks it. At the end it removes the files and the directory, except after an error
    when some results are final: then both stay for the next run. It never changes files of others.
    """

    def __init__(self, path: str | os.PathLike[str]):
        """Take the path of the directory; nothing is made yet."""
        self.path = Path(os.path.realpath(path))

    def __enter__(self) -> "WorkingDirectory":
        """Make the directory, or go on with an empty one or that of an earlier run; lock it.

        Raises:
            ValueError: The path exists, is no empty directory, and no earlier run has made it.
            BlockingIOError: Another process or thread uses the directory.
            OSError: The directory cannot be made.
        """
        lock = self.path / _LOCK
        try:
            self.path.mkdir()
        except FileExistsError:
            # A run that is killed leaves an empty directory before it has made the lock.
            is_empty = self.path.is_dir() and not any(self.path.iterdir())
            if not is_empty and not lock.is_file():
                raise ValueError(
                    "resume must be a new path, an empty directory or that of an earlier run, got "
                    f"'{self.path}', which something else has made"
                ) from None
        self._process = os.getpid()
        try:
            self._lock = OpenFile(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
            fcntl.flock(self._lock.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not self._is_in_place():
                raise FileNotFoundError  # its owner has just removed it, and another made a new one
        except (BlockingIOError, FileNotFoundError):
            raise BlockingIOError(
                errno.EWOULDBLOCK,
                "resume must be a directory that nothing else uses: wait for the other process, or "
                "take another directory",
                str(self.path),
            ) from None
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Remove the files and the directory unless they serve the next run; release the lock."""
        if not self.is_owned:
            return
        try:
            if self._is_in_place():
                if error is None:
                    self.forget()
                if not (self.path / _STATE).exists():
                    for name in reversed(FILES):
                        (self.path / name).unlink(missing_ok=True)
                    if not any(self.path.iterdir()):
                        self.path.rmdir()
        finally:
            # Closing alone would leave the lock to processes that were forked meanwhile.
            fcntl.flock(self._lock.descriptor, fcntl.LOCK_UN)
            self._lock.close()

    @property
    def is_owned(self) -> bool:
        """Whether this process has entered the directory, not one that it was forked from."""
        return os.getpid() == self._process

    def check_in_place(self) -> None:
        """Raise OSError if the path no longer leads to the directory that was locked."""
        if not self._is_in_place():
            raise OSError(f"'{self.path}' was moved or removed while it was in use")

    def _is_in_place(self) -> bool:
        """Return whether the path still leads to the directory that this process has locked."""
        try:
            return os.path.samestat(os.fstat(self._lock.descriptor), os.stat(self.path / _LOCK))
        except (FileNotFoundError, NotADirectoryError):
            return False

    def forget(self) -> None:
        """Have the next run begin anew."""
        (self.path / _STATE).unlink(missing_ok=True)

    def read(self) -> dict[str, Any] | None:
        """Return what was saved last; ``None`` if nothing was.

        Raises:
            ValueError: The file is damaged.
        """
        path = self.path / _STATE
        if not path.exists():
            return None
        check_input_file(path)
        digest, _, content = path.read_bytes().partition(b"\n")
        if digest != xxhash.xxh3_128_hexdigest(content).encode():
            raise self.damaged(path)
        found: dict[str, Any] = json.loads(content)
        return found

    def save(self, state: Mapping[str, Any]) -> None:
        """Replace what was saved last, at once and for the disk."""
        content = json.dumps(state).encode()
        (self.path / _NEW_STATE).unlink(missing_ok=True)
        with open(self.path / _NEW_STATE, "xb") as file:
            file.write(xxhash.xxh3_128_hexdigest(content).encode() + b"\n" + content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(self.path / _NEW_STATE, self.path / _STATE)

    @property
    def output(self) -> Path | None:
        """The file that an earlier run has begun to fill; ``None`` if the next begins anew."""
        state = self.read()
        return None if state is None else Path(state["request"]["output"][0])

    def has_made(self, path: Path) -> bool:
        """Return whether a file is the output of the earlier run, under whatever name."""
        state = self.read()
        if state is None or not path.is_file():
            return False
        found = path.stat()
        return bool(state.get("file") == [found.st_dev, found.st_ino])

    def damaged(self, path: Path) -> ValueError:
        """Return the error for a file that is missing or not as it was."""
        return ValueError(
            f"'{path}' is missing or damaged: restore it, or remove '{self.path}' to begin anew"
        )


class _Unsaved(NamedTuple):
    """What became final since the last save."""

    records: bytes
    """Of the blocks, to be appended."""
    state: Mapping[str, Any]
    """How far the computation has come, without the blocks."""


class Checkpoint:
    """How far a computation has come, and digests of all results that are final."""

    def __init__(self, directory: WorkingDirectory, request: Mapping[str, Any], output: InFile):
        """Take what is computed.

        Args:
            directory: Holds the working files; entered.
            request: What is computed, from which files; of types that JSON has.
            output: ``[batch, num_heads, seqlen_q, value_dim]``.
        """
        self._directory, self._request, self._output = directory, request, output
        self._blocks, self._lse = directory.path / _BLOCKS, directory.path / _LSE
        batch, heads, tokens, _ = output.shape
        self._lse_shape, self._lse_dtype = (batch, heads, tokens, 1), lse_dtype(output.dtype)
        self._num_records, self._hasher = 0, xxhash.xxh3_128()
        self._unsaved: _Unsaved | None = None
        self._next_save = -math.inf

    def load(self, plans: Sequence[StreamPlan]) -> tuple[list[StreamPlan], int, Position]:
        """Return the plans to follow, and the part and position to go on at.

        Args:
            plans: One for each part of the problem. A run that is resumed follows its own.

        Raises:
            ValueError: A working file is damaged, or belongs to another computation or to inputs
                that have changed; final results differ; or a plan takes more than the budget.
            OSError: A file cannot be read or written.
        """
        state = self._directory.read()
        if state is None:
            self._begin()
            return list(plans), 0, START
        for name, value in self._request.items():
            if state["request"].get(name) != value:
                raise ValueError(
                    f"'{self._directory.path}' is of another computation: it has {name} "
                    f"{state['request'].get(name)}, this one {value}"
                )
        begun = [replace(plan, **each) for plan, each in zip(plans, state["plans"], strict=True)]
        for plan in begun[state["part"] :]:
            if plan.peak_bytes > plan.budget:
                raise ValueError(
                    f"'{self._directory.path}' was begun with a larger memory budget: to go on "
                    f"takes {plan.peak_bytes} bytes, got {plan.budget}"
                )
        self._check_results(*state["blocks"])
        return begun, state["part"], Position(*state["position"])

    def add(
        self,
        plans: Sequence[StreamPlan],
        part: int,
        position: Position,
        block: tuple[int, range, range],
    ) -> None:
        """Note that everything up to a position in a part is final; save it once a second.

        Args:
            plans: As they are followed.
            part: Number.
            position: In it.
            block: Batch element, query heads and rows that became final last.
        """
        batch, heads, rows = block
        records = np.array(
            [
                (
                    batch,
                    head,
                    rows.start,
                    rows.stop,
                    *(_digest(results, batch, head, rows) for results in (self._output, self.lse)),
                )
                for head in heads
            ],
            _RECORD,
        )
        state = {
            "request": self._request,
            "plans": [{name: getattr(plan, name) for name in _CHOICES} for plan in plans],
            "part": part,
            "position": position,
        }
        before = b"" if self._unsaved is None else self._unsaved.records
        self._unsaved = _Unsaved(before + records.tobytes(), state)
        if time.monotonic() >= self._next_save:
            self.save()

    def save(self) -> None:
        """Save for the disk what was added since the last save, in the process that began it.

        What a save that fails or is interrupted has left is not saved later: a file system may
        report once that it has lost data, and call them written the next time.
        """
        unsaved, self._unsaved = self._unsaved, None
        if unsaved is None or not self._directory.is_owned:
            return
        self._directory.check_in_place()
        self._output.flush()
        self.lse.flush()
        with open(self._blocks, "r+b") as file:
            file.seek(self._num_records * _RECORD.itemsize)
            file.write(unsaved.records)
            file.flush()
            os.fsync(file.fileno())
        self._num_records += len(unsaved.records) // _RECORD.itemsize
        self._hasher.update(unsaved.records)
        blocks = [self._num_records, self._hasher.hexdigest()]
        self._directory.save({**unsaved.state, "blocks": blocks, "file": self._output.identity})
        self._next_save = time.monotonic() + _SECONDS_BETWEEN_SAVES

    @cached_property
    def lse(self) -> InFile:
        """``[batch, num_heads, seqlen_q, 1]``, in a working file."""
        _, heads, tokens, _ = self._lse_shape
        of_head = tokens * self._lse_dtype.itemsize
        strides = heads * of_head, of_head
        return InFile(self._lse, self._lse_shape, self._lse_dtype, 0, strides, is_writable=True)

    def _begin(self) -> None:
        """Make the files that grow, in which nothing is final."""
        for path, size in ((self._blocks, 0), (self._lse, self._lse_bytes)):
            path.unlink(missing_ok=True)
            with open(path, "xb") as file:
                file.truncate(size)
        directory = OpenFile(self._directory.path, os.O_RDONLY)
        os.fsync(directory.descriptor)  # a state that is saved later refers to these files
        directory.close()

    def _check_results(self, num_records: int, digest: str) -> None:
        """Raise ValueError unless the results that are final are as they were written."""
        size = num_records * _RECORD.itemsize
        for path, least in ((self._blocks, size), (self._lse, self._lse_bytes)):
            if not path.is_file() or path.stat().st_size < least:
                raise self._directory.damaged(path)
        content = self._blocks.read_bytes()[:size]
        self._num_records = num_records
        self._hasher.update(content)
        if self._hasher.hexdigest() != digest:
            raise self._directory.damaged(self._blocks)
        differing = []
        for record in np.frombuffer(content, _RECORD):
            batch, head, *ends = (int(record[name]) for name in ("batch", "head", "start", "stop"))
            for name, results in (("output", self._output), ("lse", self.lse)):
                if _digest(results, batch, head, range(*ends)) != record[name]:
                    differing.append(
                        f"rows {ends[0]} to {ends[1] - 1} of head {head} of batch element {batch} "
                        f"in '{results.path}'"
                    )
        if differing:
            raise ValueError(
                f"results that '{self._directory.path}' calls final have changed: "
                f"{'; '.join(differing[:_MOST_NAMED])}"
                f"{'; ...' if len(differing) > _MOST_NAMED else ''}. Restore them, or remove "
                f"'{self._directory.path}' to begin anew"
            )

    @property
    def _lse_bytes(self) -> int:
        return math.prod(self._lse_shape) * self._lse_dtype.itemsize


def _digest(results: InFile, batch: int, head: int, rows: range) -> int:
    """Return the digest of some rows as they are in their file, a piece at a time."""
    columns = results.shape[3]
    length = max(_PIECE_BYTES // max(columns * results.dtype.itemsize, 1), 1)
    pieces = [rows[first : first + length] for first in range(0, len(rows), length)]
    space = torch.empty((len(pieces[0]), columns), dtype=results.dtype, device="cpu")
    hasher = xxhash.xxh3_64()
    for piece in pieces:
        into = space[: len(piece)]
        results.read(batch, head, piece, into)
        hasher.update(bytes_of(into))
    return hasher.intdigest()
