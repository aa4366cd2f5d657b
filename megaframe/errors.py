"""Errors whose text is the whole message: no traceback.

A `UserError` is a mistake that a user can fix; its text names what is wrong, both numbers, the
config key and the nearest valid values. `LostRanks` is the fault of another process. `NotFinite`
and `BadDevice` are verdicts of all ranks on a run. Each has its exit status, so that a launcher can
tell what may work on another try.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
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


class NotFinite(RuntimeError):
    """Losses or gradients stayed non-finite; weights are those of the last good step."""


class BadDevice(RuntimeError):
    """Replicas of the weights differ, and differ again after the way back to a checkpoint."""


EXIT_USER_ERROR = 2
"""The command cannot work as it was given."""
EXIT_LOST_RANKS = 3
"""Another rank is gone or stuck; the same command may work once its cause is mended."""
EXIT_NOT_FINITE = 5
"""Losses or gradients stayed non-finite; the same command would meet the same numbers."""
EXIT_BAD_DEVICE = 6
"""A device computes wrong weights; the same command may work without it."""
EXIT_INTERRUPTED = 130
_STATUS = {
    UserError: EXIT_USER_ERROR,
    NotFinite: EXIT_NOT_FINITE,
    BadDevice: EXIT_BAD_DEVICE,
}
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

    All ranks of a launch would report the same mistake. Ranks after the first wait, in which time
    the launcher ends them; the first rank of another node, which its launcher ends later, waits
    less long than its neighbours.
    """
    try:
        yield
    except (UserError, NotFinite, BadDevice) as error:
        if rank:
            time.sleep(_PATIENCE * (1 + (os.environ.get("LOCAL_RANK") != "0")))
        text = f"error: {f'rank {rank}: ' if rank else ''}{error}"
        print(text, file=sys.stderr, flush=True)
        _tell_launcher(text)
        status = next(status for kind, status in _STATUS.items() if isinstance(error, kind))
        raise SystemExit(status) from None
    except LostRanks as error:
        # Not told to the launcher: by its time it would stand before the rank that was lost.
        print(f"error: rank {rank}: {error}", file=sys.stderr, flush=True)
        raise SystemExit(EXIT_LOST_RANKS) from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        raise SystemExit(EXIT_INTERRUPTED) from None
    except Exception:
        _tell_launcher(traceback.format_exc())
        raise


def _tell_launcher(text: str) -> None:
    """Put a text into torchrun's summary, as torch's `record` does for exceptions."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
        with suppress(OSError), open(path, "w") as file:
            json.dump({"message": {"message": text, "extraInfo": extra}}, file)
