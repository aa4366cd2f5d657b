"""Processes of this machine that play the ranks of small worlds over gloo, one after the other.

They are forked from a server that has imported torch and runs nothing, so a world costs
milliseconds, not the seconds of an import.
"""

from __future__ import annotations

import gc
import io
import multiprocessing
import os
import pickle
import traceback
from collections import defaultdict
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch import Tensor

from megaframe.config.registry import get_registry, use_registry
from megaframe.io.local_rendezvous import find_free_port, make_rank_environment

RARELY = 50_000
"""New objects between two garbage collections. With 700, they took a seventh of the time of small
worlds."""
_FOLLOWING_SECONDS = 1.0
"""How long after a failure those of other ranks are waited for."""
FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(["megaframe.training.trainer", "megaframe.training.rank_pool"])


class RankFailure(Exception):
    """Ranks ended with an error, or gave no answer.

    Attributes:
        failures: The traceback by rank, of those that failed soon after the first.
    """

    def __init__(self, failures: Mapping[int, str]) -> None:
        super().__init__("\n".join(f"rank {rank}: {text}" for rank, text in failures.items()))
        self.failures = failures


class RankPool:
    """Runs functions on the ranks of small worlds. If ranks fail, all are ended, because what they
    leave would disturb the next world; the next call starts new ones."""

    def __init__(
        self, ranks: int, prepare: Callable[[], object] | None = None, timeout: float = 300.0
    ) -> None:
        """Remember what to start; nothing is started yet.

        Args:
            ranks: The most ranks of a world.
            prepare: Called once in each process; importable, like all functions that are run.
            timeout: Seconds that ranks may take for one call.
        """
        self._ranks, self._prepare, self._timeout = ranks, prepare, timeout
        self._ends: list[tuple[Connection, Any]] = []
        self._ports: dict[int, int] = {}

    def run(self, world: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Return function(*arguments) of each rank of a world. In it, `Mesh` finds its rank as
        under torchrun.

        Raises:
            RankFailure: On some rank it raised an error, or it took too long.
        """
        try:
            return self._run(world, pickle.dumps((function, arguments)))
        except BaseException:
            self.close()
            raise

    def _run(self, world: int, call: bytes) -> list[Any]:
        if not self._ends:
            # Ranks connect once, and keep the connection for later worlds of that size.
            self._ports = defaultdict(find_free_port)
            self._ends = [self._start() for _ in range(self._ranks)]
        rank_of_end = {end: rank for rank, (end, _) in enumerate(self._ends[:world])}
        for end, rank in rank_of_end.items():
            end.send((make_rank_environment(rank, world, self._ports[world]), call))
        answers: dict[int, tuple[bool, Any]] = {}
        failures: dict[int, str] = {}
        while len(answers) < world:
            open_ends = [end for end, rank in rank_of_end.items() if rank not in answers]
            # The first to fail may only have lost the rank that is at fault.
            ready = wait(open_ends, _FOLLOWING_SECONDS if failures else self._timeout)
            if not ready:
                if not failures:
                    silent = (rank_of_end[end] for end in open_ends)
                    failures = dict.fromkeys(silent, f"no answer in {self._timeout:g} s")
                raise RankFailure(failures)
            answers |= {rank_of_end[end]: _receive(end) for end in open_ends if end in ready}
            failures = {
                rank: value for rank, (is_right, value) in sorted(answers.items()) if not is_right
            }
        if failures:
            raise RankFailure(failures)
        return [answers[rank][1] for rank in range(world)]

    def _start(self) -> tuple[Connection, Any]:
        own_end, other_end = FORKSERVER.Pipe()
        process = FORKSERVER.Process(target=_serve, args=(other_end, self._prepare), daemon=True)
        process.start()
        other_end.close()  # so that the end of the process is seen
        return own_end, process

    def close(self) -> None:
        """End all processes."""
        for end, process in self._ends:
            end.close()
            process.kill()
            process.join()
        self._ends = []


class _Pickler(pickle.Pickler):
    """Pickles tensors as their bytes. Torch would send each as a file in shared memory, and its own
    format takes many times as long as that of a small tensor should."""

    def reducer_override(self, value: Any) -> Any:
        is_plain = type(value) is Tensor and value.layout == torch.strided
        if not is_plain or value.device.type != "cpu" or value.requires_grad:
            return NotImplemented
        content = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return _make_tensor, (bytearray(content), value.dtype, tuple(value.shape))


def _make_tensor(content: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return the tensor of these bytes."""
    if not content:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(content, dtype=torch.uint8).view(dtype).reshape(shape)


def _pickle_answer(answer: tuple[bool, Any]) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer).dump(answer)
    return buffer.getvalue()


def _receive(end: Connection) -> tuple[bool, Any]:
    """Return whether a rank is right, and its result or what it raised."""
    try:
        answer: tuple[bool, Any] = pickle.loads(end.recv_bytes())
    except (EOFError, OSError):
        return False, "its process has ended"
    return answer


def _serve(end: Connection, prepare: Callable[[], object] | None) -> None:
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    gc.freeze()  # imported objects are not collected
    gc.set_threshold(RARELY)
    if prepare is not None:
        prepare()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # as torchrun does: ranks share the cores
    # A call may load extensions or ask for deterministic algorithms; the next starts without them.
    registry, debug_mode = get_registry(), torch.get_deterministic_debug_mode()
    while True:
        try:
            environment, call = end.recv()
        except EOFError:
            return
        os.environ.update(environment)
        try:
            function, arguments = pickle.loads(call)
            with use_registry(registry.copy()):
                answer = _pickle_answer((True, function(*arguments)))
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc().strip()))
        end.send_bytes(answer)
        del answer
        # The other setter imports torch's compiler first, which takes a second.
        torch.set_deterministic_debug_mode(debug_mode)
        gc.collect()  # cycles keep a world's connections, threads and buffers alive
        gc.freeze()  # what remains was imported since
