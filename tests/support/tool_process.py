"""Tools in a process of their own, forked from the server of the pool: it has imported torch, which
takes most of the time of a command that starts anew."""

import os
import runpy
import sys
import tempfile
from pathlib import Path
from subprocess import CompletedProcess

from patience import PATIENCE

from megaframe.training.rank_pool import FORKSERVER

ROOT = Path(__file__).resolve().parents[2]


def run_tool(path, *words, environment=None, root=ROOT):
    """Run a file of the repository as `python PATH WORDS` does from its root, with the output and
    errors as text. environment: variables beside those of this process. root: that of a copy; what
    the server has imported comes from the repository all the same."""
    words = [str(word) for word in words]
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / name for name in ("stdout", "stderr")]
        variables = {**os.environ, **(environment or {})}
        process = FORKSERVER.Process(
            target=_run_file, args=(str(root), path, words, variables, [*map(str, outputs)])
        )
        process.start()
        process.join(PATIENCE)
        if process.exitcode is None:
            process.kill()
            raise TimeoutError(f"{path} has not ended in {PATIENCE:g} s")
        stdout, stderr = (output.read_text() for output in outputs)
    return CompletedProcess([path, *words], process.exitcode, stdout, stderr)


def _run_file(root, path, words, variables, outputs):
    for number, output in enumerate(outputs, start=1):
        with open(output, "w") as file:
            os.dup2(file.fileno(), number)
    os.chdir(root)
    os.environ.clear()
    os.environ.update(variables)
    sys.argv = [path, *words]
    sys.path.insert(0, os.path.join(root, os.path.dirname(path)))
    runpy.run_path(path, run_name="__main__")
