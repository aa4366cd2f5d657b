"""Metrics of experts: their load, the entropy of their routers, and the choices that were dropped.

They are made of numbers that a step has anyway; the load is the gradient of a router's balance
parameter, already summed over the ranks. Layers on other ranks are zeros here, so that all ranks
record the same names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from megaframe.architecture.spec import ParamSpec, locate_shard
from megaframe.config import MetricsConfig, ModelConfig
from megaframe.metrics.records import ReduceType
from megaframe.model.pass_state import LayerStatistics

Record = tuple[str, Tensor, ReduceType]
"""Name, row and kind, as `MetricsLogger.record` takes them."""


class ExpertLoadMetrics:
    """Makes the records of a step.

    Args:
        config: The config of the run.
        specs: Those of the whole model, whose layers with experts they name.
        ranks: Number of ranks that divide the experts.
    """

    def __init__(
        self, model: ModelConfig, metrics: MetricsConfig, specs: Iterable[ParamSpec], ranks: int
    ) -> None:
        moe = model.moe
        assert moe is not None
        self._moe, self._every = moe, metrics.experts_every
        self._layer_index = {
            spec.name: index
            for index, spec in enumerate(spec for spec in specs if spec.role == "balance")
        }
        spans = (locate_shard(moe.experts, index, ranks) for index in range(ranks))
        self._spans = [slice(start, start + size) for start, size in spans]

    def make_records(
        self,
        loads: Iterable[tuple[str, Tensor, Tensor]],
        statistics: Iterable[LayerStatistics],
        tokens: float,
        step: int,
    ) -> Iterator[Record]:
        """Yield the records of a step. Rows are in the order of the layers that have experts.

        Args:
            loads: For each router on this rank the name of its balance parameter, its load [E] in
                the whole step, and the parameter's value [E].
            statistics: Those of this rank's stages.
            tokens: Number of tokens of the step that had a loss, or the sum of their weights.
            step: The step's number.
        """
        loads_and_biases = {name: (load_E.double(), bias_E) for name, load_E, bias_E in loads}
        device = next((load.device for load, _ in loads_and_biases.values()), torch.device("cpu"))
        rows = {
            name: torch.zeros(len(self._layer_index), dtype=torch.float64, device=device)
            for name in ("max_load", "rank_load", "entropy", "bias_norm")
        }
        for name, (load_E, bias_E) in loads_and_biases.items():
            index = self._layer_index[name]
            rows["max_load"][index] = _compute_peak_over_mean(load_E)
            rows["rank_load"][index] = _compute_peak_over_mean(
                torch.stack([load_E[span].sum() for span in self._spans])
            )
            if self._moe.balance == "bias":
                rows["bias_norm"][index] = bias_E.norm()
        dropped, added = torch.zeros(2, dtype=torch.float64, device=device)
        for stage_statistics in statistics:
            if stage_statistics.loss is not None:
                added += stage_statistics.loss
            for name, value in stage_statistics.counts.items():
                if name == "dropped_choices":
                    dropped += value
                else:
                    rows["entropy"][self._layer_index[name]] += value / tokens
        yield "aux_loss", added / tokens, "sum"
        for name, row in rows.items():
            yield f"experts/{name}", row, "sum" if name == "entropy" else "max"
        choices = tokens * self._moe.top_k * len(self._layer_index)
        yield "experts/dropped", dropped / choices, "sum"
        if self._every and step % self._every == 0:
            no_load = torch.zeros(self._moe.experts, dtype=torch.float64, device=device)
            for name, index in self._layer_index.items():
                yield (
                    f"experts/tokens/{index}",
                    loads_and_biases.get(name, (no_load, no_load))[0],
                    "max",
                )


def _compute_peak_over_mean(load: Tensor) -> Tensor:
    """Return maximum over mean; 1 if there is no load at all."""
    mean = load.mean()
    return torch.where(mean > 0, load.max() / mean, 1.0)
