"""The planner compared with the executor: whole steps of 16 and 32 ranks whose blocks only wait.

Every rank is a process that runs the real executor over gloo (`emulated_ranks.py`). The planner
gets the config, the layout and a cluster of which only one number is measured: how long a tensor
takes from one rank to another.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from emulated_ranks import run_in_world, run_steps, transfer_seconds

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness import describe_machine, read_commit
from pipeline_emulated import make_config

from megaframe.config import RunConfig
from megaframe.hardware.cluster import Cluster, load_cluster
from megaframe.layout import Layout
from megaframe.planner.constants import get_family_constants
from megaframe.planner.prediction import predict

RUNS = (
    # schedule, ranks, chunks, microbatches, seconds of a stage's F, B and W
    ("1f1b", 16, 1, 32, 0.1),
    ("interleaved", 16, 2, 32, 0.1),
    ("zb-h1", 16, 1, 32, 0.1),
    ("1f1b", 32, 1, 32, 0.1),
)


@dataclass(frozen=True)
class PredictedWorld:
    """One run: measured (median) and predicted seconds of a step."""

    schedule: str
    ranks: int
    chunks: int
    microbatches: int
    measured: float
    predicted: float

    @property
    def deviation(self) -> float:
        """Relative error of the prediction."""
        return self.predicted / self.measured - 1


def describe_cluster() -> Cluster:
    """Return a cluster of ranks on this machine, with the measured latency between ranks."""
    comm = run_in_world(transfer_seconds, make_config("1f1b", 2, 1, 4, 0.01))[1]
    cluster = load_cluster("cpu")
    return replace(cluster, tiers=(replace(cluster.tiers[0], latency=comm),), jitter=0.0)


def measure_seconds(
    config: RunConfig, layout: Layout, steps: int, cluster: Cluster
) -> tuple[float, float]:
    """Return the measured (median) and the predicted seconds of a step of blocks that wait."""
    constants = get_family_constants("cpu")
    quiet = replace(constants, software=replace(constants.software, step_kernels=0.0))
    expected = predict(config, layout, cluster, quiet)
    rank_steps = run_in_world(run_steps, config, steps)
    starts = zip(*(rank.starts for rank in rank_steps), strict=True)
    ends = zip(*(rank.ends for rank in rank_steps), strict=True)
    times = [max(end) - min(start) for start, end in zip(starts, ends, strict=True)]
    return statistics.median(times), expected.step_seconds


def measure(run: tuple[str, int, int, int, float], steps: int, cluster: Cluster) -> PredictedWorld:
    """Measure and predict one run."""
    name, ranks, chunks, microbatches, seconds = run
    config = make_config(name, ranks, chunks, microbatches, seconds)
    step, expected = measure_seconds(config, Layout(pipeline=ranks), steps, cluster)
    return PredictedWorld(name, ranks, chunks, microbatches, step, expected)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 32])
    parser.add_argument("--steps", type=int, default=1, help="timed steps, after one that is not")
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    cluster = describe_cluster()
    lines = []
    for run in RUNS:
        if run[1] in arguments.ranks:
            lines.append(measure(run, arguments.steps, cluster))
            line = lines[-1]
            print(
                f"{line.schedule:<12}{line.ranks:>4} ranks{line.chunks:>3} chunks"
                f"{line.microbatches:>4} microbatches: {line.measured:.3f} s measured, "
                f"{line.predicted:.3f} predicted, {line.deviation:+.2%}",
                flush=True,
            )
    if arguments.write:
        result = {
            "commit": read_commit(),
            "machine": describe_machine(),
            "transfer_seconds": cluster.tiers[0].latency,
            "lines": [{**asdict(line), "deviation": line.deviation} for line in lines],
        }
        arguments.write.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
