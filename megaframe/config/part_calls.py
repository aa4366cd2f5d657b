"""Calls of what parts of extensions say of themselves: a fault of theirs is one message with the
part, the method, and the file and line."""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Mapping
from numbers import Integral, Real
from typing import TypeVar, cast

from megaframe.config.parts import Part
from megaframe.errors import UserError

Answer = TypeVar("Answer")
_ACCEPTED: Mapping[type, type] = {int: Integral, float: Real}
"""Types whose values are taken for those of another, such as NumPy's numbers."""


def call_part(part: Part, method: str, kind: type[Answer], *arguments: object) -> Answer:
    """Return what a method of a part returns.

    Args:
        part: The part.
        method: Name of the method.
        kind: The type that it must return.
        arguments: Those of the method.

    Raises:
        UserError: It fails, or returns something else.
    """
    try:
        answer = getattr(part, method)(*arguments)
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"{describe_method(part, method)} fails at {describe_failure(part, error)}"
        ) from error
    if not isinstance(answer, _ACCEPTED.get(kind, kind)):
        raise UserError(
            f"{describe_method(part, method)} returns {type(answer).__name__}, which is no "
            f"{kind.__name__}"
        )
    return cast(Answer, answer)


def describe_method(part: Part, method: str) -> str:
    """Return a method of a part for a message, with its name, file and line."""
    kind = type(part)
    code = getattr(inspect.unwrap(getattr(kind, method)), "__code__", None)
    place = "" if code is None else f" ({code.co_filename}:{code.co_firstlineno})"
    return f"{part.name}: {kind.__name__}.{method}{place}"


def describe_failure(part: object, error: BaseException) -> str:
    """Return an exception in one line, with the place where it left the code of an extension.

    Args:
        part: An object of a class of the extension.
        error: What its code has raised.
    """
    frames = traceback.extract_tb(error.__traceback__)
    source = getattr(sys.modules.get(type(part).__module__), "__file__", None)
    # The code of the extension, not what it has called.
    frame = next((f for f in reversed(frames) if f.filename == source), frames[-1])
    text = " ".join(traceback.format_exception_only(error)[-1].split())
    return f"{frame.filename}:{frame.lineno}: {text}"
