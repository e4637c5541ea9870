"""Numbers from the user, also those of numpy, as plain Python ones; bools are no numbers."""

import math
import operator
import sys
from numbers import Real
from typing import Any


def as_integer(name: str, value: Any, least: int, most: int = sys.maxsize) -> int:
    """Return an integer of at least ``least`` and at most ``most``.

    Raises:
        TypeError: if ``value`` is no integer.
        ValueError: if it is less or more.
    """
    number = to_integer(value, f"{name} must be an integer")
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {as_text(number)}")
    if number > most:
        raise ValueError(f"{name} must be at most {most}, got {as_text(number)}")
    return number


def as_text(number: int) -> str:
    """Write an integer; of a very large one, which Python refuses to write, its size."""
    return str(number) if number.bit_length() < 1024 else f"{number.bit_length()} bits"


def to_integer(value: Any, rule: str) -> int:
    """Return an integer, or raise TypeError with the rule that ``value`` breaks."""
    try:
        if not _is_bool(value):
            return operator.index(value)
    except TypeError:
        pass
    raise TypeError(f"{rule}, got {value!r}")


def to_float(value: Any, rule: str) -> float:
    """Return a real number, or raise TypeError with the rule that ``value`` breaks."""
    if _is_bool(value) or not issubclass(type(value), Real):
        raise TypeError(f"{rule}, got {value!r}")
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def as_bool(name: str, value: Any, rule: str = "a bool") -> bool:
    """Return a bool, or raise TypeError."""
    if not _is_bool(value) or getattr(value, "shape", ()) != ():
        raise TypeError(f"{name} must be {rule}, got {value!r}")
    return bool(value)


def _is_bool(value: Any) -> bool:
    """Say whether ``value`` is a bool or of dtype bool; numpy and torch are not imported here."""
    return isinstance(value, bool) or str(getattr(value, "dtype", "")) in ("bool", "torch.bool")
