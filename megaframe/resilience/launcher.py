"""The launcher: what has started this process, and starts it again if it fails.

A run that its launcher restarts has lost the time in between. A run that somebody continues with
another command has not: nothing was to run. Which of the two a start is, follows from the launcher
of the start before it.
"""

from __future__ import annotations

import os
import socket
from itertools import count

_NAMES = ("MEGAFRAME_LAUNCHER", "SKYPILOT_TASK_ID", "SLURM_JOB_ID")
"""Variables that have the same value whenever a launcher starts a run again. SkyPilot's is that of
a managed job over all its clusters (https://github.com/skypilot-org/skypilot/pull/1400), Slurm's
that of a job which is queued again, or whose script starts the run again. The first is for
launchers that set none."""
_RESTART_COUNTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
_CALLS = count()
"""Numbers the runs of this process."""


def has_torchrun() -> bool:
    """Return whether a torchrun has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


class LauncherProcess:
    """What started this process: a torchrun, a scheduler, or nothing that would start it again.

    A torchrun that is killed cannot ask its ranks to exit, and they would keep their devices
    occupied for the ranks started next. Create this once for a run, and as early as possible: a
    torchrun that ended before is not noticed.

    Attributes:
        identity: The same for all that a launcher starts, and starts again. Without a launcher, all
            attempts of one call have the same.
        has_restarted: Whether the launcher says that it has started this process again, which it
            may have done on another host.
    """

    def __init__(self) -> None:
        self._number = os.getppid() if has_torchrun() else None
        self.identity = _identify(self._number)
        self.has_restarted = any(
            os.environ.get(name, "0") not in ("", "0") for name in _RESTART_COUNTS
        )

    @property
    def has_ended(self) -> bool:
        """Whether the torchrun has ended."""
        return self._number is not None and self._number != os.getppid()


def _identify(torchrun: int | None) -> str:
    """Return the identity of the launcher; torchrun: its process id, if there is one."""
    for name in _NAMES:
        if os.environ.get(name) and not (name == "SLURM_JOB_ID" and _is_interactive_allocation()):
            return f"{name}={os.environ[name]}"
    process = f"{os.getpid()}:{next(_CALLS)}" if torchrun is None else str(torchrun)
    return f"{socket.gethostname()}:{process}"


def _is_interactive_allocation() -> bool:
    """Return whether a user types commands into a Slurm job (salloc): they have the same job id,
    and nothing starts them again. Slurm says BATCH to a script of sbatch and to all that it starts,
    `env_array_for_batch_job` in its src/common/env.c."""
    return os.environ.get("ENVIRONMENT") != "BATCH"
