"""How far a run is, drawn as a bar or told to a function."""

from collections.abc import Callable

from tqdm import tqdm


def progress_callback(
    progress: bool | Callable[[int, int], None],
) -> Callable[[int, int], None]:
    """Return what is called with the numbers of tasks done and of all.

    Args:
        progress: A function, or whether to draw a bar.

    Raises:
        TypeError: if it is neither.
    """
    if callable(progress):
        return progress
    if not isinstance(progress, bool):
        raise TypeError(f"progress must be a bool or a function, got {progress!r}")
    bar: tqdm | None = None

    def draw(done: int, total: int) -> None:
        nonlocal bar
        bar = bar or tqdm(total=total, unit="task")
        bar.update(1)
        if done == total:
            bar.close()

    return draw if progress else lambda done, total: None
