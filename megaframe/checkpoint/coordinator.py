"""Coordinates the ranks of a run during one save, through a store and without collectives.

Rank 0 leads. Another rank takes part in an attempt only if it is still open when first seen, and
the leader never ends an attempt before it has heard from every rank or has given up waiting.
Therefore keys that a dead run left in the store, even for the same step, cannot mislead any rank.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator
from typing import Any

from torch.distributed import Store

from megaframe.distributed.failure_verdict import compute_polling_interval
from megaframe.errors import UserError

Message = dict[str, Any]

NEED, WRITE, READ_BACK, EXPORT = "need", "write", "read back", "export"
"""Topics of the messages from every rank, in this order: the bytes that it needs, the outcome of
writing, of reading back, and of writing the checkpoint in another format."""
_FIRST_PAUSE, _LAST_PAUSE = 0.005, 0.25
"""Seconds between polls of the store; the pause doubles up to the last value."""
_PAUSE_PER_RANK = 0.002
"""The longest pause is at most this many seconds per rank: few ranks do not load the store much."""
_REQUESTS = 5
"""Requests of a rank that looks how far an attempt is."""


class SaveCoordinator:
    """One rank's part in the coordination of one save.

    No method waits for another rank except `collect_reports`, which polls, so that others can use
    the store in between.

    Args:
        store: The store of all ranks.
        step: Step of the save.
        rank: This rank; rank 0 leads.
        world: Number of ranks.
        timeout: Seconds to wait for the reports of all ranks.
    """

    def __init__(self, store: Store, *, step: int, rank: int, world: int, timeout: float) -> None:
        self._store = store
        self._step = step
        self._rank = rank
        self._world = world
        self._timeout = timeout

    def _make_key(self, *path: object) -> str:
        return "/".join(map(str, ("checkpoint", self._step, *path)))

    def _find(self, key: str) -> str | None:
        # `get` alone would block other users of the store until the key exists.
        return self._store.get(key).decode() if self._store.check([key]) else None

    def open_attempt(self) -> str:
        """Leader: open an attempt. Returns its id."""
        attempt = secrets.token_hex(4)
        self._store.set(self._make_key("attempt"), attempt)
        return attempt

    def read_latest_attempt(self) -> str | None:
        """Return the id of the attempt that was opened last, possibly by a dead run, or None."""
        return self._find(self._make_key("attempt"))

    def send_report(self, attempt: str, topic: str, message: Message) -> None:
        """Send this rank's message about a topic to the leader.

        Args:
            attempt: Id of the attempt at this save.
            topic: What the message is about: `NEED`, `WRITE`, `READ_BACK` or `EXPORT`.
            message: The report.
        """
        self._store.set(self._make_key(attempt, topic, self._rank), json.dumps(message))

    def collect_reports(self, attempt: str, topic: str) -> list[Message]:
        """Leader: wait for every rank's message.

        Raises:
            UserError: With the ranks that sent none in time.
        """
        keys = [self._make_key(attempt, topic, rank) for rank in range(self._world)]
        for _ in self.poll(self._timeout):
            if self._store.check(keys):
                return [json.loads(message) for message in self._store.multi_get(keys)]
        missing_ranks = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
        raise UserError(
            f"checkpoint of step {self._step} was abandoned after {self._timeout:g} s: no message "
            f"({topic}) from ranks {_format_ranks(missing_ranks)} of {self._world}"
        )

    def start_phase(self, attempt: str, phase: str) -> None:
        """Leader: let the ranks begin a phase, about which they report afterwards."""
        self._store.set(self._make_key(attempt, "go", phase), "")

    def has_started(self, attempt: str, phase: str) -> bool:
        """Return whether the leader has let the ranks begin a phase."""
        return self._find(self._make_key(attempt, "go", phase)) is not None

    def end_attempt(self, attempt: str, failure: str) -> None:
        """Leader: announce how the attempt ended (an empty `failure` is success), and delete its
        messages."""
        self._store.set(self._make_key(attempt, "end"), failure)
        for topic in (NEED, WRITE, READ_BACK, EXPORT):
            for rank in range(self._world):
                self._store.delete_key(self._make_key(attempt, topic, rank))

    def read_outcome(self, attempt: str) -> str | None:
        """Return how an attempt ended (empty: with success), or None if it has not ended."""
        return self._find(self._make_key(attempt, "end"))

    def poll(self, timeout: float) -> Iterator[None]:
        """Pace a loop that polls the store, until `timeout` seconds have passed."""
        deadline = time.monotonic() + timeout
        pause = _FIRST_PAUSE
        yield
        while time.monotonic() < deadline:
            time.sleep(pause)
            max_pause = min(_LAST_PAUSE, _PAUSE_PER_RANK * self._world)
            pause = min(2 * pause, compute_polling_interval(max_pause, _REQUESTS * self._world))
            yield


def _format_ranks(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" * (len(ranks) > 8))
