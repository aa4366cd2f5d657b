"""The executor compared with the simulator: pipelines of many ranks whose blocks only wait.

Every rank is a process that runs the real executor and really communicates over gloo. A block waits
(`model.emulate`) instead of computing, so ranks do not need a core each. The simulator gets the
same times and the measured time of sending a tensor from one rank to another. All ranks run exactly
the list that is simulated, passed as text.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from emulated_ranks import Steps, run_in_world, run_steps, transfer_seconds

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness import describe_measurement

from megaframe.architecture.pipeline import build_step_schedule
from megaframe.architecture.stages import compute_stage_costs, plan_stages
from megaframe.config import RunConfig
from megaframe.schedule import Schedule, generate, lower
from megaframe.schedule.costs import ActionCosts
from megaframe.schedule.simulate import Timeline, simulate

RUNS = (
    ("gpipe", 1, 2),
    ("1f1b", 1, 2),
    ("interleaved", 4, 2),
    ("breadth-first", 4, 2),
    ("zb-h1", 1, 2),
    ("zb-h2", 1, 2),
    ("zb-v", 2, 2),
    ("v-half", 2, 2),
    ("dualpipe-v", 2, 2),
    ("search", 4, 2),
    ("search", 8, 2),
    ("search", 4, 4),
)
"""Schedule, chunks per rank and microbatches per rank of the measured steps."""

OVERHEAD = (
    ("1f1b", 4, 1, 128),
    ("zb-h1", 4, 1, 128),
    ("zb-v", 4, 2, 64),
    ("interleaved", 4, 4, 32),
)
"""Schedule, ranks, chunks and microbatches of the steps in which blocks take no time."""
OVERHEAD_STEPS = 10


@dataclass(frozen=True)
class EmulatedSchedule:
    """One schedule: a step as measured and as simulated, in seconds.

    Attributes:
        bubble: Share of the step in which a rank does no emulated work, mean over ranks; a step
            goes from the first start to the last end, including the update.
        in_spans: The same share of a rank's own time from its first to its last pass, the
            largest over ranks.
        live: Most activations that the executor of a rank held, in units of the rank's share of
            the layers.
        live_limit: What 1F1B holds on its first rank with as many microbatches; a schedule
            within it is memory-neutral.
    """

    schedule: str
    chunks: int
    microbatches: int
    measured: float
    fastest: float
    predicted: float
    deviation: float
    bubble: float
    predicted_bubble: float
    in_spans: float
    predicted_in_spans: float
    live: float
    live_limit: float
    memory_neutral: bool


def make_config(
    name: str, ranks: int, chunks: int, microbatches: int, seconds: float, data: int = 1
) -> RunConfig:
    """Return the config of a tiny model with one block per stage, whose F, B and W take `seconds`
    each.

    Args:
        microbatches: Of each of the `data` pipelines.
    """
    times = dict.fromkeys(("forward", "backward", "weight"), seconds)
    return RunConfig.model_validate(
        {
            "model": {
                "layers": ranks * chunks,
                "hidden": 8,
                "heads": 1,
                "vocab": 16,
                "position": "none",
                "emulate": times,
            },
            "parallel": {
                "pipeline": ranks,
                "data": data,
                "zero": min(1, data - 1),
                "chunks": chunks,
                "schedule": name,
                "layers_per_stage": (1,) * (ranks * chunks),
            },
            "train": {"seq": 4, "global_batch": microbatches * data, "precision": "fp32"},
        }
    )


def simulate_schedule(config: RunConfig, comm: float) -> tuple[Schedule, Timeline]:
    """Return the schedule of a step of `config`, and its simulation with the emulated times."""
    schedule = build_step_schedule(config, config.train.global_batch)
    costs = replace(compute_stage_costs(config.model, config.train, plan_stages(config)), comm=comm)
    return schedule, simulate(schedule, costs)


def run_schedule(config: RunConfig, schedule: Schedule, steps: int) -> list[Steps]:
    """Run steps of `schedule`, and return what every rank measured."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "schedule.txt"
        path.write_text(str(schedule), encoding="utf-8")
        parallel = config.parallel.model_copy(update={"schedule": f"file:{path}"})
        return run_in_world(run_steps, config.model_copy(update={"parallel": parallel}), steps)


