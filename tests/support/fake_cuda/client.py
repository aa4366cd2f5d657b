"""Calls functions on ranks with stand-ins for GPUs, and reads what was reported to them.

A run is free of problems if nothing but waits of the host is reported, and these only where a run
may wait. What the hosts of a world have called must come to an end by NCCL's rules as well
(`nccl_rules.py`).
"""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

from fake_cuda.build import build_library
from fake_cuda.nccl_rules import simulate
from megaframe.io.local_rendezvous import find_free_port

ROOT = Path(__file__).resolve().parents[3]
PLAIN = {f"kernels__{key}": "reference" for key in ("elementwise", "attention", "loss", "update")}
SMALL = {
    **{"train__seq": 8, "train__global_batch": 4, "train__microbatch": 2},
    **{"train__steps": 3, "train__eval_samples": 4},
}
MAY_WAIT = {
    "initialize_weights": "initial weights are drawn on the host",
    "begin": "optimizer state is made at the start",
    "_get_frequencies_on": "rotary frequencies are computed on the host, once",
    "_can_accumulate_wide": "tries a product, once",
    "_check_size": "the ranks of a communicator, when it is made",
    "_sum_totals": "the totals of an evaluation",
    "_compare_with_previous_loss": "the first loss after a load",
    "_save": "the loss and the norm in a checkpoint",
    "_load": "a checkpoint",
    "load_tensors": "a checkpoint",
    "restore": "ranks agree on the checkpoint to resume from",
}
"""Functions in which the host may wait for the device, and for what."""


class FakeCuda:
    """run(function, *words) calls a function on the ranks of a world; `reports` is what was
    reported to them, in order: kind, text and place; `calls` is what each rank has called."""

    def __init__(self, folder):
        paths = (ROOT, ROOT / "kernels", ROOT / "tests/support", *sys.path)
        variables = {"FAKE_CUDA_LIBRARY": str(build_library()), "FAKE_CUDA_DEVICES": "4"}
        environment = {**os.environ, **variables, "PYTHONPATH": os.pathsep.join(map(str, paths))}
        self._folder, self._runs = folder, 0
        self._server = subprocess.Popen(
            [sys.executable, "-m", "fake_cuda.fake_server"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, function, *words, world=1, fails=False):
        """Call a function, given as module:name, with a command line. fails: it may."""
        self._runs += 1
        folder = self._folder / str(self._runs)
        folder.mkdir()
        request = {"function": function, "words": words, "world": world, "port": find_free_port()}
        self._server.stdin.write(json.dumps({**request, "folder": str(folder)}) + "\n")
        self._server.stdin.flush()
        statuses = json.loads(self._server.stdout.readline())
        output = "".join(path.read_text() for path in sorted(folder.glob("*.log")))
        assert fails or statuses == [0] * world, output
        lines = [path.read_text().splitlines() for path in sorted(folder.glob("*.jsonl"))]
        self.statuses, self.failed = statuses, statuses != [0] * world
        if not self.failed:
            recordings = zip(*map(read_calls, sorted(folder.glob("*.calls"))), strict=True)
            self.calls, queues = recordings
            simulate(self.calls, min(queues))
        self.reports = [tuple(json.loads(line)) for part in lines for line in part]
        return output

    def list_kinds(self):
        """Return the kinds of what was reported, without repeats."""
        return {kind for kind, _, _ in self.reports}

    def close(self):
        self._server.stdin.close()
        self._server.wait()
        self._server.stdout.close()


def read_calls(path):
    return pickle.loads(path.read_bytes())


def assert_no_problem(fake_gpu, waits=()):
    """waits: further functions in which the host may wait."""
    for kind, text, place in fake_gpu.reports:
        functions = {function.partition(":")[2] for function in place.split(" < ")}
        assert kind == "wait" and functions & {*MAY_WAIT, *waits}, (kind, text, place)
