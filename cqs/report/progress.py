"""Progress bars of measurements."""

from collections.abc import Iterable, Iterator
from typing import TypeVar

from tqdm import tqdm

Item = TypeVar("Item")

_DELAY = 2.0
"""Seconds of work before a bar appears."""


def progress_bar(total: int, label: str = "", *, is_shown: bool = True) -> tqdm:
    """Return a bar on stderr that appears after two seconds, on terminals only.

    Args:
        total: Number of updates until the work is done.
        label: What is measured.
        is_shown: False for no bar, as on all ranks but one.
    """
    disable = None if is_shown else True
    return tqdm(total=total, desc=label, delay=_DELAY, disable=disable, leave=False)


def track(
    items: Iterable[Item], total: int, label: str = "", *, is_shown: bool = True
) -> Iterator[Item]:
    """Yield items, with a bar; the arguments are those of :func:`progress_bar`."""
    with progress_bar(total, label, is_shown=is_shown) as bar:
        for item in items:
            yield item
            bar.update()
