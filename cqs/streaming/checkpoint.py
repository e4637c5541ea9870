"""How far a run has come, in a file, so that another can go on."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cqs.partial import lse_dtype
from cqs.patterns.pattern import content_digest
from cqs.streaming.plan import START, Position, StreamPlan
from cqs.streaming.sources import InFile, bytes_of


@dataclass(frozen=True)
class Checkpoint:
    """A file that says up to where the output is final, and beside it one with the lse."""

    path: Path
    request: Mapping[str, Any]
    """What is computed, from which files; of types that JSON has."""
    output: InFile

    def load(self, plans: Sequence[StreamPlan]) -> tuple[list[StreamPlan], int, Position]:
        """Return the plans to follow, and the part and position to go on at.

        Args:
            plans: One for each part of the problem; the file, if there is one, has others.

        Raises:
            ValueError: if the file is of another computation, or of other or changed inputs, or
                what it says is final is not in the output, or a plan takes more than the budget.
            OSError: if the file of the lse is not there.
        """
        if not self.path.exists():
            return list(plans), 0, START
        try:
            found = json.loads(self.path.read_text())
            request = dict(found["request"])
            choices: list[dict[str, Any]] = [
                {name: int(each[name]) for name in _CHOICES} for each in found["plans"]
            ]
            begun = [replace(plan, **each) for plan, each in zip(plans, choices, strict=True)]
            part, position = int(found["part"]), Position(*map(int, found["position"]))
            batch, head, start, stop = map(int, found["last"])
            digest = found["digest"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"'{self.path}' is no checkpoint: {error!r}") from error
        for name, value in self.request.items():
            if request.get(name) != value:
                raise ValueError(
                    f"'{self.path}' is of another computation: it has {name} "
                    f"{request.get(name)}, this one {value}"
                )
        for plan in begun[part:]:
            if plan.peak_bytes > plan.budget:
                raise ValueError(
                    f"'{self.path}' was begun with a larger memory budget: to go on takes "
                    f"{plan.peak_bytes} bytes, got {plan.budget}"
                )
        if self._digest(batch, head, range(start, stop)) != digest:
            raise ValueError(
                f"'{self.path}' is of other results than those in '{self.output.path}' and "
                f"'{self._lse_path}'"
            )
        return begun, part, position

    def save(
        self,
        plans: Sequence[StreamPlan],
        part: int,
        position: Position,
        last: tuple[int, int, range],
    ) -> None:
        """Note that everything up to a position in a part is where it goes, also for the disk.

        Args:
            plans: As they are followed.
            part: Number.
            position: In it.
            last: Batch element, head and rows that became final last, or some of them.
        """
        batch, head, rows = last[0], last[1], last[2][-_NUM_CHECKED:]
        content = {
            "request": self.request,
            "plans": [{name: getattr(plan, name) for name in _CHOICES} for plan in plans],
            "part": part,
            "position": position,
            "last": [batch, head, rows.start, rows.stop],
            "digest": self._digest(batch, head, rows),
        }
        self.output.flush()
        self._mapped_lse.flush()
        partial = self.path.with_name(self.path.name + ".partial")
        with open(partial, "w") as file:
            json.dump(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, self.path)

    @property
    def lse(self) -> Tensor:
        """``[batch, num_heads, seqlen_q]``, mapped from its file, which is new at first."""
        return torch.from_numpy(self._mapped_lse)

    @cached_property
    def _mapped_lse(self) -> np.memmap:
        shape, dtype = self.output.shape[:3], lse_dtype(self.output.dtype)
        of_numpy = np.float64 if dtype == torch.float64 else np.float32
        mode = "r+" if self.path.exists() else "w+"
        mapped = np.lib.format.open_memmap(self._lse_path, mode, of_numpy, shape)
        if mapped.shape != shape or mapped.dtype != of_numpy:
            raise ValueError(f"'{self._lse_path}' is of another computation")
        with open(self._lse_path, "r+b") as file:
            os.posix_fallocate(file.fileno(), 0, os.path.getsize(self._lse_path))
        return mapped

    def remove(self) -> None:
        """Forget it, once everything is computed."""
        self.path.unlink(missing_ok=True)
        self._lse_path.unlink(missing_ok=True)

    def _digest(self, batch: int, head: int, rows: range) -> str:
        """Return what tells some results from others."""
        output = torch.empty(
            (len(rows), self.output.shape[3]), dtype=self.output.dtype, device="cpu"
        )
        self.output.read(batch, head, rows, output)
        lse = self.lse[batch, head, rows.start : rows.stop]
        return content_digest(b"".join(bytes_of(tensor) for tensor in (output, lse)))

    @property
    def _lse_path(self) -> Path:
        return self.path.with_name(self.path.name + ".lse.npy")


_NUM_CHECKED = 128
_CHOICES = ("heads_at_once", "rows", "chunk")
