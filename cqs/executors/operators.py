"""What the operators of ``torch.compile`` share: patterns, plans and seeds in graphs.

A graph takes tensors and plain numbers. Patterns become handles (:mod:`cqs.patterns.handle`), kinds
of plans become names, and the random seed of dropout becomes a tensor.
"""

from ast import literal_eval
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from cqs.partial import Gradients
from cqs.patterns import Pattern
from cqs.patterns.handle import new_handle, read_handle
from cqs.patterns.pattern import MAKERS, InGraph
from cqs.problem.masks import check_is_pattern
from cqs.scheduler import Kind
from cqs.scheduler.kinds import read_kind

HOST_TAGS = (torch.Tag.cudagraph_unsafe,)
"""What reads or makes handles runs on the host, so CUDA graphs must not replay it."""
TRACED: dict[str, Any] = {}
"""What the functions that Dynamo runs while it traces have seen, by name; see :func:`traced`."""


def handle_of(pattern: Pattern | None) -> Tensor | None:
    """Return a tensor by which :func:`read_pattern` finds a pattern in this process.

    In a graph that is being traced, the tensor is a value of the graph.
    """
    if pattern is None:
        return None
    check_is_pattern(pattern)
    if _is_exporting():
        raise NotImplementedError(
            f"pattern must be None in torch.export, got {pattern!r}: patterns are values of this "
            "process, in which another process would find others"
        )
    if isinstance(pattern, InGraph):
        return _make_in_graph(pattern)
    if torch.compiler.is_dynamo_compiling():
        from torch._dynamo.comptime import comptime

        comptime(_make_handle)  # reads the local variable ``pattern``
    handle: Tensor = pattern.handle
    return handle


def _make_in_graph(pattern: InGraph) -> Tensor | None:
    """Make a pattern in the graph that is being traced, and return its handle."""
    arguments, options = pattern.arguments, pattern.options
    if pattern.make is read_pattern:  # an operator has made it before
        handle: Tensor = arguments[0]
        return handle
    numbers: list[int] = []
    tensors: list[Any] = []
    template = _template([*arguments, *options.values()], numbers, tensors)
    is_constant = not tensors
    if is_constant and torch.compiler.is_dynamo_compiling():
        from torch._dynamo.comptime import comptime

        comptime(_look_at_numbers)
        is_constant = traced("constant")
    if is_constant:
        return handle_of(_make_constant(pattern.make, *arguments, **options))
    maker = f"{pattern.make.__module__}:{pattern.make.__name__}"
    handle = _made(maker, " ".join(options), template, numbers, tensors)
    return handle


def _template(value: Any, numbers: list[int], tensors: list[Any]) -> str:
    """Return the literal of arguments, without integers, tensors and patterns.

    Integers are added to ``numbers`` and replaced by an empty dict, tensors are added to
    ``tensors`` and replaced by an ellipsis, and so are handles of patterns, replaced by an empty
    bytes literal.
    """
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join([_template(item, numbers, tensors) for item in value]) + "]"
    if value is None or isinstance(value, (bool, str)):
        return repr(value)
    if isinstance(value, Pattern):
        tensors.append(handle_of(value))
        return "b''"
    if not isinstance(value, int) and hasattr(value, "dtype"):  # a symbol is an int
        tensors.append(torch.as_tensor(value, device=getattr(value, "device", "cpu")))
        return "..."
    numbers.append(value)
    return "{}"


def _make_handle(context: Any) -> None:
    """Make the handle of the caller's local ``pattern``, whose code Dynamo would trace otherwise.

    It is made when it is first read. In later calls, guards of the compiled graph read it.

    Args:
        context: Dynamo's context of the function that it traces.
    """
    variable = context.get_local("pattern")._i_will_not_complain_if_bc_breaks_VariableTracker()
    variable.realize().value.handle  # noqa: B018


def _look_at_numbers(context: Any) -> None:
    """Check whether the numbers of the local list ``numbers`` are known to Dynamo."""
    variable = context.get_local("numbers")._i_will_not_complain_if_bc_breaks_VariableTracker()
    TRACED["constant"] = all(item.realize().is_python_constant() for item in variable.items)


