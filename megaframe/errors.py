"""The one error type for mistakes that a user can mend.

Whoever runs a command sees its text and nothing else (no traceback), with exit status 2. The text
names what is wrong, both numbers, the config key and the nearest valid values.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager


class UserError(Exception):
    """A mistake in a config, a file or a command line; its text is the whole message."""


EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
_PATIENCE = 2.0


@contextmanager
def reported(rank: int = 0) -> Iterator[None]:
    """Turn a `UserError` into its message on standard error and exit status 2.

    A mistake that every rank of a launch finds would be told by each of them; those after the first
    wait a moment, in which the launcher ends them all, and say which rank they are.
    """
    try:
        yield
    except UserError as error:
        if rank:
            time.sleep(_PATIENCE)
        who = f"rank {rank}: " if rank else ""
        print(f"error: {who}{error}", file=sys.stderr, flush=True)
        raise SystemExit(EXIT_USER_ERROR) from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        raise SystemExit(EXIT_INTERRUPTED) from None
