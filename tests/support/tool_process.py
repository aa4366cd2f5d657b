"""Tools in a process of their own, forked from the server of the pool: it has imported torch, which
takes most of the time of a command that starts anew."""

import os
import runpy
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from subprocess import CompletedProcess

from patience import PATIENCE

from megaframe.io.local_rendezvous import find_free_port, make_rank_environment
from megaframe.training.rank_pool import FORKSERVER

ROOT = Path(__file__).resolve().parents[2]


def run_tool(path, *words, environment=None, root=ROOT):
    """Run a file of the repository as `python PATH WORDS` does from its root, with the output and
    errors as text. environment: variables beside those of this process. root: that of a copy; what
    the server has imported comes from the repository all the same."""
    (done,) = _run_together(path, words, [environment or {}], root)
    return done


def start_tool(path, *words, output, environment=None, root=ROOT):
    """Start a file as `run_tool` runs it, with output and errors in a file; return the process,
    which ends with this one at the latest."""
    words, variables = [str(word) for word in words], {**os.environ, **(environment or {})}
    call = (str(root), str(path), words, variables, [str(output)] * 2)
    process = FORKSERVER.Process(target=_run_file, args=call, daemon=True)
    process.start()
    return process


def run_ranks(count, path, *words, environment=None, root=ROOT):
    """Run a file as `run_tool` does on each of several ranks, as a launcher would start them.
    Return the finished process of the first that failed, or of rank 0."""
    port = find_free_port()
    ranks = [
        {**(environment or {}), **make_rank_environment(rank, count, port)} for rank in range(count)
    ]
    done = _run_together(path, words, ranks, root)
    return next((process for process in done if process.returncode), done[0])


def _run_together(path, words, environments, root):
    """Run a file in as many processes as there are environments, and wait for all of them."""
    path, words = str(path), [str(word) for word in words]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as ends:
        started = []
        for number, environment in enumerate(environments):
            outputs = [Path(folder) / f"{name}-{number}" for name in ("stdout", "stderr")]
            call = (str(root), path, words, {**os.environ, **environment}, [*map(str, outputs)])
            process = FORKSERVER.Process(target=_run_file, args=call)
            process.start()
            ends.callback(process.kill)
            started.append((process, outputs))
        done = []
        for process, outputs in started:
            process.join(PATIENCE)
            if process.exitcode is None:
                raise TimeoutError(f"{path} has not ended in {PATIENCE:g} s")
            texts = (output.read_text() for output in outputs)
            done.append(CompletedProcess([path, *words], process.exitcode, *texts))
    return done


def _run_file(root, path, words, variables, outputs):
    for number, output in enumerate(outputs, start=1):
        with open(output, "a") as file:
            os.dup2(file.fileno(), number)
    os.chdir(root)
    os.environ.clear()
    os.environ.update(variables)
    sys.argv = [path, *words]
    sys.path.insert(0, os.path.join(root, os.path.dirname(path)))
    runpy.run_path(path, run_name="__main__")
