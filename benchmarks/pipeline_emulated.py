"""The engine beside the simulator: steps of pipelines of many ranks whose blocks only wait.

Every rank is a process that runs the real engine and really communicates over gloo; a block waits
(`model.emulate`) instead of computing, so that ranks need no core of their own. The simulator gets
the same times, and what a tensor takes from one rank to another as measured. All ranks run the very
list that is simulated, as text.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from emulated_ranks import Steps, in_world, run_steps, transfer_seconds
from harness import commit, machine

from megaframe.config import RunConfig
from megaframe.plan.schedules import step_schedule
from megaframe.plan.stages import stage_costs, stage_plans
from megaframe.schedule import Schedule, lower
from megaframe.schedule.simulate import Timeline, simulate

CHUNKS: Mapping[str, tuple[int, ...]] = {
    "gpipe": (1,),
    "1f1b": (1,),
    "interleaved": (4,),
    "breadth-first": (4,),
    "zb-h1": (1,),
    "zb-h2": (1,),
    "zb-v": (2,),
    "v-half": (2,),
    "dualpipe-v": (2,),
    "search": (1, 2, 4),
}
"""Chunks per rank of a schedule; where there is a choice, the one with the shortest simulated step,
in which each transfer takes its time."""

OVERHEAD = (
    ("1f1b", 4, 1, 128),
    ("zb-h1", 4, 1, 128),
    ("zb-v", 4, 2, 64),
    ("interleaved", 4, 4, 32),
)
"""Schedule, ranks, chunks and microbatches of the steps whose blocks take no time at all."""
OVERHEAD_STEPS = 10


@dataclass(frozen=True)
class Line:
    """One schedule: a step as measured and as simulated, in seconds.

    bubble: part of the step in which the emulated work of a rank does not run, mean over ranks; a
    step goes from the first start to the last end, update included. in_spans: the same of a rank's
    own time from its first to its last pass, the largest of all ranks. peak_activations: the
    largest of all ranks, in units of a rank's share of the layers.
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
    peak_activations: float


def config_of(name: str, ranks: int, chunks: int, microbatches: int, seconds: float) -> RunConfig:
    """A tiny model with a block per stage; F, B, W of a rank's whole share take `seconds` each."""
    times = dict.fromkeys(("forward", "backward", "weight"), seconds / chunks)
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
                "chunks": chunks,
                "schedule": name,
                "layers_per_stage": (1,) * (ranks * chunks),
            },
            "train": {"seq": 4, "global_batch": microbatches, "precision": "fp32"},
        }
    )


def simulated(config: RunConfig, comm: float) -> tuple[Schedule, Timeline]:
    """The schedule of a step of `config`, and its run on the emulated times."""
    schedule = step_schedule(config, config.train.global_batch)
    costs = replace(stage_costs(config, stage_plans(config)), comm=comm)
    return schedule, simulate(schedule, costs)


