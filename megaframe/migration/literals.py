"""Values of expressions that are literals, or simple arithmetic of them. Nothing is evaluated."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

_MOST = 10**18
_MOST_ITEMS = 10_000
_DEEPEST = 64
_OPERATIONS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


class UnknownValueError(Exception):
    """An expression is not of literals alone."""


def parse_python(text: str, mode: str = "eval") -> Any:
    """Return the syntax tree of Python.

    Raises:
        ValueError: If it is not Python, or nested too deep to be read.
    """
    try:
        return ast.parse(text, mode=mode)
    except SyntaxError as error:
        raise ValueError(f"line {error.lineno}: {error.msg}") from None
    except (RecursionError, MemoryError):
        raise ValueError("it is nested too deep") from None


def compute(node: ast.expr, look_up: Callable[[str], Any], depth: int = 0) -> Any:
    """Return the value of an expression: numbers, texts, lists, and + - * / // % of numbers; + of
    texts and of lists, and * of a list and a number.

    Args:
        node: The expression.
        look_up: Returns the value of a name, or raises `UnknownValueError`.

    Raises:
        UnknownValueError: For anything else, and for what grows beyond all bounds.
    """
    if depth > _DEEPEST:
        raise UnknownValueError
    if isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float | str | None):
        return _bound(node.value)
    if isinstance(node, ast.Name):
        return look_up(node.id)
    if isinstance(node, ast.List | ast.Tuple) and len(node.elts) <= _MOST_ITEMS:
        return [compute(item, look_up, depth + 1) for item in node.elts]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = compute(node.operand, look_up, depth + 1)
        if isinstance(value, int | float):
            return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        left = compute(node.left, look_up, depth + 1)
        right = compute(node.right, look_up, depth + 1)
        return _apply(type(node.op), left, right)
    raise UnknownValueError


def _apply(kind: type[ast.operator], left: Any, right: Any) -> Any:
    size = 1
    for value in (left, right):
        size *= max(1, len(value)) if isinstance(value, list | str) else 1
    are_numbers = all(isinstance(value, int | float) for value in (left, right))
    joins = kind is ast.Add and type(left) is type(right) and isinstance(left, list | str)
    repeats = kind is ast.Mult and {type(left), type(right)} == {list, int}
    if repeats and size * max(v for v in (left, right) if isinstance(v, int)) > _MOST_ITEMS:
        raise UnknownValueError
    if not (are_numbers or joins or repeats):
        raise UnknownValueError
    try:
        value = _OPERATIONS[kind](left, right)
    except (ZeroDivisionError, OverflowError):
        raise UnknownValueError from None
    return _bound(value)


def _bound(value: Any) -> Any:
    """Return a value that is within bounds, or raise `UnknownValueError`."""
    is_large = isinstance(value, int | float) and not -_MOST <= value <= _MOST
    if is_large or (isinstance(value, list | str) and len(value) > _MOST_ITEMS):
        raise UnknownValueError
    return value


def compute_integer(text: str, look_up: Callable[[str], int | None]) -> int | None:
    """Return the value of an arithmetic expression of a shell; None if it is unknown."""

    def look_up_or_raise(name: str) -> int:
        number = look_up(name)
        if number is None:
            raise UnknownValueError
        return number

    try:
        # A shell divides whole numbers, and rounds towards zero.
        value = compute(parse_python(text.strip()).body, look_up_or_raise)
    except (ValueError, UnknownValueError):
        return None
    return int(value) if isinstance(value, int | float) else None
