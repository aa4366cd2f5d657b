"""The one error type for mistakes that a user can mend.

Whoever runs a command sees its text and nothing else (no traceback), with exit status 2. The text
names what is wrong, both numbers, the config key and the nearest valid values.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


class UserError(Exception):
    """A mistake in a config, a file or a command line; its text is the whole message."""


EXIT_USER_ERROR = 2


@contextmanager
def reported() -> Iterator[None]:
    """Turn a `UserError` into its message on standard error and exit status 2."""
    try:
        yield
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(EXIT_USER_ERROR) from None
