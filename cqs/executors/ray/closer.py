"""Shutdown that completes even if the wait for it is interrupted."""

import threading
from collections.abc import Callable


class Closer:
    """Calls a function on a new thread, which KeyboardInterrupt does not reach."""

    def __init__(self, function: Callable[[], object]):
        """Store ``function``; repeated calls of it must have no effect."""
        self._function = function
        self._lock = threading.Lock()

    def close(self) -> None:
        """Call the function and wait until it has returned, also if another thread called it.

        Raises:
            Exception: The function raised.
        """
        errors: list[BaseException] = []
        thread = threading.Thread(target=self._run, args=(errors,))
        try:
            thread.start()
        except RuntimeError:  # no thread can start while the interpreter shuts down
            self._run(errors)
        else:
            thread.join()
        if errors:
            raise errors[0]

    def _run(self, errors: list[BaseException]) -> None:
        try:
            with self._lock:
                self._function()
        except BaseException as error:
            errors.append(error)
