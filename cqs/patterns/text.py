"""Patterns as text: the calls that make them, read without running any code."""

import ast
import operator
from collections.abc import Callable
from contextlib import suppress
from itertools import chain
from typing import Any

import cqs.patterns as patterns
from cqs.arguments import as_integer
from cqs.patterns import Pattern
from cqs.patterns.arrays import as_list

PATTERN_HELP = "which pairs attend, as 'sliding_window(256, 0) | global_tokens(4)'; default: all"
_CALLS: dict[str, Callable[..., Any]] = {
    name: getattr(patterns, name)
    for name in patterns.__all__
    if name.islower() and name not in ("from_block_mask", "from_deepspeed")
} | {"range": range}
"""The functions that make patterns from literals, and ``range``."""
_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.BitOr: operator.or_,
    ast.BitAnd: operator.and_,
    ast.Sub: operator.sub,
}


def parse_pattern(text: str) -> Pattern:
    """Return the pattern that an expression names, as patterns print.

    Calls of what makes patterns in :mod:`cqs.patterns`, with literals, ranges and patterns as
    arguments, combined by ``|``, ``&`` and ``-``, and ``.head(batch, head)``. Nothing else is
    evaluated.

    Raises:
        ValueError: if the text is anything else, or a call in it is refused; the message says why.

    Example:
        >>> parse_pattern("sliding_window(256, 0) | global_tokens(4)")
        sliding_window(256, 0) | global_tokens(range(0, 4))
    """
    try:
        parsed = _evaluate(ast.parse(text.strip(), mode="eval").body)
    except SyntaxError as error:
        raise ValueError(f"pattern {text!r} is no expression: {error.msg}") from None
    except (RecursionError, MemoryError):
        raise ValueError("the pattern is nested too deeply, or too large for memory") from None
    except (ValueError, TypeError, ArithmeticError) as error:
        raise ValueError(f"pattern {text!r}: {error}") from error
    if not isinstance(parsed, Pattern):
        raise ValueError(f"pattern {text!r} is no pattern but {parsed!r}")
    return parsed


def _evaluate(node: ast.expr) -> Any:
    """Return the value of an expression of calls, literals and operators."""
    match node:
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=options) if name in _CALLS:
            given = {option.arg: _evaluate(option.value) for option in options if option.arg}
            if len(given) == len(options):
                return _CALLS[name](*map(_evaluate, arguments), **given)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
            sides = _evaluate(left), _evaluate(right)
            if all(isinstance(side, Pattern) for side in sides):
                return _OPERATORS[type(sign)](*sides)
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return as_list("a list", chain.from_iterable(map(_elements, elements)))
        case ast.Call(func=ast.Attribute(value=pattern, attr="head"), args=indices, keywords=[]):
            heads, where = _evaluate(pattern), list(map(_evaluate, indices))
            if isinstance(heads, Pattern) and len(where) == 2:
                return heads.head(*(as_integer("head", index, 0) for index in where))
        case ast.Constant() | ast.UnaryOp() | ast.Dict():
            with suppress(ValueError):
                return ast.literal_eval(node)
    raise ValueError(
        f"{ast.unparse(node)!r} is neither a literal nor a call of {', '.join(_CALLS)}, "
        "nor patterns combined by | & -"
    )


def _elements(node: ast.expr) -> list[Any]:
    """Return what one entry of a list stands for: itself, or with a star all that it holds."""
    if isinstance(node, ast.Starred):
        return as_list("what a star unpacks", _evaluate(node.value))
    element = _evaluate(node)
    if isinstance(element, range):
        raise ValueError(f"{element!r} in a list must be unpacked by a star")
    return [element]
