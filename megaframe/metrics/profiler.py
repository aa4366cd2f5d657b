"""Profiles every operator and kernel of some steps with torch's profiler, one file per rank."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from megaframe.config import MetricsConfig, RunSection
from megaframe.distributed.mesh import Mesh
from megaframe.io.regular_file import make_folder


class Profiler:
    """Profiles the steps in `metrics.profile`, each into its own file; these steps take longer.

    Args:
        config: The run.
        mesh: The mesh of its ranks.
        start_step: The step from which this process continues.
        report: Called with what is missing if a profile cannot be written.
    """

    def __init__(
        self,
        run: RunSection,
        metrics: MetricsConfig,
        mesh: Mesh,
        start_step: int,
        report: Callable[[str], None],
    ) -> None:
        self._report = report
        self._folder, self._rank = Path(run.dir) / "profile", mesh.rank
        self._steps = frozenset(metrics.profile)
        self._activities = [ProfilerActivity.CPU]
        if mesh.device.type == "cuda":
            self._activities.append(ProfilerActivity.CUDA)
        self._running: profile | None = None
        self._begin(start_step + 1)

    def end(self, step: int) -> None:
        """End step `step`: write its profile and begin that of the next step, if wanted."""
        if self._running is not None:
            running, self._running = self._running, None
            running.stop()
            path = self._folder / f"step-{step:08d}-rank-{self._rank:05d}.json"
            try:
                make_folder(self._folder, inside=self._folder.parent)
                # torch would follow a link at `path`; nobody else writes into the new folder.
                with tempfile.TemporaryDirectory(dir=self._folder) as private:
                    written = Path(private) / path.name
                    running.export_chrome_trace(str(written))
                    os.replace(written, path)
            except OSError as error:
                self._report(f"cannot write {path}: {error.strerror}")
        self._begin(step + 1)

    def close(self) -> None:
        """Discard the profile of a step that has not ended."""
        if self._running is not None:
            self._running.stop()
            self._running = None

    def _begin(self, step: int) -> None:
        if step in self._steps:
            self._running = profile(activities=self._activities)
            self._running.start()
