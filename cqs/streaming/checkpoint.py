"""How far a run has come, in a file, so that another can go on."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cqs.streaming.plan import START, Position, StreamPlan


@dataclass(frozen=True)
class Checkpoint:
    """A file that says up to where the output is final, and beside it one with the lse."""

    path: Path
    request: Mapping[str, Any]
    """What is computed, from which files; of types that JSON has."""

    def load(self, plans: Sequence[StreamPlan]) -> tuple[list[StreamPlan], int, Position]:
        """Return the plans to follow, and the part and position to go on at.

        Args:
            plans: One for each part of the problem; the file, if there is one, has others.

        Raises:
            ValueError: if the file is of another computation, or of other or changed inputs, or
                a plan takes more than the budget.
        """
        if not self.path.exists():
            return list(plans), 0, START
        try:
            found = json.loads(self.path.read_text())
            request = dict(found["request"])
            choices: list[dict[str, Any]] = [
                {name: int(each[name]) for name in _CHOICES} for each in found["plans"]
            ]
            part, position = int(found["part"]), Position(*map(int, found["position"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"'{self.path}' is no checkpoint: {error!r}") from error
        for name, value in self.request.items():
            if request.get(name) != value:
                raise ValueError(
                    f"'{self.path}' is of another computation: it has {name} "
                    f"{request.get(name)}, this one {value}"
                )
        begun = [replace(plan, **each) for plan, each in zip(plans, choices, strict=True)]
        for plan in begun[part:]:
            if plan.peak_bytes > plan.budget:
                raise ValueError(
                    f"'{self.path}' was begun with a larger memory budget: to go on takes "
                    f"{plan.peak_bytes} bytes, got {plan.budget}"
                )
        return begun, part, position

    def save(self, plans: Sequence[StreamPlan], part: int, position: Position) -> None:
        """Note that everything up to a position in a part is where it goes."""
        partial = self.path.with_name(self.path.name + ".partial")
        choices = [{name: getattr(plan, name) for name in _CHOICES} for plan in plans]
        content = {"request": self.request, "plans": choices, "part": part, "position": position}
        partial.write_text(json.dumps(content))
        os.replace(partial, self.path)

    def lse(self, shape: tuple[int, int, int], dtype: torch.dtype) -> Tensor:
        """Map the file of the lse, which is made if there is none."""
        mode = "r+" if self._lse_path.exists() and self.path.exists() else "w+"
        of_numpy = np.float64 if dtype == torch.float64 else np.float32
        mapped = np.lib.format.open_memmap(self._lse_path, mode, of_numpy, shape)
        if mapped.shape != shape:
            raise ValueError(f"'{self._lse_path}' is of another computation")
        with open(self._lse_path, "r+b") as file:
            os.posix_fallocate(file.fileno(), 0, os.path.getsize(self._lse_path))
        return torch.from_numpy(mapped)

    def remove(self) -> None:
        """Forget it, once everything is computed."""
        self.path.unlink(missing_ok=True)
        self._lse_path.unlink(missing_ok=True)

    @property
    def _lse_path(self) -> Path:
        return self.path.with_name(self.path.name + ".lse.npy")


_CHOICES = ("heads_at_once", "rows", "chunk")
