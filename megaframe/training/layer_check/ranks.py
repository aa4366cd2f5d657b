"""Processes of this machine that play the ranks of small layouts, one after the other."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from megaframe.config import RunConfig
from megaframe.extensions import load_extensions
from megaframe.io.ports import find_free_port

_TIMEOUT = 300.0
"""Seconds that ranks may take for one layout."""
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["megaframe.training.layer_check.parity"])


class RankFailure(Exception):
    """A rank ended with an error; its text is the end of the traceback."""


class RankPool:
    """Runs functions of a config on all ranks of its layout. Ranks that fail are ended, and the
    next call starts new ones."""

    def __init__(self, ranks: int, path: str | None, overrides: Sequence[str]) -> None:
        """Remember what to start; nothing is started yet.

        Args:
            ranks: The most ranks of a layout.
            path: Of the user's config, whose extensions each rank loads.
            overrides: Of the command line.
        """
        self._ranks, self._arguments = ranks, (path, list(overrides))
        self._ends: list[tuple[Connection, Any]] = []
        self._ports: dict[int, int] = {}

    def run(self, world: int, function: Callable[[RunConfig], Any], config: RunConfig) -> list[Any]:
        """Return function(config) of each rank.

        Raises:
            RankFailure: On some rank it raised an error, or it took too long.
        """
        if not self._ends:
            self._ports = {}
            self._ends = [self._start() for _ in range(self._ranks)]
        port = self._ports.setdefault(world, find_free_port())
        ends = [end for end, _ in self._ends[:world]]
        for rank, end in enumerate(ends):
            end.send((rank, world, port, function, config.model_dump(mode="json")))
        results: dict[int, Any] = {}
        while len(results) < world:
            waiting = [end for rank, end in enumerate(ends) if rank not in results]
            ready = wait(waiting, _TIMEOUT)
            for rank, end in enumerate(ends):
                if end not in ready:
                    continue
                is_right, value = pickle.loads(end.recv_bytes())
                if not is_right:
                    self.close()
                    raise RankFailure(value)
                results[rank] = value
            if not ready:
                self.close()
                raise RankFailure(f"no answer in {_TIMEOUT:g} s")
        return [results[rank] for rank in range(world)]

    def _start(self) -> tuple[Connection, Any]:
        own_end, other_end = _CONTEXT.Pipe()
        process = _CONTEXT.Process(target=_serve, args=(other_end, *self._arguments), daemon=True)
        process.start()
        return own_end, process

    def close(self) -> None:
        """End all processes."""
        for end, process in self._ends:
            end.close()
            process.kill()
            process.join()
        self._ends = []


def _serve(end: Connection, path: str | None, overrides: Sequence[str]) -> None:
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    load_extensions(path, overrides)
    while True:
        try:
            rank, world, port, function, keys = end.recv()
        except EOFError:
            return
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in place.items()})
        try:
            answer = pickle.dumps((True, function(RunConfig.model_validate(keys))))
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc().strip()))
        end.send_bytes(answer)
