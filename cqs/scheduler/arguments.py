"""Convert arguments to Python numbers. NumPy scalars are accepted; bools are not numbers."""

import math
import operator
import sys
from numbers import Real
from typing import Any


def as_integer(name: str, value: Any, least: int, most: int = sys.maxsize) -> int:
    """Return ``value`` as an ``int`` between ``least`` and ``most``, both inclusive.

    Args:
        name: Name of the argument, for the error message.
        value: An ``int`` or an object with ``__index__``, such as a NumPy integer.
        least: Smallest value allowed.
        most: Largest value allowed.

    Raises:
        TypeError: ``value`` is not an integer, or is a bool.
        ValueError: ``value`` is out of range.
    """
    number = to_integer(value, f"{name} must be an integer")
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {as_text(number)}")
    if number > most:
        raise ValueError(f"{name} must be at most {most}, got {as_text(number)}")
    return number


def as_text(number: int) -> str:
    """Format an integer, or its number of bits if Python would reject it as too long."""
    return str(number) if number.bit_length() < 1024 else f"{number.bit_length()} bits"


def to_integer(value: Any, rule: str) -> int:
    """Return ``value`` as an ``int``, or raise TypeError with the text of ``rule``."""
    try:
        if not _is_bool(value):
            return operator.index(value)
    except TypeError:
        pass
    raise TypeError(f"{rule}, got {value!r}")


def to_float(value: Any, rule: str) -> float:
    """Return ``value`` as a ``float``, or raise TypeError with the text of ``rule``.

    Integers beyond the range of a float become infinity.
    """
    if _is_bool(value) or not issubclass(type(value), Real):
        raise TypeError(f"{rule}, got {value!r}")
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def as_bool(name: str, value: Any, rule: str = "a bool") -> bool:
    """Return ``value`` as a ``bool``, or raise TypeError unless it is a scalar bool."""
    if not _is_bool(value) or getattr(value, "shape", ()) != ():
        raise TypeError(f"{name} must be {rule}, got {value!r}")
    return bool(value)


def _is_bool(value: Any) -> bool:
    """Return whether ``value`` is a bool or has dtype bool, without importing NumPy or torch."""
    return isinstance(value, bool) or str(getattr(value, "dtype", "")) in ("bool", "torch.bool")