def traced(name: str) -> Any:
    """Return what has been seen while Dynamo traced, as a constant of the graph."""
    return TRACED[name]


def _is_exporting() -> bool:
    # Asked by Dynamo of PyTorch 2.11 itself, it would be true in every graph.
    return torch.compiler.is_exporting()


def _make_constant(make: Callable[..., Pattern], *args: Any, **kwargs: Any) -> Pattern:
    return make(*args, **kwargs)


def read_pattern(handle: Tensor) -> Pattern:
    """Return the pattern of a handle."""
    pattern: Pattern = read_handle(handle.numpy())
    return pattern


@torch.library.custom_op("cqs::made", mutates_args=(), tags=HOST_TAGS)
def _made(
    maker: str, names: str, template: str, numbers: list[int], tensors: list[Tensor]
) -> Tensor:
    """Make a pattern of tensors, or of numbers that differ between runs, such as a length.

    Args:
        maker: Module and name of the function that makes the pattern, separated by a colon.
        names: Names of the last arguments, separated by spaces.
        template: Literal of the list of all arguments, see :func:`_template`.
        numbers: The integers.
        tensors: The tensors, and handles of the patterns.
    """
    if maker not in MAKERS:  # a program in a file may name any text
        raise ValueError(f"maker must be a function that makes patterns, got {maker!r}")
    given = _filled(literal_eval(template), iter(numbers), iter(tensors))
    first = len(given) - len(names.split())
    options = dict(zip(names.split(), given[first:], strict=True))
    pattern = MAKERS[maker](*given[:first], **options)
    return torch.from_numpy(new_handle(pattern))


_made.register_fake(lambda *_: torch.empty(1, dtype=torch.float64, device="cpu"))


def _filled(value: Any, numbers: Iterator[int], tensors: Iterator[Tensor]) -> Any:
    """Return the arguments of a template, with numbers, tensors and patterns in their places."""
    if isinstance(value, list):
        return [_filled(item, numbers, tensors) for item in value]
    if value == {}:
        return next(numbers)
    if value is ...:
        return next(tensors)
    return read_pattern(next(tensors)) if value == b"" else value


def made_once(make: Callable[..., Pattern], *arguments: Any) -> Pattern:
    """Return a pattern; one operator of a graph that is being traced makes it for all uses."""
    if not torch.compiler.is_dynamo_compiling():
        return make(*arguments)
    return InGraph(read_pattern, (handle_of(InGraph(make, arguments, {})),), {})


def plan_text(plan: Kind | str | None) -> str | None:
    """Return the text of a kind of plan, for graphs."""
    if plan is None or isinstance(plan, str):
        return plan
    return str(plan.to_json() if hasattr(plan, "to_json") else plan)


def read_plan(text: str) -> Kind | str:
    """Return the kind of plan of a text of :func:`plan_text`."""
    return read_kind(literal_eval(text)) if text.startswith("{") else text


def seed_of(probability: float, seed: int | None) -> Tensor | None:
    """Return the random seed in the graph that is being traced, int64 on the CPU.

    Without ``seed`` the graph draws one in every call, as an eager call does.
    """
    if not probability:
        return None
    if seed is None:
        return torch.randint(2**63 - 1, (), device="cpu")
    return torch.full((), seed, dtype=torch.int64, device="cpu")


def as_raw(gradients: Gradients, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Convert gradients of a checked problem to those of its arguments query, key and value.

    The arguments may lack the expanded batch, and a column if their head_dim is 0.
    """
    return tuple(
        gradient[..., : tensor.shape[3]].sum_to_size(tensor.shape).to(tensor.dtype).contiguous()
        for gradient, tensor in zip(gradients, tensors, strict=True)
    )


def place_in_graph() -> int:
    """Return the number of calls so far in the graph that is being traced.

    Inductor may reorder independent calls by their sizes, which differ between ranks.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    graph: Any = InstructionTranslator.current_tx().output
    graph.num_sharded_calls = 1 + getattr(graph, "num_sharded_calls", 0)
    place: int = graph.num_sharded_calls
    return place


_function: Any
for _function in (traced, _is_exporting, _make_constant, place_in_graph):
    # As torch.compiler.assume_constant_result does, which imports the compiler.
    _function._dynamo_marked_constant = True
