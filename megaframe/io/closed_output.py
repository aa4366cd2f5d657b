"""What a command does when whoever reads its output leaves, as `head` does: it ends without a word.

Imports nothing but the standard library, for commands that must run where packages are missing.
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager

EXIT_CLOSED_OUTPUT = 141
"""Exit status of a command that could not print all, as a shell reports one that SIGPIPE ended."""


@contextmanager
def allow_closed_output() -> Iterator[None]:
    """Return a context for a whole command, in which standard output may be closed by its reader.

    SIGPIPE stays ignored: a connection that another host closes must not end a command.

    Raises:
        SystemExit: In place of a BrokenPipeError of standard output.
    """
    try:
        yield
    except BrokenPipeError:
        if not _drop_closed_output():  # that of a connection
            raise
        raise SystemExit(EXIT_CLOSED_OUTPUT) from None
    finally:
        _drop_closed_output()


def _drop_closed_output() -> bool:
    """Let what is still to be printed go nowhere if standard output is closed, so that Python says
    nothing of it at its end. Returns whether it was."""
    if not _is_output_closed():
        return False
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)
    return True


def _is_output_closed() -> bool:
    try:
        sys.stdout.flush()
        # Without a buffer (PYTHONUNBUFFERED) there is nothing left that could fail.
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))
    except BrokenPipeError:
        return True
    except (OSError, ValueError, AttributeError):  # a full disk, or no file at all
        return False