def measure(
    name: str, chunks: int, microbatches: int, arguments: argparse.Namespace, comm: float
) -> EmulatedSchedule:
    """Measure and simulate one schedule."""
    config = make_config(name, arguments.ranks, chunks, microbatches, arguments.milliseconds / 1e3)
    schedule, expected = simulate_schedule(config, comm)
    rank_steps = run_schedule(config, schedule, arguments.steps)
    times = [
        max(ends) - min(starts) for starts, ends in zip(*_collect_steps(rank_steps), strict=True)
    ]
    step, predicted = statistics.median(times), float(expected.time)
    work = [float(value) for value in expected.work]
    live = max(max(rank.live) for rank in rank_steps) / chunks
    usual = generate("1f1b", arguments.ranks, 1, microbatches)
    limit = float(max(simulate(usual, ActionCosts()).peak_activations))
    spans = [
        statistics.median(
            1 - rank_work / (last - first)
            for first, last in zip(rank.firsts, rank.lasts, strict=True)
        )
        for rank_work, rank in zip(work, rank_steps, strict=True)
    ]
    return EmulatedSchedule(
        schedule=name,
        chunks=chunks,
        microbatches=microbatches,
        measured=step,
        fastest=min(times),
        predicted=predicted,
        deviation=step / predicted - 1,
        bubble=1 - statistics.mean(work) / step,
        predicted_bubble=float(expected.bubble),
        in_spans=max(spans),
        predicted_in_spans=max(
            float(bubble / span)
            for bubble, span in zip(expected.bubbles, expected.spans, strict=True)
        ),
        live=live,
        live_limit=limit,
        memory_neutral=live <= limit,
    )


def _collect_steps(
    rank_steps: Sequence[Steps],
) -> tuple[list[tuple[float, ...]], list[tuple[float, ...]]]:
    """Return, for each step, the starts and the ends of all ranks."""
    starts = zip(*(rank.starts for rank in rank_steps), strict=True)
    return list(starts), list(zip(*(rank.ends for rank in rank_steps), strict=True))


HEAD = (
    f"{'':<14}{'chunks':>7}{'batch':>6}{'step s':>9}{'simulated':>10}{'deviation':>10}"
    f"{'bubble':>8}{'simulated':>10}{'in spans':>10}{'simulated':>10}{'live':>7}{'1f1b':>6}"
)


def format_row(line: EmulatedSchedule) -> str:
    """Format a line as aligned text under `HEAD`."""
    return (
        f"{line.schedule:<14}{line.chunks:>7}{line.microbatches:>6}{line.measured:>9.3f}"
        f"{line.predicted:>10.3f}{line.deviation:>+10.2%}{line.bubble:>8.2%}"
        f"{line.predicted_bubble:>10.2%}{line.in_spans:>10.2%}{line.predicted_in_spans:>10.2%}"
        f"{line.live:>7.2f}{'<=' if line.memory_neutral else '>':>3}{line.live_limit:>3.0f}"
    )


def measure_overheads() -> Iterator[dict[str, Any]]:
    """Yield the microseconds of processor time per action if blocks take no time, of the thread
    that runs the executor, in its least disturbed step. The two ranks with the embedding and the
    head, which are real, are reported apart from the others."""
    for name, ranks, chunks, microbatches in OVERHEAD:
        config = make_config(name, ranks, chunks, microbatches, 0.0)
        schedule = build_step_schedule(config, microbatches)
        actions = [len(rank) for rank in lower(schedule).ranks]
        each = [
            1e6 * min(rank.busy) / count
            for rank, count in zip(
                run_schedule(config, schedule, OVERHEAD_STEPS), actions, strict=True
            )
        ]
        ends = {schedule.rank_of[0], schedule.rank_of[-1]}
        inner = statistics.mean(overhead for rank, overhead in enumerate(each) if rank not in ends)
        outer = max(each[rank] for rank in ends)
        print(
            f"{name:<14}{ranks} ranks x {chunks} chunks, {max(actions)} actions: "
            f"{inner:.0f} us each, {outer:.0f} us where embedding or head are",
            flush=True,
        )
        yield {
            "schedule": name,
            "ranks": ranks,
            "chunks": chunks,
            "microbatches": microbatches,
            "actions": max(actions),
            "microseconds": inner,
            "microseconds_at_ends": outer,
        }


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--milliseconds", type=float, default=150.0, help="of a stage's F, B and W")
    parser.add_argument("--steps", type=int, default=2, help="timed steps, after one that is not")
    names = tuple(dict.fromkeys(name for name, _, _ in RUNS))
    parser.add_argument("--schedules", nargs="+", choices=names, default=names)
    parser.add_argument("--write", type=Path, help="write all measurements as JSON to this file")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    idle = make_config("1f1b", arguments.ranks, 1, arguments.ranks, 0.0)
    comm = max(run_in_world(transfer_seconds, idle))
    print(
        f"{arguments.ranks} ranks, passes of {arguments.milliseconds:g} ms, "
        f"transfer {comm * 1e6:.0f} us"
    )
    print(HEAD)
    lines = []
    for name, chunks, each in RUNS:
        if name in arguments.schedules:
            lines.append(measure(name, chunks, each * arguments.ranks, arguments, comm))
            print(format_row(lines[-1]), flush=True)
    measurements = list(measure_overheads())
    if arguments.write:
        settings = ("ranks", "milliseconds", "steps")
        document = {
            **describe_measurement(),
            "config": {name: getattr(arguments, name) for name in settings},
            "transfer_seconds": comm,
            "schedules": [asdict(line) for line in lines],
            "overhead": measurements,
        }
        arguments.write.parent.mkdir(parents=True, exist_ok=True)
        arguments.write.write_text(json.dumps(document, indent=2) + "\n")
        print(f"wrote {arguments.write}")


if __name__ == "__main__":
    main()
