"""Weak and strong scaling from 8 to 64 ranks by the real executor, whose blocks only wait.

Every rank is a process over gloo (`emulated_ranks.py`), in 1 to 8 pipelines of 8 stages. Weak: each
pipeline has the same number of microbatches in every world. Strong: all pipelines together have the
same number, so pipelines with few microbatches idle longer, which the planner predicts. The
remaining loss is the overhead of the executor, the schedule and the collectives of more ranks.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness import describe_machine, read_commit
from pipeline_emulated import make_config
from prediction_emulated import describe_cluster, measure_seconds

from megaframe.hardware.cluster import Cluster
from megaframe.layout import Layout

STAGES = 8
KINDS = ("weak", "strong")
DATA = (1, 2, 4, 8)
WEAK, STRONG = 16, 64
"""Microbatches of one pipeline, and of all pipelines together."""


@dataclass(frozen=True)
class ScalingPoint:
    """One world.

    Attributes:
        measured: Seconds of a step.
        predicted: The same, as predicted.
        efficiency: Microbatches per second and rank relative to the smallest world, measured
            and predicted.
    """

    kind: str
    ranks: int
    microbatches: int
    measured: float
    predicted: float
    efficiency: float
    predicted_efficiency: float


def measure(kind: str, arguments: argparse.Namespace, cluster: Cluster) -> list[ScalingPoint]:
    """Measure one kind of scaling, from the smallest world to the largest."""
    lines: list[ScalingPoint] = []
    first = (0.0, 0.0)
    for data in arguments.data:
        microbatches = WEAK if kind == "weak" else STRONG // data
        config = make_config("1f1b", STAGES, 1, microbatches, arguments.milliseconds / 1e3, data)
        layout = Layout(pipeline=STAGES, data=data)
        step, expected = measure_seconds(config, layout, arguments.steps, cluster)
        first = first if lines else (microbatches / step, microbatches / expected)
        ranks = STAGES * data
        rates = (microbatches / step / first[0], microbatches / expected / first[1])
        lines.append(ScalingPoint(kind, ranks, microbatches, step, expected, *rates))
        print(
            f"{kind:<8}{ranks:>4} ranks{microbatches:>4} microbatches: {step:7.3f} s, predicted "
            f"{expected:7.3f}; efficiency {rates[0]:.3f}, predicted {rates[1]:.3f}",
            flush=True,
        )
    return lines


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--data", nargs="+", type=int, default=DATA, help="pipelines of a world")
    parser.add_argument("--milliseconds", type=float, default=200.0, help="of an F, a B and a W")
    parser.add_argument("--steps", type=int, default=1, help="timed steps, after one that is not")
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    cluster = describe_cluster()
    lines = [line for kind in arguments.kinds for line in measure(kind, arguments, cluster)]
    if arguments.write:
        result = {
            "commit": read_commit(),
            "machine": describe_machine(),
            "config": {
                "stages": STAGES,
                "milliseconds": arguments.milliseconds,
                "steps": arguments.steps,
            },
            "transfer_seconds": cluster.tiers[0].latency,
            "lines": [asdict(line) for line in lines],
        }
        arguments.write.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
