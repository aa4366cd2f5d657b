"""How much communication of sharded data parallelism is exposed on a slow link.

Two emulated hosts with one rank each are joined by a shaped link (`lab_ranks.py`). The GPT of
`peers/workload.py` with a small vocabulary is trained in fp32, in turns in the same processes, by
ours at ZeRO stages 1 to 3 and by FSDP2 at its stages 2 and 3. For ours three more times are shown:
a step without transfers, over torch's fake process group; the backward part of that; and the
transfers of a step alone, in their order. The best that overlap can reach is the longer one of
compute and communication. A stage is compared with the same stage of FSDP2, and stage 1 with its
stage 2.

Sending costs processor time, which on a machine without a free core is taken from computing. With
`--compute-core 0` both ranks, of ours and of the peer, share that core for computing, and sending
uses the other cores, as transfers of GPUs have engines of their own. With `--blocks wait` our
blocks have their weights but only wait for as long as they would compute, so the rest is what the
order of transfers exposes. Nothing can hide the gradients of the first attention and of the tables;
with more `--layers` their share is smaller. With a larger `--batch`, sending takes less processor
time relative to computing.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "peers"))

from harness import Spread, describe_measurement
from lab_ranks import LIMIT, Host, open_hosts, start_ranks
from workload import WORKLOAD, Workload

from megaframe.config import EmulationConfig

if TYPE_CHECKING:
    from megaframe.distributed.mesh import Mesh
    from megaframe.parameters.parameter import Module

RANKS = 2
SHAPE = replace(WORKLOAD, vocab=2048)
STAGES = (1, 2, 3)
WAITS = EmulationConfig(forward=0.05, backward=0.05, weight=0.05)
"""Seconds of a block, about as long as a real one computes."""
LATE = 0.6
"""Share of the MLP in them."""
BESIDE = {1: "FSDP2 2", 2: "FSDP2 2", 3: "FSDP2 3"}
"""The peer to which each stage is compared."""

Measured = dict[str, list[float]]
"""Seconds of a step by what was done, one number per round."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rates", nargs="+", default=["2200mbit", "3300mbit"])
    parser.add_argument("--blocks", choices=("compute", "wait"), default="compute")
    parser.add_argument("--layers", type=int, default=SHAPE.layers)
    parser.add_argument("--batch", type=int, default=SHAPE.batch, help="samples of both ranks")
    parser.add_argument("--compute-core", type=int, help="the one core on which all ranks compute")
    parser.add_argument("--beside", choices=("fsdp2", "nobody"), default="fsdp2")
    parser.add_argument("--steps", type=int, default=3, help="timed steps of each turn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", type=Path, help="write all measurements as JSON to this file")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        print(json.dumps(measure(arguments)))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that hosts are removed
    results = {}
    for rate in arguments.rates:
        with open_hosts(RANKS, rate) as hosts:
            results[rate] = run_in_world(hosts, arguments)
        show(rate, results[rate])
    if arguments.write:
        document = {
            **describe_measurement(),
            "config": {**asdict(make_shape(arguments)), "ranks": RANKS, "precision": "fp32"}
            | {"threads of a rank": 1, "steps": arguments.steps, "rounds": arguments.rounds}
            | {"blocks": arguments.blocks, "compute core": arguments.compute_core}
            | ({**WAITS.model_dump(), "late": LATE} if arguments.blocks == "wait" else {}),
            "summary": {rate: summarize(measured) for rate, measured in results.items()},
            "seconds": results,
        }
        arguments.write.parent.mkdir(parents=True, exist_ok=True)
        arguments.write.write_text(json.dumps(document, indent=2) + "\n")
        print(f"wrote {arguments.write}")


def make_shape(arguments: argparse.Namespace) -> Workload:
    """Return the workload that is trained."""
    return replace(SHAPE, layers=arguments.layers, batch=arguments.batch)


def run_in_world(hosts: Sequence[Host], arguments: argparse.Namespace) -> Measured:
    """Run one rank on each host and return what they measured: in each round, the slower one's
    time."""
    options = ("blocks", "layers", "batch", "beside", "steps", "rounds")
    command = [__file__, *(f"--{name}={getattr(arguments, name)}" for name in options)]
    if arguments.compute_core is not None:
        command.append(f"--compute-core={arguments.compute_core}")
    first, second = (json.loads(answer) for answer in start_ranks(hosts, command))
    return {name: [*map(max, first[name], second[name])] for name in first}


