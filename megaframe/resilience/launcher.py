"""The launcher: what has started this process, and starts it again if it fails.

A run that its launcher restarts has lost the time in between. A run that somebody continues with
another command has not: nothing was to run. Which of the two a start is, follows from the launcher
of the start before it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

_NAMES = ("MEGAFRAME_LAUNCHER", "SKYPILOT_TASK_ID", "SLURM_JOB_ID")
"""Variables that have the same value whenever a launcher starts a run again. SkyPilot's is that of
a managed job over all its clusters (https://github.com/skypilot-org/skypilot/pull/1400), Slurm's
that of a job which is queued again. The first is for launchers that set none."""
_RESTART_COUNTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")


def has_torchrun() -> bool:
    """Return whether a torchrun has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


class LauncherProcess:
    """The torchrun that started this process, if there is one.

    A torchrun that is killed cannot ask its ranks to exit, and they would keep their devices
    occupied for the ranks started next. Create this once and as early as possible: a torchrun that
    ended before is not noticed.
    """

    def __init__(self) -> None:
        self._number = os.getppid() if has_torchrun() else None

    @property
    def has_ended(self) -> bool:
        """Whether the torchrun has ended."""
        return self._number is not None and self._number != os.getppid()


def identify_launcher(variables: Mapping[str, str]) -> str:
    """Return what identifies the launcher of this process. All that it starts, and starts again,
    have the same.

    Args:
        variables: The environment.
    """
    for name in _NAMES:
        if variables.get(name):
            return f"{name}={variables[name]}"
    return f"{socket.gethostname()}:{os.getppid() if has_torchrun() else os.getpid()}"


def is_restart(variables: Mapping[str, str]) -> bool:
    """Return whether the launcher says that it has started this process again, which it may have
    done on another host.

    Args:
        variables: The environment.
    """
    return any(variables.get(name, "0") not in ("", "0") for name in _RESTART_COUNTS)
