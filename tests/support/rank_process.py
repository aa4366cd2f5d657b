"""Ranks that a test can stop, end and wait for. Each is its own process, forked from the pool's
server, which has imported torch, so it starts in a tenth of a second instead of two."""

import os
import signal
import sys
import time
from importlib import import_module
from pathlib import Path

from patience import report_at_once

from megaframe.io.local_rendezvous import find_free_port, make_rank_environment
from megaframe.training.rank_pool import FORKSERVER

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


class RankProcess:
    """A process that calls function(*arguments) with `words` as its command line. Its output is
    discarded, its errors go to a file. Whoever starts it must end it. `function` is importable."""

    def __init__(self, function, *arguments, words=(), environment=None, errors=os.devnull):
        request = (
            function,
            arguments,
            [str(word) for word in words],
            environment or {},
            str(errors),
        )
        self._process = FORKSERVER.Process(target=_run_as_entry, args=request)
        self._process.start()

    def wait(self, timeout=None):
        """Wait for its end; return the status, negative for a signal. Raises `TimeoutError`."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise TimeoutError(f"it has not ended in {timeout} s")
        return self._process.exitcode

    def poll(self):
        """Return its status, or None while it runs."""
        return self._process.exitcode

    @property
    def returncode(self):
        """As `subprocess.Popen` has it."""
        return self.poll()

    def send_signal(self, number):
        os.kill(self._process.pid, number)

    def kill(self):
        """Kill it, if it has not ended."""
        if self.poll() is None:
            self.send_signal(signal.SIGKILL)
            self.wait()


def list_rank_environments(world):
    """Yield the environment of each rank of a world, as a launcher sets it."""
    port = find_free_port()
    for rank in range(world):
        yield make_rank_environment(rank, world, port)


def hang_after(step):
    """Run the entry on a rank that hangs in its own code after `step` steps."""
    import pretrain_gpt
    from megaframe.training.trainer import Trainer

    train_step = Trainer._train_step

    def train_or_stop(trainer):
        train_step(trainer)
        if trainer.step == step:
            hang_forever()

    Trainer._train_step = train_or_stop
    pretrain_gpt.main()


def fail_at(module, owner, name):
    """Run the entry on a rank that finds a mistake where it should call a method of `owner`, a
    class in `module`."""
    import pretrain_gpt
    from megaframe.errors import UserError

    def find_mistake(*arguments, **options):
        raise UserError("a mistake that only one rank finds")

    setattr(getattr(import_module(module), owner), name, find_mistake)
    pretrain_gpt.main()


def hang_forever():
    time.sleep(1000)


def _run_as_entry(function, arguments, words, environment, errors):
    os.environ.update(environment)
    for path, number in ((os.devnull, 1), (errors, 2)):
        with open(path, "w") as file:
            os.dup2(file.fileno(), number)
    sys.argv = ["pretrain_gpt.py", *words]
    report_at_once()
    function(*arguments)
