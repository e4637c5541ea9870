"""Python functions of the package that a call enters."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cqs

_ROOT = str(Path(cqs.__file__).parent)


def count_frames(function: Callable[[], Any]) -> tuple[int, int]:
    """Return the number of functions of ``cqs`` that a call enters, and of their files."""
    files = list[str]()

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(_ROOT):
            files.append(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return len(files), len({*files})
