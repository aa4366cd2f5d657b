"""Errors that are reported by their text alone, without a traceback.

A `UserError` is a mistake that a user can fix. Its text says what is wrong, with both numbers, the
config key and the nearest valid values. `LostRanks` is the fault of another process. On `NotFinite`
and `BadDevice` all ranks have agreed. Each error has its own exit status, from which a launcher can
tell whether another try may succeed. The functions at the end find the nearest valid values.
"""

from __future__ import annotations

import errno
import io
import json
import os
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from math import isqrt
from pathlib import Path
from typing import NoReturn

from megaframe.io.regular_file import write_file
from megaframe.io.untrusted import sanitize_text

_LONGEST_MESSAGE = 1 << 16
"""Characters; the longest honest ones list a hundred mistakes."""


class UserError(Exception):
    """A mistake in a config, a file or a command line; its text is the whole message, without the
    secrets and control characters of what it quotes."""

    def __init__(self, text: str) -> None:
        shown = sanitize_text(text)
        if len(shown) > _LONGEST_MESSAGE:
            shown = f"{shown[:_LONGEST_MESSAGE]} ... ({len(shown):,} characters)"
        super().__init__(shown)


class UnreadableFile(UserError):
    """A file is damaged or cannot be read; an earlier checkpoint may be used instead."""


class LostRanks(RuntimeError):
    """Communication failed or timed out; one of `ranks` may be dead or stuck."""

    def __init__(self, text: str, ranks: Iterable[int]) -> None:
        super().__init__(text)
        self.ranks = tuple(ranks)


class CollectiveMismatch(LostRanks):
    """Two ranks do not start the same collective; the text needs no further diagnosis."""


class NotFinite(RuntimeError):
    """Losses or gradients stayed non-finite. The weights are those of the last good step."""


class BadDevice(RuntimeError):
    """Replicas of the weights differ, and differed again after a return to a checkpoint."""


TIMES = " \N{MULTIPLICATION SIGN} "
"""Between the factors of a product in a message."""

EXIT_USER_ERROR = 2
"""The command cannot work as given."""
EXIT_LOST_RANKS = 3
"""Another rank is gone or stuck; the same command may work once the cause is fixed."""
EXIT_NOT_FINITE = 5
"""Losses or gradients stayed non-finite; the same command would meet the same numbers."""
EXIT_BAD_DEVICE = 6
"""A device computes wrong weights; the same command may work without that device."""
EXIT_INTERRUPTED = 130
_STATUS = {UserError: EXIT_USER_ERROR, NotFinite: EXIT_NOT_FINITE, BadDevice: EXIT_BAD_DEVICE}
_REPORT_DELAY = 2.0
_SEEN_DELAY = 1.0
"""Seconds in which the neighbours of a rank see that it has reported. Once it ends, torchrun ends
them, and lists each as a failure too."""
_MAX_NAME = 200
_BAD_NAMES = (errno.ENAMETOOLONG, errno.ELOOP, errno.EISDIR, errno.ENOTDIR, errno.EILSEQ)
"""Errors that only another name of a file can mend."""


def report_and_exit(error: BaseException, rank: int) -> NoReturn:
    """Report an error as a program would that ends with it (see `report_errors`), and end the
    process at once with the same exit status, without any cleanup and without waiting for other
    ranks."""
    status: object = 1
    try:
        with report_errors(rank):
            raise error
    except SystemExit as system_exit:
        status = system_exit.code
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status if isinstance(status, int) else 1)


