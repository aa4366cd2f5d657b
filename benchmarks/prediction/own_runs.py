"""Steps of our own trainer on a GPU, to which no constant is fitted, as they are predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megaframe.config import RunConfig, load
from megaframe.hardware.cluster import load_cluster
from megaframe.layout import Layout
from megaframe.planner.constants import Software, get_family_constants
from megaframe.planner.prediction import predict
from megaframe.planner.trainers import MEGAFRAME, TITAN_2025

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "bench"


@dataclass(frozen=True)
class OwnRun:
    """A measured step on one H200 (SXM, 700 W), torch 2.11, CUDA 13.0.

    Attributes:
        file: Config in configs/bench.
        seconds: Measured, with a wait after each step.
        overrides: Changes to the config.
        note: What the planner does not count, if it is known.
    """

    label: str
    file: str
    seconds: float
    software: Software = MEGAFRAME
    overrides: tuple[str, ...] = ()
    note: str = ""

    def load_config(self) -> RunConfig:
        """Return the config."""
        return load(str(CONFIGS / f"{self.file}.yaml"), self.overrides)


OWN_RUNS = (
    OwnRun("8 layers of Llama 3 8B", "llama-8b-slice", 0.4400),
    OwnRun(
        "the same in plain torch with torch.compile", "llama-8b-slice", 0.4599, software=TITAN_2025
    ),
    OwnRun(
        "the same in 8 bits, a scale per tensor",
        "llama-8b-slice-fp8",
        0.4134,
        note="70 ms of it copied transposed operands, which was removed after this run",
    ),
    OwnRun(
        "GPT-2 of 124M as a CUDA graph",
        "gpt2-124m",
        0.1126,
        overrides=("model.vocab=50304", "train.cuda_graph=true"),
    ),
)


def predict_own_runs() -> list[tuple[OwnRun, float]]:
    """Return the runs with their predicted seconds."""
    cluster, predicted = load_cluster("h200-ib"), []
    for run in OWN_RUNS:
        config = run.load_config()
        constants = replace(get_family_constants(cluster.chip.family), software=run.software)
        layout = Layout.from_parallel(config.parallel, 1)
        predicted.append((run, predict(config, layout, cluster, constants).step_seconds))
    return predicted


def format_own_runs(predicted: Sequence[tuple[OwnRun, float]]) -> str:
    """Return the runs as a table, with what is known of their errors."""
    lines = [
        "Steps of our own trainer, and of the plain one that it is compared with, on one H200 "
        "(benchmarks/results/h200). No constant is fitted to these steps. What products, attention "
        "and a copy reach alone in the first one was known, and split-k was declared after the "
        "last one was seen to be predicted 21% too slow without it.",
        "",
        "| run | measured s | predicted s | error | |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {run.label} | {run.seconds:.4f} | {seconds:.4f} | "
        f"{100 * (seconds / run.seconds - 1):+.1f}% | {run.note} |"
        for run, seconds in predicted
    ]
    return "\n".join(lines)
