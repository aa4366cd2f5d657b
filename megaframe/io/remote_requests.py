"""Retries requests to a store that may be temporarily unavailable, and keeps secrets out of errors.

A library's message about a failed request may contain the credentials that signed it. Therefore
every error of a store is turned into an OSError whose text has known secrets removed. The original
error is not chained to it.
"""

from __future__ import annotations

import errno
import os
import random
import time
import warnings
from collections.abc import Callable
from functools import cache
from typing import TypeVar

import fsspec
from fsspec.spec import AbstractFileSystem

from megaframe.io.remote_path import RemotePath
from megaframe.io.untrusted import mask_secrets

T = TypeVar("T")
RETRY_SECONDS = 120.0
"""Seconds for which a failing request is repeated."""
FIRST_PAUSE, LAST_PAUSE = 0.25, 15.0
"""Seconds between two attempts. The pause doubles, and is random so that ranks do not retry at the
same moment."""
_PERMANENT_ERRORS = (
    FileNotFoundError,
    PermissionError,
    FileExistsError,
    IsADirectoryError,
    NotADirectoryError,
    ImportError,
    LookupError,
    NotImplementedError,
    TypeError,
    ValueError,
)
"""Errors that would occur again, so the request is not repeated."""
_PERMANENT_ERROR_NAMES = {"NoCredentialsError", "PartialCredentialsError", "ParamValidationError"}
"""Names of such errors in libraries that are not imported here."""
_PERMANENT_STATUSES = {400, 401, 403, 404, 405, 410, 416}
"""Answers of a server of HTTP that would be given again."""
_MAX_MESSAGE_CHARS = 300


@cache
def _open_filesystem(root: str) -> AbstractFileSystem:
    # Shared by all threads; fsspec's own cache makes one per thread, each with its connections.
    system, _ = fsspec.core.url_to_fs(root)
    return system


def open_filesystem(path: RemotePath) -> tuple[AbstractFileSystem, str]:
    """Return the fsspec file system of a path, and the path in it."""
    scheme, _, location = path.url.partition("://")
    system = _open_filesystem(f"{scheme}://{location.partition('/')[0]}")
    return system, system._strip_protocol(path.url)


def find_scheme_mistake(path: RemotePath) -> str | None:
    """Return why a URL's scheme cannot be used: it is unknown, or its library is missing."""
    scheme = path.url.partition("://")[0]
    try:
        fsspec.get_filesystem_class(scheme)
    except ImportError as error:
        return f"{path}: {error}; URLs need: pip install 'megaframe[cloud]'"
    except ValueError:
        similar = [name for name in fsspec.available_protocols() if scheme[:2] == name[:2]]
        suggestion = f"; known are {', '.join(similar)}" if similar else ""
        return f"{path}: no store is known for {scheme}://{suggestion}"
    return None


def retry_request(path: RemotePath, request: Callable[[], T], seconds: float | None = None) -> T:
    """Return the result of `request`, which accesses the store of `path`.

    Args:
        path: Of what is accessed, for messages.
        request: If it fails with an error that may be temporary, it is called again.
        seconds: For how long; None: for `RETRY_SECONDS`.

    Raises:
        OSError: If the error is permanent or the time is over. Its text contains no secret.
    """
    limit = RETRY_SECONDS if seconds is None else seconds
    start, pause, warned = time.monotonic(), FIRST_PAUSE, False
    while True:
        try:
            return request()
        except Exception as error:
            cause = _find_cause(error)
            cleaned, is_permanent = _clean_error(cause, path), _is_permanent(cause)
        if is_permanent or time.monotonic() + pause - start > limit:
            raise cleaned
        if not warned:
            warnings.warn(f"{path}: {cleaned.strerror}; trying again for {limit:g} s", stacklevel=2)
            warned = True
        time.sleep(pause * random.uniform(0.5, 1.0))
        pause = min(2 * pause, LAST_PAUSE)


def _find_cause(error: Exception) -> Exception:
    """Return why a request failed: fsspec finds no file under HTTP whatever the server did."""
    cause = error.__cause__
    of_http = isinstance(cause, TimeoutError) or type(cause).__module__.startswith("aiohttp")
    if isinstance(error, FileNotFoundError) and isinstance(cause, Exception) and of_http:
        return error if _find_status(cause) == 404 else cause
    return error


def _is_permanent(error: Exception) -> bool:
    return (
        isinstance(error, _PERMANENT_ERRORS)
        or type(error).__name__ in _PERMANENT_ERROR_NAMES
        or _find_status(error) in _PERMANENT_STATUSES
    )


def _find_status(error: Exception) -> int | None:
    """Return the status of HTTP in an error of aiohttp, gcsfs, or httpx; None: it has none."""
    answer = getattr(error, "response", None)
    for owner, name in ((error, "status"), (error, "code"), (answer, "status_code")):
        if isinstance(found := getattr(owner, name, None), int):
            return found
    return None


def _clean_error(error: Exception, remote_path: RemotePath) -> OSError:
    """Turn an error of any library into an OSError without secrets."""
    system, path = open_filesystem(remote_path)
    number, text = errno.EIO, str(error)
    if isinstance(error, OSError):
        number, text = error.errno or number, error.strerror or text
    if isinstance(error, FileNotFoundError):
        number = errno.ENOENT
        if text.strip("/'\"") == path.strip("/"):  # fsspec gives only the path
            text = ""
    elif isinstance(error, PermissionError):
        number = errno.EACCES
    text = text.splitlines()[0] if text else os.strerror(number)
    text = mask_secrets(text, dict(os.environ), system.storage_options)
    return OSError(
        number, text[:_MAX_MESSAGE_CHARS], str(remote_path)
    )  # becomes the subclass for this errno
