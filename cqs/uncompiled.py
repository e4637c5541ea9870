"""Functions that ``torch.compile`` does not compile."""

import sys
from collections.abc import Callable
from functools import cache, wraps
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")


def uncompiled(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Make ``torch.compile`` break its graph at calls of a function, which then runs eagerly.

    ``torch.compiler.disable`` does the same, but imports the compiler and Triton at once. This
    decorator imports nothing, not even PyTorch, because most programs compile nothing.
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

        if torch.compiler.is_dynamo_compiling():  # else Dynamo would compile this wrapper
            torch._dynamo.skip_frame(msg=f"{function.__name__} of cqs runs outside of the graph")
        return outside()(*args, **kwargs)

    return call
