"""The errors whose text is all that whoever runs a command is to see: no traceback.

A `UserError` is a mistake that a user can mend; its text names what is wrong, both numbers, the
config key and the nearest valid values. `LostRanks` is the fault of another process. They end with
different exit statuses, so that a launcher can tell what may work when it is tried again.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NoReturn


class UserError(Exception):
    """A mistake in a config, a file or a command line; its text is the whole message."""


class Unreadable(UserError):
    """A file that is damaged, or cannot be read; what was saved before may do instead."""


class LostRanks(RuntimeError):
    """Communication failed or timed out; one of `ranks` may be dead or stuck."""

    def __init__(self, text: str, ranks: Iterable[int]) -> None:
        super().__init__(text)
        self.ranks = tuple(ranks)


class OutOfStep(LostRanks):
    """Two ranks do not start the same collective; the text is the whole verdict."""


EXIT_USER_ERROR = 2
"""The command cannot work as it was given."""
EXIT_LOST_RANKS = 3
"""Another rank is gone or stuck; the same command may work once its cause is mended."""
EXIT_INTERRUPTED = 130
_PATIENCE = 2.0


def leave(error: BaseException, rank: int) -> NoReturn:
    """Tell of an error as a program does that ends with it, and end the process at once: nothing is
    cleaned up, nobody waited for."""
    status: object = 1
    try:
        with reported(rank):
            raise error
    except SystemExit as told:
        status = told.code
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status if isinstance(status, int) else 1)


@contextmanager
def reported(rank: int = 0) -> Iterator[None]:
    """Turn an error of this module into its message on standard error and its exit status.

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
    except LostRanks as error:
        print(f"error: rank {rank}: {error}", file=sys.stderr, flush=True)
        raise SystemExit(EXIT_LOST_RANKS) from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        raise SystemExit(EXIT_INTERRUPTED) from None
