"""The planner applied to a past run: what it predicts for the run, and which layout it would try.

The cluster is that of the config, or the likely one for the run's device. An unknown device gets no
prediction rather than that of another chip.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from megaframe.config import ParallelConfig
from megaframe.errors import UserError
from megaframe.extensions import load_config_of_run
from megaframe.hardware.cluster import Cluster, load_cluster
from megaframe.hardware.likely_cluster import find_cluster_for_device
from megaframe.layout import Layout
from megaframe.planner.candidates import SearchSpace
from megaframe.planner.constants import get_cluster_constants
from megaframe.planner.layout_search import LayoutChoice, describe_candidate, search
from megaframe.planner.prediction import predict
from megaframe.schedule.named import FILE_PREFIX
from megaframe.schedule.schedule import Schedule, read_schedule
from megaframe.validate.run import validate_config

_SIMULATED = 8
"""Number of layouts that are simulated; few, so that a report is quick."""
_WORTH = 0.02
"""Share of a step that another layout must save to be named."""
Content = TypeVar("Content")


@dataclass(frozen=True)
class RunComparison:
    """The layout of a run with its prediction, and the cluster that it is for."""

    choice: LayoutChoice
    cluster: Cluster

    def record(self) -> dict[str, Any]:
        """Return the prediction for JSON, under the names of `tools/plan.py --json`."""
        prediction = self.choice.prediction
        return {
            "cluster": self.cluster.name,
            "step_seconds": prediction.step_seconds,
            "mfu": prediction.mfu,
            "breakdown": dict(prediction.breakdown),
        }

    def suggest_layouts(self) -> Iterator[str]:
        """Yield a sentence with the best layout for as many ranks, and then its reasons; or only
        that no layout would save enough, or fits."""
        config, ranks, cluster = self.choice.config, self.choice.layout.world, self.cluster
        constants = get_cluster_constants(cluster)
        try:
            result = search(SearchSpace(config, ranks, cluster), constants, simulated=_SIMULATED)
        except UserError as error:  # a run that the planner finds too large has run all the same
            yield f"it has no layout to compare with: {error}"
            return
        current, best = self.choice.prediction.step_seconds, result.best.prediction
        if best.step_seconds > (1 - _WORTH) * current:
            yield (
                f"none of {len(result.candidates):,} layouts for {ranks} ranks would save "
                f"{_WORTH:.0%} of the {current:.3g} s that the planner predicts for this one"
            )
            return
        layout = describe_candidate(result.candidates, result.best.index)
        yield (
            f"{layout}: {best.step_seconds:.3g} s a step by the planner, instead of the "
            f"{current:.3g} s that it predicts for this layout"
        )
        yield from best.reasons


def compare_run_or_reason(
    folder: Path, environment: Mapping[str, Any], cluster: str | None = None
) -> tuple[RunComparison | None, str]:
    """Return the result of `compare_run` for a run's folder and an empty text, or None and the
    reason why there is no prediction.

    Args:
        folder: The run folder.
        environment: What the run has recorded about its machine.
        cluster: Name or path of a cluster; by default that of the config or device.
    """
    try:
        return compare_run(folder, environment, cluster), ""
    except UserError as error:
        return None, f"no prediction: {error}"


def compare_run(
    folder: Path, environment: Mapping[str, Any], cluster: str | None = None
) -> RunComparison:
    """Return the prediction for a run with this folder and environment.

    Args:
        folder: The run folder.
        environment: Content of the run's environment.json.
        cluster: Name of the cluster to assume, if given.

    Raises:
        UserError: There can be no prediction: the number of ranks, the cluster or `model.vocab` is
            unknown, or the config is not valid.
    """
    run_config, ranks = load_config_of_run(folder), environment.get("ranks")
    if not isinstance(ranks, int) or ranks < 1:
        raise UserError("the run's environment.json does not say how many ranks it had")
    if run_config.model.vocab is None:
        raise UserError("model.vocab is not set in the run's config")
    if cluster:
        run_cluster = load_cluster(cluster)
    else:
        run_cluster = _find_cluster_of_run(run_config.parallel, environment)
    schedule = run_config.parallel.schedule
    if isinstance(schedule, str) and schedule.startswith(FILE_PREFIX):
        _read_named("parallel.schedule", schedule, _read_schedule_file, "no schedule here")
    validate_config(run_config, ranks, data=False)
    layout = Layout.from_parallel(run_config.parallel, ranks)
    prediction = predict(run_config, layout, run_cluster, get_cluster_constants(run_cluster))
    return RunComparison(LayoutChoice(run_config, layout, prediction), run_cluster)


def _find_cluster_of_run(parallel: ParallelConfig, environment: Mapping[str, Any]) -> Cluster:
    """Return the cluster that a run's config names, or the likely one for its device."""
    name = parallel.cluster
    if not name:
        return _find_cluster_of_device(environment)
    problem = "no cluster here; name one with --cluster"
    return _read_named("parallel.cluster", name, load_cluster, problem)


def _read_schedule_file(name: str) -> Schedule:
    return read_schedule(Path(name.removeprefix(FILE_PREFIX)))


def _read_named(key: str, name: str, read: Callable[[str], Content], problem: str) -> Content:
    """Return what `read` reads from a file that a run's config names. Its mistakes are not
    repeated: the run may be somebody else's, and the file any file of this machine."""
    try:
        return read(name)
    except UserError:
        raise UserError(f"{key}={name} of the run is {problem}") from None


def _find_cluster_of_device(environment: Mapping[str, Any]) -> Cluster:
    """Return the likely cluster of the device that a run's environment names."""
    device, memory = str(environment.get("device", "")), environment.get("memory of the device")
    try:
        return find_cluster_for_device(device, memory if isinstance(memory, int) else None)
    except UserError:
        raise UserError(
            f"no cluster of {device or 'this device'} is known; name one with --cluster"
        ) from None