@contextmanager
def report_errors(rank: int = 0) -> Iterator[None]:
    """Return a context that turns an error of this module into its message on standard error and
    its exit status.

    All ranks of a launch would report the same mistake. Therefore all ranks but the first wait
    before they report, and the launcher normally ends them meanwhile. On other nodes, whose
    launchers end their ranks later, the first local rank waits less than its neighbours, so that it
    alone reports. Under torchrun the neighbours see in its error file that it reports what they
    would, and leave with status 0, because torchrun prints seven lines for each other status.

    Args:
        rank: This rank of the launch.

    Raises:
        SystemExit: In place of the error.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as standard error does
    try:
        with _check_file_names():
            yield
    except (UserError, NotFinite, BadDevice) as error:
        if rank and _wait_to_report(str(error)):
            raise SystemExit(0) from None
        text = f"error: {f'rank {rank}: ' if rank else ''}{error}"
        print(text, file=sys.stderr, flush=True)
        _report_to_launcher(text)
        status = next(status for kind, status in _STATUS.items() if isinstance(error, kind))
        if os.environ.get("LOCAL_RANK") == "0" and _find_error_file_of_first() is not None:
            time.sleep(_SEEN_DELAY)
        raise SystemExit(status) from None
    except LostRanks as error:
        # Not reported to the launcher: it lists failures by time, and this one is earlier than
        # that of the lost rank.
        print(f"error: rank {rank}: {error}", file=sys.stderr, flush=True)
        raise SystemExit(EXIT_LOST_RANKS) from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        raise SystemExit(EXIT_INTERRUPTED) from None
    except Exception:
        _report_to_launcher(traceback.format_exc())
        raise


@contextmanager
def _check_file_names() -> Iterator[None]:
    """Return a context that turns errors about names that no file can have into UserErrors."""
    try:
        yield
    except OSError as error:
        if error.errno not in _BAD_NAMES or error.filename is None:
            raise
        raise UserError(f"{str(error.filename)[:_MAX_NAME]}: {error.strerror}") from None


def _wait_to_report(text: str) -> bool:
    """Give the first rank, or the first on this node, time to report. Returns whether the latter
    has reported a text."""
    is_first_here = os.environ.get("LOCAL_RANK") == "0"
    end = time.monotonic() + _REPORT_DELAY * (1 if is_first_here else 2)
    file = None if is_first_here else _find_error_file_of_first()
    while (remaining := end - time.monotonic()) > 0:
        with suppress(OSError, ValueError, TypeError, KeyError):
            if file is not None and json.loads(file.read_text())["message"]["message"].endswith(
                text
            ):
                return True
        time.sleep(min(remaining, 0.05))
    return False


def _find_error_file_of_first() -> Path | None:
    """Return where torchrun expects the error of the first of several ranks on this node: its
    folder has one for each local rank. None without a torchrun."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not file or os.environ.get("LOCAL_WORLD_SIZE", "1") == "1":
        return None
    return Path(file).parent.parent / "0" / Path(file).name


@contextmanager
def explain_failed_listen(host: str, port: int) -> Iterator[None]:
    """Raise a `UserError` for what fails when a server is made that listens at an address."""
    try:
        yield
    except (OSError, OverflowError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "no such address"
        raise UserError(
            f"cannot listen on {host}:{port}: {why}; choose another --port or --host"
        ) from None


@contextmanager
def explain_failed_write(path: object) -> Iterator[None]:
    """Return a context in which a file is written, whose errors say only that and why not.

    Args:
        path: The file.

    Raises:
        UserError: In place of an OSError.
    """
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from None


def _report_to_launcher(text: str) -> None:
    """Put a text into torchrun's failure summary, as torch's `record` does for exceptions."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
        with suppress(OSError):
            write_file(path, json.dumps({"message": {"message": text, "extraInfo": extra}}))


def list_divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of a positive number, ascending; above 10^12 some may be missing."""
    # Bounded, so that a message about an absurd size does not take minutes.
    small = [d for d in range(1, min(isqrt(number), 10**6) + 1) if number % d == 0]
    return tuple(sorted({*small, *(number // d for d in small)}))


def find_nearest_divisors(number: int, target: int) -> str:
    """Return the divisors of `number` closest to `target` on each side, for a message: `4 or 8`."""
    valid = list_divisors(number)
    below = [d for d in valid if d <= target][-1:]
    above = [d for d in valid if d > target][:1]
    return join_or(below + above)


def find_nearest_multiples(number: int, target: int) -> str:
    """Return the positive multiples of `number` closest to `target`, for a message: `6 or 12`."""
    below = target // number * number
    valid = [below] if below == target else [below, below + number]
    return join_or(n for n in valid if n > 0)


def join_or(values: Iterable[object]) -> str:
    """Join values as `a, b or c`."""
    *first, last = [str(value) for value in values]
    return f"{', '.join(first)} or {last}" if first else last
