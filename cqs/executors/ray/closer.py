"""Closing what must be closed even if the wait for it is interrupted."""

import threading
from collections.abc import Callable


class Closer:
    """Calls a function on threads of their own, which no KeyboardInterrupt reaches."""

    def __init__(self, function: Callable[[], object]):
        """Prepare; ``function`` must do nothing when it is called again."""
        self._function = function
        self._lock = threading.Lock()

    def close(self) -> None:
        """Call the function and wait until it is done, also if another thread called it.

        Raises:
            Exception: what the function raised.
        """
        errors: list[BaseException] = []
        thread = threading.Thread(target=self._run, args=(errors,))
        try:
            thread.start()
        except RuntimeError:  # the interpreter is ending
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
