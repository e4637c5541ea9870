"""Functions that ``torch.compile`` leaves as they are."""

import sys
from collections.abc import Callable
from functools import cache, wraps
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")


def uncompiled(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Have ``torch.compile`` break its graph where a function is called, and run it as it is.

    As ``torch.compiler.disable``, which imports the compiler and Triton at once. This imports
    nothing, not even PyTorch, because most programs compile nothing.
    """

    @cache
    def outside() -> Callable[_P, _T]:
        import torch

        found: Callable[_P, _T] = torch.compiler.disable(function)
        return found

    @wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        import torch

        if torch.compiler.is_dynamo_compiling():  # skipped, or it would be compiled for all kinds
            torch._dynamo.skip_frame(msg=f"{function.__name__} of cqs runs outside of the graph")
        return outside()(*args, **kwargs)

    return call
