"""The resume directory: working files from which an interrupted computation continues."""

import errno
import fcntl
import json
import math
import os
import stat
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cqs.executors.streaming.plan import START, HeldBlock, Position, StreamPlan
from cqs.executors.streaming.sources import InFile, bytes_of
from cqs.executors.verify import VerificationError
from cqs.partial import lse_dtype

_JOURNAL, _LSE = FILES = "cqs-resume", "lse"
"""The files of a resume directory. The journal identifies it as one, and is locked."""
_FORMAT = 5
"""Version of the format; a change of the files' contents or of the order of blocks raises it."""
_SECONDS_BETWEEN_SAVES = 1.0
"""Least interval of saves: fsync takes longer than the computation of a small block."""
_READ_BYTES = 2**20
"""Bytes of results that are read at a time to compute a digest."""


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
        self._process = os.getpid()
        with suppress(FileExistsError):
            self.path.mkdir(0o700)
        try:
            is_ours = os.stat(self.path).st_uid == os.geteuid()
            # A run that was killed before it created the journal leaves an empty directory.
            if not is_ours or (os.listdir(self.path) and self.identify(_JOURNAL) is None):
                raise NotADirectoryError
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
            self._journal = os.open(self.path / _JOURNAL, flags, 0o600)
            self._close = weakref.finalize(self, os.close, self._journal)
            fcntl.flock(self._journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not self.is_in_place:
                raise FileNotFoundError  # the owner removed it between our open and our lock
        except NotADirectoryError:
            raise ValueError(
                "directory must be a new path, or an empty directory or that of an earlier run and "
                f"of this user, got '{self.path}', which has other files or another owner"
            ) from None
        except (BlockingIOError, FileNotFoundError):
            raise BlockingIOError(
                errno.EWOULDBLOCK,
                "directory must be one that no other process uses: wait for it, or pass another",
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
                if not os.fstat(self._journal).st_size:
                    for name in reversed(FILES):
                        (self.path / name).unlink(missing_ok=True)
                    if not os.listdir(self.path):
                        self.path.rmdir()
        finally:
            # Closing alone does not unlock: processes forked meanwhile share the open file.
            fcntl.flock(self._journal, fcntl.LOCK_UN)
            self._close()

    def identify(self, name: str) -> tuple[int, int] | None:
        """Return device and inode of a file of the directory.

        ``None`` means that it is missing, a link or a directory, or not of this user alone: another
        user who may write to the directory can place links to the files of this user.
        """
        with suppress(FileNotFoundError, NotADirectoryError):
            inode = os.stat(self.path / name, follow_symlinks=False)
            if stat.S_ISREG(inode.st_mode) and inode.st_uid == os.geteuid() and inode.st_nlink == 1:
                return inode.st_dev, inode.st_ino
        return None

    def create(self, name: str, size: int) -> None:
        """Replace a file of the directory by one of zeros, and let its name reach the disk."""
        (self.path / name).unlink(missing_ok=True)
        with open(self.path / name, "xb", opener=partial(os.open, mode=0o600)) as file:
            file.truncate(size)
        folder = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    @property
    def is_owned(self) -> bool:
        """Whether this process entered the directory, and not a process that forked it."""
        return os.getpid() == self._process

    @property
    def is_in_place(self) -> bool:
        """Whether the path still names the directory with the journal that is locked."""
        journal = os.fstat(self._journal)
        return self.identify(_JOURNAL) == (journal.st_dev, journal.st_ino)

    def forget(self) -> None:
        """Remove all entries of the journal, so that the next run starts from the beginning."""
        os.ftruncate(self._journal, 0)

    def read(self) -> list[Any]:
        """Return the entries of the journal up to the first that is not whole.

        What a damaged entry and those after it call final is computed again.

        Raises:
            ValueError: The first entry is damaged, or another version of cqs wrote it.
        """
        entries: list[Any] = []
        self._end, self._digest = 0, b""
        with open(self._journal, "rb", closefd=False) as file:
            file.seek(0)
            for line in file:
                digest, _, content = line.partition(b" ")
                if digest != self._chain(content):
                    if not entries and line.endswith(b"\n"):  # not one that was being written
                        raise self.damaged(self.path / _JOURNAL)
                    break
                entries.append(json.loads(content))
                self._end, self._digest = self._end + len(line), digest
        if entries and (version := entries[0]["request"]["format"]) != _FORMAT:
            raise ValueError(
                f"'{self.path}' must have resume format {_FORMAT} of this version of cqs, got "
                f"format {version}: resume it with the version that began it, or remove it to "
                "begin anew"
            )
        return entries

    def append(self, entries: Sequence[Mapping[str, Any]]) -> None:
        """Write entries, of JSON types, after those that were read, and wait for the disk."""
        with open(self._journal, "r+b", closefd=False) as file:
            file.seek(self._end)
            for entry in entries:
                content = json.dumps(entry).encode() + b"\n"
                self._digest = self._chain(content)
                self._end += file.write(self._digest + b" " + content)
            file.flush()
            os.fsync(file.fileno())

    def _chain(self, content: bytes) -> bytes:
        """Return the digest of an entry, which also covers all entries before."""
        return sha256(self._digest + content).hexdigest().encode()

    @property
    def output(self) -> Path | None:
        """Path of the output file of an interrupted run, ``None`` without saved results."""
        entries = self.read()
        return Path(entries[0]["request"]["output"][0]) if entries else None

    def has_made(self, path: Path) -> bool:
        """Return whether ``path`` is the output file of an interrupted run, even if renamed."""
        entries = self.read()
        if not entries or not path.is_file():
            return False
        inode = path.stat()
        return bool(entries[0]["file"] == [inode.st_dev, inode.st_ino])

    def damaged(self, path: Path) -> ValueError:
        """Return the error for a working file that is missing or damaged."""
        return ValueError(
            f"'{path}' is missing, damaged or outdated: restore it, or remove '{self.path}'"
        )


class Checkpoint:
    """The saved progress of a computation, with digests of all final results."""

    def __init__(
        self,
        directory: WorkingDirectory,
        request: Mapping[str, Any],
        output: InFile,
        lse: Tensor,
        plans: Sequence[StreamPlan],
    ):
        """Load the progress of an interrupted run, or create the files of a new one.

        Args:
            directory: The entered resume directory.
            request: Options and input files of the computation, of JSON types.
            output: Destination of the output, ``[batch, num_heads, seqlen_q, value_dim]``.
            lse: Destination of the LSE; rows that are final already are written to it.
            plans: The plan of each part of the problem, for the current memory budget. Those of an
                interrupted run replace them.

        Raises:
            ValueError: A working file is damaged, or belongs to another computation or to changed
                inputs; final results have changed; or a plan exceeds the memory budget.
            OSError: A file cannot be read or written.
        """
        self._directory, self._plans, self._output = directory, list(plans), output
        self._request = {"format": _FORMAT, **request}
        self._part, self._reached = -1, (0, START)
        self._blocks: list[list[Any]] = []
        """Finished blocks that are not saved: batch element, head, rows, digests of the results."""
        self._next_save = -math.inf
        self._entries: list[dict[str, Any]] = []
        """Entries to write before the next."""
        if entries := directory.read():
            self._load(lse, *entries)
        else:
            first = {"request": self._request, "plans": list(map(_sizes, plans))}
            self._entries = [{**first, "file": output.identity}]
            directory.create(_LSE, lse.nbytes)

    def close(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Save the progress at the end of a run; after a failed verification forget all of it."""
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
            results: The output of this part, a :class:`Part` of the whole, and its LSE, a tensor.
        """
        output, lse = results
        batch, rows, self._plans[self._part] = block.batch, block.tokens, plan
        for head in block.heads:
            place = output.batches[batch], output.heads[head], rows
            self.lse.write(*place, lse[batch, head, rows.start : rows.stop])
            digests = _digest(self._output, *place), _digest(self.lse, *place)
            self._blocks.append([*place[:2], rows.start, rows.stop, *digests])
        self._reached = self._part, block.end
        if time.monotonic() >= self._next_save:
            self.save()

    def save(self) -> None:
        """Write the progress since the last save to disk; does nothing in forked processes.

        Progress of a failed save is discarded, because a file system may report lost data only
        once: the next fsync may succeed although the data were not written.
        """
        blocks, self._blocks = self._blocks, []
        if not blocks or not self._directory.is_owned:
            return
        if not self._directory.is_in_place:
            raise OSError(f"'{self._directory.path}' was moved or removed while it was in use")
        # The order matters: results, then the entry that calls them final.
        self._output.flush()
        self.lse.flush()
        part, position = self._reached
        sizes = _sizes(self._plans[part])
        entry = {"part": part, "sizes": sizes, "position": position, "blocks": blocks}
        self._directory.append([*self._entries, entry])
        self._entries = []
        self._next_save = time.monotonic() + _SECONDS_BETWEEN_SAVES

    @cached_property
    def lse(self) -> InFile:
        """The LSE, ``[batch, num_heads, seqlen_q]``, in a working file."""
        dtype = lse_dtype(self._output.dtype)
        shape = self._output.shape[:3]
        path = self._directory.path / _LSE
        with suppress(OSError, ValueError):
            opened = InFile(path, shape, dtype, 0, is_writable=True)
            if opened.identity == self._directory.identify(_LSE):
                return opened
        raise self._directory.damaged(path)

    def _load(self, lse: Tensor, first: Mapping[str, Any], *entries: Mapping[str, Any]) -> None:
        """Continue from the journal of an interrupted run; see the constructor for errors."""
        for name in {**self._request, **first["request"]}:  # options may be given in one alone
            value = self._request.get(name)
            if first["request"].get(name) != value:
                raise ValueError(
                    f"directory must be the directory of this computation, got "
                    f"'{self._directory.path}', whose {name} is {first['request'].get(name)} "
                    f"instead of {value}: pass another directory"
                )
        if entries:
            self._reached = entries[-1]["part"], Position(*entries[-1]["position"])
        changed = {entry["part"]: entry["sizes"] for entry in entries}
        sizes = dict(enumerate(first["plans"])) | changed
        self._plans = [replace(plan, **sizes[part]) for part, plan in enumerate(self._plans)]
        for plan in self._plans[self._reached[0] :]:
            if plan.peak_bytes > plan.budget:
                raise ValueError(
                    f"memory_budget must be at least {plan.peak_bytes} bytes to resume "
                    f"'{self._directory.path}', got {plan.budget}"
                )
        for batch, head, start, stop, *digests in chain(*(entry["blocks"] for entry in entries)):
            for results, expected in zip((self._output, self.lse), digests, strict=True):
                if _digest(results, batch, head, range(start, stop)) != expected:
                    raise ValueError(
                        f"final results of '{self._directory.path}' have changed: rows {start} to "
                        f"{stop - 1} of head {head} of batch element {batch} in '{results.path}'. "
                        f"Restore them, or remove '{self._directory.path}' to begin anew"
                    )
            self.lse.read(batch, head, range(start, stop), lse[batch, head, start:stop])


def _sizes(plan: StreamPlan) -> dict[str, int]:
    """Return the attributes of a plan that are saved; the others follow from the call."""
    return {"heads_at_once": plan.heads_at_once, "rows": plan.rows, "chunk": plan.chunk}


def _digest(results: InFile, batch: int, head: int, rows: range) -> str:
    """Return the SHA-256 digest of rows of one head in their file, read 1 MiB at a time."""
    row_bytes = math.prod(results.shape[3:]) * results.dtype.itemsize
    length, hasher = max(_READ_BYTES // row_bytes, 1), sha256()
    for first in range(0, len(rows), length):
        part = rows[first : first + length]
        values = torch.empty((len(part), *results.shape[3:]), dtype=results.dtype, device="cpu")
        results.read(batch, head, part, values)
        hasher.update(bytes_of(values))
    return hasher.hexdigest()
