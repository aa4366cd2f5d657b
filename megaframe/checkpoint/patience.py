"""Calls to a store that may be away for a while: tried again, and told without any secret.

What a library says of a request that failed may hold what it was signed with. So every error of a
store becomes an OSError here, with a text from which known secrets are taken out, and without the
error that it came from.
"""

from __future__ import annotations

import errno
import os
import random
import re
import time
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, TypeVar

import fsspec
from fsspec.spec import AbstractFileSystem

from megaframe.checkpoint.storage import Remote
from megaframe.errors import UserError

T = TypeVar("T")
PATIENCE = 120.0
"""Seconds for which a store that fails is asked again."""
FIRST_PAUSE, LAST_PAUSE = 0.25, 15.0
"""Seconds between two tries; the pause doubles, and varies so that ranks do not come at once."""
_LASTING = (
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
"""Errors that another try would meet again."""
_LASTING_NAMES = {"NoCredentialsError", "PartialCredentialsError", "ParamValidationError"}
"""The same of libraries that are not imported here."""
_SECRET = re.compile(r"secret|token|passw|credential|key|sas|auth", re.IGNORECASE)
"""In names of settings whose values are secrets."""
_SIGNED = re.compile(r"(AKIA|ASIA)[A-Z0-9]{12,}|((Signature|Credential|X-Amz-[A-Za-z-]+)=)[^\s&,]+")
"""What signed requests contain."""
_SHORTEST_SECRET = 6
_MAX_TEXT = 300


@cache
def _system(root: str) -> AbstractFileSystem:
    # One for all threads: fsspec's own cache has one for each, with connections of its own.
    system, _ = fsspec.core.url_to_fs(root)
    return system


def filesystem(found: Remote) -> tuple[AbstractFileSystem, str]:
    """The fsspec file system of a place, and its path there."""
    scheme, _, rest = found.url.partition("://")
    system = _system(f"{scheme}://{rest.partition('/')[0]}")
    return system, system._strip_protocol(found.url)


def require(found: Remote) -> None:
    """Raises UserError where nothing here knows the URL's scheme."""
    scheme = found.url.partition("://")[0]
    try:
        fsspec.get_filesystem_class(scheme)
    except ImportError as error:
        raise UserError(f"{found}: {error}; s3:// needs: pip install 'megaframe[cloud]'") from None
    except ValueError:
        known = [name for name in fsspec.available_protocols() if scheme[:2] == name[:2]]
        near = f"; known are {', '.join(known)}" if known else ""
        raise UserError(f"{found}: no store is known for {scheme}://{near}") from None


def patiently(found: Remote, act: Callable[[], T]) -> T:
    """The result of `act`, which asks the store of `found` and is called again while that fails
    with what may pass. Raises OSError."""
    start, pause, told = time.monotonic(), FIRST_PAUSE, False
    while True:
        try:
            return act()
        except Exception as error:
            cleaned = _cleaned(error, found)
            lasting = isinstance(error, _LASTING) or type(error).__name__ in _LASTING_NAMES
        if lasting or time.monotonic() + pause - start > PATIENCE:
            raise cleaned
        if not told:
            warnings.warn(
                f"{found}: {cleaned.strerror}; trying again for {PATIENCE:g} s", stacklevel=2
            )
            told = True
        time.sleep(pause * random.uniform(0.5, 1.0))
        pause = min(2 * pause, LAST_PAUSE)


def _cleaned(error: Exception, found: Remote) -> OSError:
    """An error of any library as one of the system, without secrets."""
    system, path = filesystem(found)
    number, text = errno.EIO, str(error)
    if isinstance(error, OSError):
        number, text = error.errno or number, error.strerror or text
    if isinstance(error, FileNotFoundError):
        number = errno.ENOENT
        if text.strip("/'\"") == path.strip("/"):  # fsspec says no more than which
            text = ""
    elif isinstance(error, PermissionError):
        number = errno.EACCES
    text = without_secrets(text.splitlines()[0] if text else os.strerror(number), system)
    return OSError(number, text[:_MAX_TEXT], str(found))  # of the subclass that the number has


def without_secrets(text: str, system: AbstractFileSystem) -> str:
    """The text without what the environment and the file system's settings hold of secrets."""
    secrets = {*_secrets(dict(os.environ)), *_secrets(system.storage_options)}
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, "***")
    return _SIGNED.sub(r"\2***", text)


def _secrets(settings: Any, known: bool = False) -> Iterator[str]:
    """Values under names of secrets, at any depth."""
    if isinstance(settings, dict):
        for name, value in settings.items():
            yield from _secrets(value, known or bool(_SECRET.search(str(name))))
    elif isinstance(settings, list | tuple):
        for value in settings:
            yield from _secrets(value, known)
    elif known and isinstance(settings, str) and len(settings) >= _SHORTEST_SECRET:
        yield settings