def play(config: RunConfig, schedule: Schedule, steps: int) -> list[Steps]:
    """Steps of `schedule` as every rank saw them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "schedule.txt"
        path.write_text(str(schedule), encoding="utf-8")
        parallel = config.parallel.model_copy(update={"schedule": f"file:{path}"})
        return in_world(run_steps, config.model_copy(update={"parallel": parallel}), steps)


def measure(name: str, given: argparse.Namespace, comm: float) -> Line:
    """One schedule, with the best of its numbers of chunks."""
    configs = [
        config_of(name, given.ranks, chunks, given.microbatches, given.milliseconds / 1e3)
        for chunks in CHUNKS[name]
    ]
    runs = [(config, *simulated(config, comm)) for config in configs]
    config, schedule, expected = min(runs, key=lambda run: run[2].time)
    seen = play(config, schedule, given.steps)
    times = [max(ends) - min(starts) for starts, ends in zip(*_across(seen), strict=True)]
    step, predicted = statistics.median(times), float(expected.time)
    work = [float(value) for value in expected.work]
    spans = [
        statistics.median(
            1 - mine / (last - first) for first, last in zip(rank.firsts, rank.lasts, strict=True)
        )
        for mine, rank in zip(work, seen, strict=True)
    ]
    return Line(
        schedule=name,
        chunks=config.parallel.chunks,
        microbatches=given.microbatches,
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
        peak_activations=float(max(expected.peak_activations)),
    )


def _across(seen: Sequence[Steps]) -> tuple[list[tuple[float, ...]], list[tuple[float, ...]]]:
    """By step, the starts and the ends of all ranks."""
    starts = zip(*(rank.starts for rank in seen), strict=True)
    return list(starts), list(zip(*(rank.ends for rank in seen), strict=True))


HEAD = (
    f"{'':<14}{'chunks':>7}{'step s':>9}{'simulated':>11}{'deviation':>11}"
    f"{'bubble':>9}{'simulated':>11}{'in spans':>10}{'simulated':>11}{'live':>7}"
)


def row(line: Line) -> str:
    """A line as aligned text under `HEAD`."""
    return (
        f"{line.schedule:<14}{line.chunks:>7}{line.measured:>9.3f}{line.predicted:>11.3f}"
        f"{line.deviation:>+11.2%}{line.bubble:>9.1%}{line.predicted_bubble:>11.1%}"
        f"{line.in_spans:>10.1%}{line.predicted_in_spans:>11.1%}{line.peak_activations:>7.2f}"
    )


def overheads() -> Iterator[dict[str, Any]]:
    """Microseconds of processor time per action, when blocks take no time, of the thread that runs
    the engine, in its least disturbed step: on the ranks that do nothing else, and on the two with
    embedding and head, which are real."""
    for name, ranks, chunks, microbatches in OVERHEAD:
        config = config_of(name, ranks, chunks, microbatches, 0.0)
        schedule = step_schedule(config, microbatches)
        actions = [len(rank) for rank in lower(schedule).ranks]
        each = [
            1e6 * min(rank.busy) / count
            for rank, count in zip(play(config, schedule, OVERHEAD_STEPS), actions, strict=True)
        ]
        ends = {schedule.rank_of[0], schedule.rank_of[-1]}
        inner = statistics.mean(one for rank, one in enumerate(each) if rank not in ends)
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


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--microbatches", type=int, help="default: two per rank")
    parser.add_argument("--milliseconds", type=float, default=200.0, help="of a rank's F, B, and W")
    parser.add_argument("--steps", type=int, default=2, help="timed steps, after one that is not")
    parser.add_argument("--schedules", nargs="+", choices=tuple(CHUNKS), default=tuple(CHUNKS))
    parser.add_argument("--write", type=Path, help="write all measurements as JSON to this file")
    given = parser.parse_args()
    given.microbatches = given.microbatches or 2 * given.ranks
    return given


def main() -> None:
    given = arguments()
    idle = config_of("1f1b", given.ranks, 1, given.microbatches, 0.0)
    comm = max(in_world(transfer_seconds, idle))
    print(f"{given.ranks} ranks, {given.microbatches} microbatches, transfer {comm * 1e6:.0f} us")
    print(HEAD)
    lines = []
    for name in given.schedules:
        lines.append(measure(name, given, comm))
        print(row(lines[-1]), flush=True)
    found = list(overheads())
    if given.write:
        settings = ("ranks", "microbatches", "milliseconds", "steps")
        document = {
            "commit": commit(),
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "machine": machine(),
            "config": {name: getattr(given, name) for name in settings},
            "transfer_seconds": comm,
            "schedules": [asdict(line) for line in lines],
            "overhead": found,
        }
        given.write.parent.mkdir(parents=True, exist_ok=True)
        given.write.write_text(json.dumps(document, indent=2) + "\n")
        print(f"wrote {given.write}")


if __name__ == "__main__":
    main()
