"""Runs that stand still at a step while a file exists, so that a test can act at that moment."""

_EXTENSION = """
import time
from pathlib import Path
from typing import Literal

from megaframe.extensions import Callback, CallbackPart


class HoldingConfig(CallbackPart):
    kind: Literal["holding"] = "holding"
    file: str
    step: int

    def make_callback(self, config):
        return Holding(Path(self.file), self.step)


class Holding(Callback):
    def __init__(self, file, step):
        self._file, self._step = file, step

    def before_step(self, run):
        while run.step == self._step and self._file.exists():
            time.sleep(0.02)


def register(registry):
    registry.register(HoldingConfig)
"""


def make_holding_words(folder, step):
    """Return overrides with which a run waits before a step, and the file that holds it there. The
    metrics of the step before are written while the next one runs: two are missing."""
    extension, hold = folder / "holding.py", folder / "hold"
    extension.write_text(_EXTENSION)
    hold.touch()
    callback = f"{{kind: holding, file: {hold}, step: {step}}}"
    return [f"run.extensions=[{extension}]", f"run.callbacks=[{callback}]"], hold
