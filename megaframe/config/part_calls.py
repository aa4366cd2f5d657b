"""What an error in the code of an extension says: where it left that code."""

from __future__ import annotations

import sys
import traceback


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
    text = traceback.format_exception_only(error)[-1].strip()
    return f"{frame.filename}:{frame.lineno}: {text}"
