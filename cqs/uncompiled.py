"""Functions that ``torch.compile`` does not compile, and the operators that replace some."""

import sys
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")


def check_not_traced(name: str) -> None:
    """Raise NotImplementedError in ``torch.jit.trace``, which would fix lengths, mask and seed."""
    torch = sys.modules.get("torch")
    if torch is not None and torch._C._get_tracing_state() is not None:
        raise NotImplementedError(
            f"{name} of cqs must not be called in torch.jit.trace, which would keep the lengths, "
            "mask and random seed of this call for all others: use torch.compile"
        )


def uncompiled(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Make ``torch.compile`` break its graph at calls of a function, which then runs eagerly.

    ``torch.compiler.disable`` does the same, but imports the compiler and Triton at once. This
    decorator imports nothing, not even PyTorch, because most programs compile nothing. Calls in
    ``torch.jit.trace`` raise NotImplementedError.
    """
    return replaced_in_graphs(lambda *_, **__: NotImplemented, lambda: 0)(function)


def replaced_in_graphs(
    in_graph: Callable[..., Any], count_modes: Callable[[], int]
) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Make ``torch.compile`` trace another function in place of a function.

    Args:
        in_graph: The other function, which calls an operator. It has the same parameters. If it
            returns ``NotImplemented``, the graph breaks, and the function runs eagerly.
        count_modes: Returns the number of ``TorchDispatchMode`` objects that are entered. They see
            ``in_graph`` too: selective activation checkpointing can save what the operator returns.
    """

    def decorate(function: Callable[_P, _T]) -> Callable[_P, _T]:
        @cache
        def eagerly() -> Callable[_P, _T]:
            import torch

            disabled: Callable[_P, _T] = torch.compiler.disable(function)
            return disabled

        @wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            is_imported = "torch._dynamo" in sys.modules
            if is_imported:
                import torch

                if torch.compiler.is_dynamo_compiling():
                    result: _T = in_graph(*args, **kwargs)
                    if result is NotImplemented:  # without this, Dynamo would compile the function
                        message = f"{function.__name__} of cqs runs outside of the graph"
                        torch._dynamo.skip_frame(msg=message)
                    return result
            check_not_traced(function.__qualname__)
            if count_modes():
                result = in_graph(*args, **kwargs)
                if result is not NotImplemented:
                    return result
            return (eagerly() if is_imported else function)(*args, **kwargs)

        return call

    return decorate
