"""Locks on the folders that a run writes, so that no two runs write the same one.

A lock is a small file, or object, that says which process has the folder. On the host of that
process it holds as long as the process lives. Elsewhere nobody can see whether it lives; there the
lock is a lease, which its process renews, and which has ended once it was not renewed for
`LEASE_SECONDS` seconds. Locks of the file system are not used for this, because network file
systems may lack them and object stores have none.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from threading import Event, Thread
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megaframe.checkpoint.stores.store import LOCK, LOCK_BYTES, StorePath, store_of
from megaframe.errors import UserError
from megaframe.io.process import has_ended, read_namespace, read_start_time

LEASE_SECONDS = 30.0
"""Seconds after its last renewal for which a lock holds on other hosts. Clocks of hosts that share
a folder must not differ by more."""
RENEWAL_SECONDS = 10.0
"""Seconds between two renewals of a lock."""
_POLL_SECONDS = 0.5
"""Seconds between two looks at a lock whose lease may end."""

_Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:\[\]/ -]{0,200}$")]
_Time = Annotated[float, Field(ge=0, le=253e9)]
"""Seconds since the epoch, of a year that can be printed."""


class LockHolder(BaseModel):
    """The process that has a folder, as its lock says.

    Attributes:
        namespace: In which the process id is valid (see `process.namespace`); empty if unknown.
        started: Clock ticks since boot; 0 if unknown.
        since, renewed: When the process took the lock, and renewed it last.
    """

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)

    host: _Word
    namespace: _Word
    process: Annotated[int, Field(gt=0, lt=1 << 31)]
    started: Annotated[int, Field(ge=0, lt=1 << 63)]
    since: _Time
    renewed: _Time

    @staticmethod
    def from_this_process() -> LockHolder:
        """Return this process as a holder from now on."""
        number, now = os.getpid(), time.time()
        start = read_start_time(number) or 0
        host = os.uname().nodename
        return LockHolder(
            host=host,
            namespace=read_namespace(),
            process=number,
            started=start,
            since=now,
            renewed=now,
        )

    def is_same_process(self, other: LockHolder) -> bool:
        """Return whether both are the same process."""
        identity = self.host, self.namespace, self.process, self.started
        return identity == (other.host, other.namespace, other.process, other.started)

    def can_be_seen_by(self, other: LockHolder) -> bool:
        """Return whether the other process can tell if this one has ended."""
        location = self.host, self.namespace
        return bool(self.namespace and self.started) and location == (other.host, other.namespace)

    def __str__(self) -> str:
        return f"process {self.process} on host {self.host}"


class RunLock:
    """The locks of one run, held by this process.

    Args:
        folders: By the config key that names each.
    """

    def __init__(self, folders: Mapping[str, StorePath]) -> None:
        self._folders = folders
        self._holder = LockHolder.from_this_process()
        self._created: dict[str, bool] = {}
        """By key of a folder that is locked, whether it was made for that."""
        self._lost_message = ""
        self._stop = Event()
        self._renewal_thread: Thread | None = None

    def take(self) -> list[str]:
        """Lock all folders, unless they are.

        If the lock of a process on another host may have ended, waits until that is certain.

        Returns:
            Lines to log about locks of ended processes.

        Raises:
            UserError: If another run has a folder, or a folder cannot be written.
        """
        if self._renewal_thread is not None:
            self.check()
            return []
        taken_over: dict[str, list[str]] = {}
        for key, folder in self._folders.items():
            try:
                previous_holder = self._take(key, folder)
            except OSError as error:
                path = error.filename or folder
                raise UserError(
                    f"cannot write {path}: {error.strerror}; set {key} to another folder"
                ) from None
            if previous_holder:
                taken_over.setdefault(previous_holder, []).append(f"{key}={folder}")
        self._renewal_thread = Thread(target=self._renew, name="megaframe-lock", daemon=True)
        self._renewal_thread.start()
        return [
            f"took over {' and '.join(folder_names)} from {previous_holder}"
            for previous_holder, folder_names in taken_over.items()
        ]

    def check(self) -> None:
        """Raise `UserError` if another run has taken a folder over, because this process was
        stopped for longer than a lease."""
        if self._lost_message:
            raise UserError(self._lost_message)

    def release(self) -> None:
        """Unlock all folders. Never raises."""
        self._stop.set()
        if self._renewal_thread is not None:
            self._renewal_thread.join(RENEWAL_SECONDS)  # a store that does not answer may delay it
        for key in reversed(self._created):
            folder = self._folders[key]
            with suppress(OSError, UserError):
                content, holder = _read_lock(key, folder)
                if holder is not None and holder.is_same_process(self._holder):
                    store_of(folder).compare_and_swap(folder / LOCK, content, None)
                if self._created[key] and isinstance(folder, Path):
                    folder.rmdir()  # fails if the run has written anything
        self._created.clear()

    def _take(self, key: str, folder: StorePath) -> str:
        """Lock one folder. Returns whose lock was taken over and why; empty if there was none."""
        store, previous_content = store_of(folder), b""
        created = not store.is_folder(folder)
        while True:
            content, holder = _read_lock(key, folder)
            if holder is None or holder.is_same_process(self._holder):
                reason = ""
            elif holder.can_be_seen_by(self._holder):
                if not has_ended(holder.process, holder.started):
                    raise _make_in_use_error(key, folder, holder)
                reason = f"{holder}, which has ended"
            else:
                if (
                    previous_content
                ):  # it was renewed, or taken by another process, while this one waited
                    raise _make_in_use_error(key, folder, holder)
                previous_content = content or b""
                if _wait_for_renewal(key, folder, previous_content, holder):
                    continue
                reason = f"{holder}, which has not renewed its lock for {LEASE_SECONDS:g} s"
            if store.compare_and_swap(folder / LOCK, content, self._record()):
                self._created[key] = created
                return reason

    def _record(self) -> bytes:
        return self._holder.model_copy(update={"renewed": time.time()}).model_dump_json().encode()

    def _renew(self) -> None:
        """Run the thread: renew the locks until they are released or lost."""
        while not self._stop.wait(RENEWAL_SECONDS) and not self._lost_message:
            for key, folder in self._folders.items():
                with suppress(OSError, UserError):  # the next renewal may succeed
                    self._renew_one(key, folder)

    def _renew_one(self, key: str, folder: StorePath) -> None:
        content, holder = _read_lock(key, folder)
        if holder is not None and not holder.is_same_process(self._holder):
            self._lost_message = (
                f"{key}={folder} was taken over by {holder}, because this process had not renewed "
                f"its lock for {LEASE_SECONDS:g} s; it ends, and leaves the folder to that run"
            )
        elif content is not None or store_of(folder).is_folder(folder):
            # A folder that was deleted gets its lock again once a save has made it again.
            store_of(folder).compare_and_swap(folder / LOCK, content, self._record())


def find_holder(folder: StorePath) -> LockHolder | None:
    """Return the process of this host that has a folder; None if there is none, or it has ended.

    Raises:
        UserError: What lies in the place of the lock is none.
    """
    _, holder = _read_lock("run.dir", folder)
    if holder is None or not holder.can_be_seen_by(LockHolder.from_this_process()):
        return None
    return None if has_ended(holder.process, holder.started) else holder


def _read_lock(key: str, folder: StorePath) -> tuple[bytes | None, LockHolder | None]:
    """Return the content of a folder's lock and what it says; None if there is no lock. Raises
    `UserError` if the file is not a lock, and OSError."""
    content = store_of(folder).read_small_file(folder / LOCK, LOCK_BYTES)
    if content is None:
        return None, None
    try:
        return content, LockHolder.model_validate_json(content)
    except ValidationError:
        raise UserError(
            f"{folder / LOCK} is not the lock of a run; delete it, or set {key} to another folder"
        ) from None


def _wait_for_renewal(key: str, folder: StorePath, content: bytes, holder: LockHolder) -> bool:
    """Wait until the lease of a lock has ended. Returns whether the lock has changed before."""
    # At most a lease by this clock, whatever the other host's clock says.
    seconds = min(LEASE_SECONDS, holder.renewed + LEASE_SECONDS - time.time())
    deadline = time.monotonic() + seconds
    if seconds > 0:
        print(
            f"{key}={folder} was locked by {holder}; waiting up to {seconds:.0f} s to see whether "
            "that is still running",
            file=sys.stderr,
            flush=True,
        )
    while time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        if store_of(folder).read_small_file(folder / LOCK, LOCK_BYTES) != content:
            return True
    return False


def _make_in_use_error(key: str, folder: StorePath, holder: LockHolder) -> UserError:
    since = datetime.fromtimestamp(holder.since, timezone.utc)
    return UserError(
        f"{key}={folder} is in use by another run: {holder} has it since {since:%Y-%m-%d %H:%M:%S} "
        f"UTC; end that run first, or give another {key}"
    )
