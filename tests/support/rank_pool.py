"""A persistent pool of worker processes that play the ranks of small worlds over gloo.

Workers are forked from a server that has imported torch and run nothing, so a world costs
milliseconds, not the seconds of an import.
"""

import gc
import multiprocessing
import os
import pickle
import socket
import traceback
from collections import defaultdict
from contextlib import closing

_TIMEOUT = 120.0
RARELY = 50_000
"""New objects between two garbage collections. With 700, they took a seventh of the time."""
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "torch._dynamo", "megaframe.training.trainer"])
# torch imports _dynamo in the first step, which would take each process a second.


class Pool:
    """run(world, function, *args) -> [function(*args) on rank 0, on rank 1, ...].

    `function` is importable. In it, `Mesh` finds its rank as under torchrun.
    """

    def __init__(self, workers):
        self._workers = workers
        self._begin()

    def _begin(self):
        self._ports = defaultdict(free_port)
        """Port for each size of a world. Ranks connect once, and keep the connection for later
        worlds of that size."""
        self._ends = [self._start() for _ in range(self._workers)]

    def _start(self):
        parent_end, child_end = CONTEXT.Pipe()
        process = CONTEXT.Process(target=_serve, args=(child_end,), daemon=True)
        process.start()
        return parent_end, process

    def run(self, world, function, *args):
        try:
            return self._run(world, function, *args)
        except BaseException:
            self.close()  # leftovers of a failed world would disturb the next
            self._begin()
            raise

    def _run(self, world, function, *args):
        for rank, (end, _) in enumerate(self._ends[:world]):
            end.send((rank, world, self._ports[world], function, args))
        results = []
        for rank, (end, _) in enumerate(self._ends[:world]):
            if not end.poll(_TIMEOUT):
                raise TimeoutError(f"rank {rank} of {world} gave no answer in {_TIMEOUT} s")
            results.append(pickle.loads(end.recv_bytes()))
        failures = [text for good, text in results if not good]
        if failures:
            raise AssertionError("\n".join(failures))
        return [value for _, value in results]

    def close(self):
        for end, process in self._ends:
            end.close()
            process.kill()
            process.join()


def _serve(end):
    gc.freeze()  # imported objects are not collected
    gc.set_threshold(RARELY)
    while True:
        try:
            rank, world, port, function, args = end.recv()
        except EOFError:
            return
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(world),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
        try:
            # Pickled here, because torch would send each tensor as a file in shared memory.
            answer = pickle.dumps((True, function(*args)))
        except BaseException:
            answer = pickle.dumps((False, f"rank {rank} of {world}:\n{traceback.format_exc()}"))
        end.send_bytes(answer)
        del answer
        gc.collect()  # cycles keep a world's connections, threads and buffers alive
        gc.freeze()  # what remains was imported since


def free_port():
    with closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