def measure(arguments: argparse.Namespace) -> Measured:
    """Measure everything on one rank, once per round after an uncounted one."""
    import torch
    from data_torch import step_of

    from megaframe.distributed.collectives import barrier
    from megaframe.distributed.mesh import Mesh
    from megaframe.layout import Layout

    torch.set_num_threads(1)
    mesh = Mesh(Layout(data=RANKS), device="cpu", timeout=LIMIT)
    turns: list[list[Callable[[], dict[str, float]]]] = []
    for stage in STAGES:
        rank_runner = MegaframeRank(mesh, stage, make_shape(arguments))
        if arguments.blocks == "wait":
            rank_runner.let_blocks_wait()
        turns.append([rank_runner.step, rank_runner.compute, rank_runner.communicate])
    peers = arguments.beside == "fsdp2" and arguments.blocks == "compute"
    for way in ("fsdp2", "fsdp3") if peers else ():
        turns.append(
            [make_timed(f"FSDP2 {way[-1]}", step_of(make_shape(arguments), way, "fp32", RANKS))]
        )
    if arguments.compute_core is not None:  # only this thread: those that send were started before
        os.sched_setaffinity(0, {arguments.compute_core})
    seconds: Measured = {}
    for number in range(1 + arguments.rounds):
        first = number % len(turns)  # the first one is slower, so they rotate
        for turn in chain(*turns[first:], *turns[:first]):
            barrier(mesh.world)
            turn()  # uncounted, because a step finishes transfers of the one before
            step_times = [turn() for _ in range(arguments.steps)]
            for name in step_times[0] if number else ():
                median = statistics.median(times[name] for times in step_times)
                seconds.setdefault(name, []).append(median)
    barrier(mesh.world)
    mesh.close()
    return seconds


def make_timed(name: str, work: Callable[[], object]) -> Callable[[], dict[str, float]]:
    """Return a function that does the work and returns its duration under `name`."""

    def run() -> dict[str, float]:
        start = time.perf_counter()
        work()
        return {name: time.perf_counter() - start}

    return run


