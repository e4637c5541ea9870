"""What a finished call keeps alive."""

import gc
import weakref
from collections.abc import Callable
from typing import Any


def kept_without_a_collection(call: Callable[..., dict[str, Any]], *arguments: Any) -> list[str]:
    """Return which of the objects that a call returns by name still exist before a collection."""
    gc.collect()
    gc.disable()
    try:
        references = {name: weakref.ref(each) for name, each in call(*arguments).items()}
        return [name for name, reference in references.items() if reference() is not None]
    finally:
        gc.enable()
