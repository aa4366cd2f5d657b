"""Runs functions on the ranks of a stand-in: reads a line of JSON for each world, and answers with
the exit statuses of its ranks. The ranks are forked, so they do not import torch again.

python -m fake_cuda.fake_server, with FAKE_CUDA_LIBRARY as the path of the compiled library, and in
FAKE_CUDA_DEVICES the number of devices.
"""

import gc
import importlib
import json
import os
import signal
import sys
import traceback

os.environ["TRITON_INTERPRET"] = "1"
from fake_cuda import machine  # noqa: I001  (before torch)
from fake_cuda import collectives, cuda, fake_kernels
from patience import PATIENCE, report_at_once

_PRELOADED = (
    "megaframe.training.trainer",
    "megaframe.training.restart",
    "megaframe.training.auto_layout",
)


def main():
    for part in (cuda, fake_kernels, collectives):
        part.install()
    for name in _PRELOADED:
        importlib.import_module(name)
    report_at_once()
    gc.freeze()  # no rank collects what was imported
    for line in sys.stdin:
        request = json.loads(line)
        ranks = [_fork(rank, **request) for rank in range(request["world"])]
        statuses = [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]
        print(json.dumps(statuses), flush=True)


def _fork(rank, function, words, world, port, folder):
    """Start a rank that calls `function`, given as module:name, with `words` as its command line.
    Its output goes to folder/rank-N.log, what is reported to folder/rank-N.jsonl, and what it has
    called to folder/rank-N.calls."""
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        signal.alarm(round(PATIENCE))
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        with open(f"{folder}/rank-{rank}.log", "w") as log:
            for number in (1, 2):
                os.dup2(log.fileno(), number)
        machine.report_to(f"{folder}/rank-{rank}.jsonl")
        sys.argv = [function, *words]
        module, name = function.split(":")
        getattr(importlib.import_module(module), name)()
        machine.save_calls(f"{folder}/rank-{rank}.calls")
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else bool(error.code)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
