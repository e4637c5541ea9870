"""Progress bars of measurements."""

from tqdm import tqdm

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