class MegaframeRank:
    """megaframe on one rank at one ZeRO stage. Its turns return {what was measured: seconds}."""

    def __init__(self, mesh: Mesh, zero: int, shape: Workload) -> None:
        import torch
        import torch.distributed as dist
        import torch.testing._internal.distributed.fake_pg  # registers the backend
        from ours import make_overrides

        from megaframe.config import load
        from megaframe.training.train_step import TrainStep

        settings = (
            f"model.vocab={shape.vocab}",
            f"model.layers={shape.layers}",
            f"train.global_batch={shape.batch}",
            f"train.microbatch={shape.batch // RANKS}",
            f"parallel.zero={zero}",
            "train.recompute_blocks=0",
        )
        config = load(None, [*make_overrides("fp32", 1, Path("no-data")), *settings])
        self.mesh, self.zero, self.shape, self._backward = mesh, zero, shape, 0.0
        self.train_step = TrainStep(config, mesh, lambda part: nullcontext())
        self.optimizer, self.stage = self.train_step.optimizer, self.train_step.stages[0]
        self.sharded = self.train_step.sharded_parameters
        self.optimizer.initialize(shape.seed)
        self.fake = dist.new_group(backend="fake")
        torch.manual_seed(shape.seed + 1 + mesh.rank)
        backward = self.stage.backward

        def run_backward(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            gradients = backward(*args, **kwargs)
            self._backward = time.perf_counter() - start
            return gradients

        setattr(self.stage, "backward", run_backward)  # noqa: B010

    def let_blocks_wait(self) -> None:
        """Make blocks wait instead of compute; they keep their weights."""
        import torch

        from megaframe.model.block import EmulatedBlock, TransformerBlock
        from megaframe.model.layer_inputs import MicrobatchInputs
        from megaframe.model.pass_state import PassState

        seconds = WAITS.model_dump()
        first, second = (
            EmulatedBlock(EmulationConfig(**{kind: share * seconds[kind] for kind in seconds}))
            for share in (1 - LATE, LATE)
        )

        class WaitingBlock(TransformerBlock):
            def __call__(
                self, x: torch.Tensor, inputs: MicrobatchInputs, state: PassState
            ) -> torch.Tensor:
                x = state.boundary.cross(first(x, inputs, state), self.mlp)
                return second(x, inputs, state)

        for block in self.stage.blocks:
            block.__class__ = WaitingBlock

    def step(self) -> dict[str, float]:
        """Run a step as in training."""
        return {f"megaframe {self.zero}": self._step()}

    def compute(self) -> dict[str, float]:
        """Run a step in which gradients and weights are not transferred. Its backward pass is also
        timed."""
        with self.suppress_transfers():
            times = self._step()
        return {f"compute {self.zero}": times, f"backward {self.zero}": self._backward}

    def communicate(self) -> dict[str, float]:
        """Run only the transfers of a step, in their order."""
        start = time.perf_counter()
        sharded, units = self.sharded, self.stage.units
        sharded.start_step()
        for unit, after in zip(units, (*units[1:], None), strict=True):
            self._pass(unit, after)
        backward = units[-2:0:-1]  # the first and the last unit do not need their values again
        sharded.reduce(units[-1], last=True)
        for unit, after in zip(backward, (*backward[1:], None), strict=True):
            self._pass(unit, after)
            if unit.second_half is not None:
                sharded.reduce(unit.second_half, last=True)
            sharded.reduce(unit, last=True)
        sharded.reduce(units[0], last=True)
        sharded.reduce_vectors(0)
        sharded.wait_for_gradients()
        self.optimizer.load_state(self.optimizer.read_state())  # gathers the weights again
        return {f"communication {self.zero}": time.perf_counter() - start}

    def _pass(self, unit: Module, after: Module | None) -> None:
        self.sharded.gather(unit)
        if after is not None:
            self.sharded.prefetch(after)
        self.sharded.release(unit)

    def _step(self) -> float:
        import torch
        from data_workload import draw

        from megaframe.data.microbatch import Microbatch
        from megaframe.distributed.collectives import all_reduce

        start = time.perf_counter()
        tokens, targets = draw(self.shape, RANKS)
        microbatch = Microbatch(tokens, targets, torch.arange(len(tokens)))
        valid = all_reduce(torch.tensor(targets.numel()), self.mesh.data_control_group).wait()
        result = self.train_step.train([microbatch], 0, 1 / int(valid))
        float(result.loss)
        return time.perf_counter() - start

    @contextmanager
    def suppress_transfers(self) -> Iterator[None]:
        """Send nothing inside this context; what would have been received is whatever the buffers
        hold."""
        self.finish()
        shared = self.mesh.group("data")
        real = shared.handle
        object.__setattr__(shared, "handle", self.fake)  # all buckets share this group object
        yield
        self.finish()
        object.__setattr__(shared, "handle", real)

    def finish(self) -> None:
        """Return when no transfer is in progress."""
        for unit in self.stage.units:
            self._pass(unit, None)


def summarize(measured: Measured) -> dict[str, dict[str, float | dict[str, float]]]:
    """Return by stage: medians, the step's time over the longer one of compute and communication,
    and the peer's step time over ours, with its range over rounds."""
    summary: dict[str, dict[str, float | dict[str, float]]] = {}
    for stage in STAGES:
        parts = ("megaframe", "compute", "backward", "communication")
        seconds = {part: statistics.median(measured[f"{part} {stage}"]) for part in parts}
        longest = max(seconds["compute"], seconds["communication"])
        summary[str(stage)] = {**seconds, "over the longer": seconds["megaframe"] / longest}
        if BESIDE[stage] in measured:
            peer_seconds, own_seconds = measured[BESIDE[stage]], measured[f"megaframe {stage}"]
            ratios = [peer / own for peer, own in zip(peer_seconds, own_seconds, strict=True)]
            summary[str(stage)] |= {
                BESIDE[stage]: statistics.median(peer_seconds),
                "times the peer": statistics.median(peer_seconds) / seconds["megaframe"],
                "in rounds": asdict(Spread.of(ratios)),
            }
    return summary


def show(rate: str, measured: Measured) -> None:
    """Print one rate as a table: milliseconds and ratios."""
    heads = ["step", "compute", "backward", "commun.", "over longer"]
    heads += ["FSDP2", "times it"] if BESIDE[STAGES[0]] in measured else []
    print(f"\n{rate:<12}" + "".join(f"{head:>13}" for head in heads))
    for stage, line in summarize(measured).items():
        numbers = [value for value in line.values() if isinstance(value, float)]
        cells = [f"{1e3 * value:.0f} ms" for value in numbers[:4]] + [f"{numbers[4]:.3f}"]
        if len(numbers) > 5:
            cells += [f"{1e3 * numbers[5]:.0f} ms", f"{numbers[6]:.2f}"]
        print(f"{'stage ' + stage:<12}" + "".join(f"{cell:>13}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
