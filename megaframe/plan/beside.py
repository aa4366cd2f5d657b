"""The planner beside a run that has been: what it would have said of it, and what it would try.

The machine is that of the config, or one that the run's device is likely to be of. A device that is
not known has no prediction rather than one of another chip.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaframe.config.load import load
from megaframe.errors import UserError
from megaframe.layout import Layout
from megaframe.plan.check import check
from megaframe.plan.cluster import Cluster, likely_cluster, load_cluster
from megaframe.plan.constants import constants_of
from megaframe.plan.nearest import in_words
from megaframe.plan.search import Choice, search
from megaframe.plan.step import predict

_SIMULATED = 8
"""Layouts that are simulated: a report is not waited for."""
_WORTH = 0.02
"""Share of a step that another layout must save to be named."""


@dataclass(frozen=True)
class Beside:
    """What is predicted of the layout that a run had."""

    choice: Choice
    cluster: Cluster

    def record(self) -> dict[str, Any]:
        """For JSON, under the names of `tools/plan.py --json`."""
        prediction = self.choice.prediction
        return {
            "cluster": self.cluster.name,
            "step_seconds": prediction.step_seconds,
            "mfu": prediction.mfu,
            "breakdown": dict(prediction.breakdown),
        }

    def tries(self) -> Iterator[str]:
        """The best layout of as many ranks in a sentence, and why it is."""
        config, ranks, cluster = self.choice.config, self.choice.layout.world, self.cluster
        found = search(
            config, ranks, cluster, constants_of(cluster.chip.family), simulated=_SIMULATED
        )
        now, best = self.choice.prediction.step_seconds, found.best.prediction
        if best.step_seconds > (1 - _WORTH) * now:
            yield (
                f"none of {len(found.candidates):,} layouts for {ranks} ranks would save "
                f"{_WORTH:.0%} of the {now:.3g} s that the planner predicts for this one"
            )
            return
        yield (
            f"{in_words(found.candidates, found.best.place)}: {best.step_seconds:.3g} s a step by "
            f"the planner, instead of the {now:.3g} s that it predicts for this layout"
        )
        yield from best.reasons


def beside_or_why(
    folder: Path, environment: Mapping[str, Any], cluster: str | None = None
) -> tuple[Beside | None, str]:
    """As `beside` of a run's folder and an empty text, or None and why there is none."""
    try:
        return beside(folder / "config.yaml", environment, cluster), ""
    except UserError as error:
        return None, f"no prediction: {error}"


def beside(config: Path, environment: Mapping[str, Any], cluster: str | None = None) -> Beside:
    """What the planner says of a run with this config and environment, on the cluster if one is
    named. Raises `UserError` where it can say nothing."""
    given, ranks = load(str(config)), environment.get("ranks")
    if not isinstance(ranks, int) or ranks < 1:
        raise UserError("the run's environment.json does not say how many ranks it had")
    device = str(environment.get("device", ""))
    name = cluster or given.parallel.cluster or likely_cluster(device)
    if name is None:
        raise UserError(
            f"no cluster of {device or 'this device'} is known; name one with --cluster"
        )
    if given.model.vocab is None:
        raise UserError("model.vocab is not set in the run's config")
    machine = load_cluster(name)
    check(given, ranks, data=False)
    layout = Layout.from_parallel(given.parallel, ranks)
    prediction = predict(given, layout, machine, constants_of(machine.chip.family))
    return Beside(Choice(given, layout, prediction), machine)
