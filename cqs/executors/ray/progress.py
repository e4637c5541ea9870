"""Progress of a run, as a bar or as calls of a user function."""

from collections.abc import Callable

from tqdm import tqdm


def progress_callback(
    progress: bool | Callable[[int, int], None],
) -> Callable[[int, int], None]:
    """Return a function that is called with (finished tasks, all tasks) after every task.

    Args:
        progress: A user function, which is returned; True for a bar; False for no output.

    Raises:
        TypeError: ``progress`` is neither a bool nor a function.
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
