"""Regular files, opened and written so that nothing else is read, written or waited for.

A folder that somebody else has made can contain links to anything, pipes and devices. What lies
below `inside` is therefore reached folder by folder, from one open descriptor to the next, and no
link on the way is followed: nothing can change between a check and its use. The path of `inside`
itself is the user's, and may contain links.

Files are written anew beside the old ones and renamed over them. Only what grows (logs) or is
continued (token files) is opened as it is.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, TypeAlias

Name: TypeAlias = "str | os.PathLike[str]"

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL
_LINK = "A symbolic link, which is not followed"
_NO_FILE = "Not a regular file"
_LONGEST_NAME = 200
"""Bytes of a name that are kept in a temporary name; file systems take 255."""


def open_regular(path: Name, inside: Name | None = None) -> int:
    """Open a regular file for reading and return its descriptor.

    Args:
        path: The file.
        inside: A folder above it, below which no link is followed; None follows all links.

    Raises:
        OSError: With a `strerror` for users, also for pipes, devices, folders, and names that no
            file can have.
    """
    if inside is None:
        return _open(path, os.O_RDONLY, path, None)
    with _open_folder_of(path, inside) as (folder, name):
        return _open(path, os.O_RDONLY | os.O_NOFOLLOW, name, folder)


def open_append(path: Name, buffering: int = -1, *, inside: Name | None = None) -> BinaryIO:
    """Open a file to append to it.

    Args:
        path: The file; it is made if it is missing. A link is not followed.
        buffering: As of `open`.
        inside: A folder above it, below which no link is followed and missing folders are made.

    Raises:
        OSError: As `open_regular`.
    """
    with _open_folder_of(path, inside, make=True) as (folder, name):
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
        return open(_open(path, flags, name, folder), "ab", buffering)


def open_update(path: Name, *, inside: Name | None = None) -> BinaryIO:
    """Open a file to read and change it in place; otherwise as `open_append`."""
    with _open_folder_of(path, inside, make=True) as (folder, name):
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        return open(_open(path, flags, name, folder), "r+b")


def open_fresh(path: Name, *, inside: Name | None = None) -> BinaryIO:
    """Open a new file under its final name, for what others read while it is written; otherwise as
    `open_append`. What had this name is removed, unless it is a folder."""
    with _open_folder_of(path, inside, make=True) as (folder, name):
        with suppress(FileNotFoundError), _name_errors(path, name, folder):
            os.unlink(name, dir_fd=folder)
        return open(_open(path, _NEW, name, folder), "wb")


def write_file(
    path: Name, content: bytes | str, *, inside: Name | None = None, sync: bool = False
) -> None:
    """Write a whole file, text as UTF-8, as `replace_file` does."""
    with replace_file(path, inside=inside, sync=sync) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def replace_file(
    path: Name, *, inside: Name | None = None, sync: bool = False
) -> Iterator[BinaryIO]:
    """Return a context with a new file, which replaces the one at `path` when the context ends; an
    exception leaves that as it was. Nobody sees a part of it.

    Args:
        path: The file.
        inside: A folder above it, below which no link is followed and missing folders are made.
            There a link at `path` is replaced. Without it a link at `path` is the user's
            (/dev/stdout is one), and refused.
        sync: Whether to wait until the content is on the disk.

    Raises:
        OSError: As `open_regular`, or if a pipe, a device or a folder has this name.
    """
    with _open_folder_of(path, inside, make=True) as (folder, name):
        _refuse_odd_target(path, name, folder, refuse_links=inside is None)
        start = os.fsdecode(os.fsencode(name)[:_LONGEST_NAME])
        temporary = f"{start}.{secrets.token_hex(8)}.tmp"
        descriptor = _open(path, _NEW, temporary, folder)
        try:
            with open(descriptor, "wb") as file:
                yield file
                file.flush()
                if sync:
                    os.fsync(descriptor)
            with _name_errors(path, name, folder):
                os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary, dir_fd=folder)
            raise


def make_folder(path: Name, *, inside: Name | None = None) -> None:
    """Make a folder and those between it and `inside`, as far as they are missing.

    Args:
        path: The folder.
        inside: A folder above it, below which no link is followed; by default the one it is in.

    Raises:
        OSError: If it cannot be made, or is something else, also a link to a folder.
    """
    top = Path(path).parent if inside is None else Path(inside)
    with _open_folder(Path(path), top, make=True):
        pass


def list_folder(path: Name, *, inside: Name | None = None) -> list[str]:
    """Return the names in a folder, which `make_folder` would have made."""
    top = Path(path).parent if inside is None else Path(inside)
    with _open_folder(Path(path), top) as folder:
        return os.listdir(folder)


def delete_file(path: Name, *, inside: Name | None = None) -> None:
    """Delete a file, or a link instead of what it leads to, if there is one.

    Args:
        path: The file.
        inside: A folder above it, below which no link is followed.
    """
    with (
        suppress(FileNotFoundError),
        _open_folder_of(path, inside) as (folder, name),
        _name_errors(path, name, folder),
    ):
        os.unlink(name, dir_fd=folder)


@contextmanager
def _open_folder_of(
    path: Name, inside: Name | None, *, make: bool = False
) -> Iterator[tuple[int, str]]:
    """Return a context with the descriptor of the folder of a file, and the file's name there.

    Args:
        path: The file.
        inside: See `_open_folder`; by default the file's own folder, which must exist.
        make: See `_open_folder`.
    """
    file = Path(path)
    top = file.parent if inside is None else Path(inside)
    if file.name in ("", ".."):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    with _open_folder(file.parent, top, make=make and inside is not None) as folder:
        yield folder, file.name


@contextmanager
def _open_folder(path: Path, inside: Path, *, make: bool = False) -> Iterator[int]:
    """Return a context with the descriptor of a folder.

    Args:
        path: The folder.
        inside: The same folder, or one above it, below which no link is followed.
        make: Whether to make the folders below `inside` that are missing.
    """
    parts = path.relative_to(inside).parts
    if ".." in parts:
        raise OSError(errno.EINVAL, f"Outside of {inside}", os.fspath(path))
    with _name_errors(inside, inside, None):
        descriptor = os.open(inside, _FOLDER)
    try:
        for part in parts:
            with _name_errors(path, part, descriptor):
                if make:
                    with suppress(FileExistsError):
                        os.mkdir(part, dir_fd=descriptor)
                inner = os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = inner
        yield descriptor
    finally:
        os.close(descriptor)


def _open(path: Name, flags: int, name: Name, folder: int | None) -> int:
    """Open `name` in a folder if it is a regular file. path: what messages call it."""
    # Without O_NONBLOCK, opening a pipe waits for somebody at its other end.
    flags |= os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK
    with _name_errors(path, name, folder):
        descriptor = os.open(name, flags, 0o666, dir_fd=folder)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    raise OSError(errno.EINVAL, _NO_FILE, os.fspath(path))


def _refuse_odd_target(path: Name, name: str, folder: int, *, refuse_links: bool) -> None:
    """Refuse to rename a file over what is none: as root, that would replace even /dev/null."""
    try:
        with _name_errors(path, name, folder):
            mode = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return
    if stat.S_ISLNK(mode):
        if refuse_links:
            raise OSError(errno.ELOOP, _LINK, os.fspath(path))
    elif not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, _NO_FILE, os.fspath(path))


@contextmanager
def _name_errors(path: Name, name: Name, folder: int | None) -> Iterator[None]:
    """Return a context whose errors name `path`, and say so if `name` in a folder is a link."""
    try:
        yield
    except ValueError:
        shown = os.fspath(path).encode("unicode_escape").decode()
        raise OSError(errno.EINVAL, "No file can have this name", shown) from None
    except OSError as error:
        reason = error.strerror
        if folder is not None and error.errno in (errno.ELOOP, errno.ENOTDIR):
            with suppress(OSError):
                mode = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
                reason = _LINK if stat.S_ISLNK(mode) else reason
        raise OSError(error.errno, reason, os.fspath(path)) from None
