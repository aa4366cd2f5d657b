"""The host's time for one block on a GPU's code path, without a GPU: launches do nothing.

    python benchmarks/gpu/host_time.py this=.
    python benchmarks/gpu/host_time.py before=../before after=. --rounds 5

Each argument is NAME=PATH of a checkout; they are measured in turns, each time in a process of its
own. The model has the parts of Llama 3 8B (`configs/bench/llama-8b-slice.yaml`), but is so narrow
that operators take little more than their dispatch. All kernels are Triton's, and none of them is
launched, so results are whatever was in memory. Tensors are on the CPU: choosing a library for
products costs two calls each that a GPU does not make, and no CUDA driver is called.

A block's share is the slope between two numbers of layers. Times are those of the thread that
launches, without those in which others had the processor: of the fastest tenth of steps, because
other work in the caches only adds to them. Calls and operators are counted, and do not depend on
the machine.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_CONFIG = "configs/bench/llama-8b-slice.yaml"
_NARROW = (
    *("model.hidden=32", "model.heads=4", "model.kv_heads=1", "model.ffn=64", "model.vocab=256"),
    *("train.seq=16", "train.global_batch=1", "train.microbatch=1", "train.precision=fp32"),
    *("optim.warmup=1", "run.device=cpu"),
    *(f"kernels.{key}=triton" for key in ("elementwise", "attention", "loss", "update")),
)
_AS_TRAINED = ("train.recompute=selective", "parallel.zero=2")
"""As `configs/llama3-8b.yaml` trains; the slice itself keeps everything and divides nothing."""
CASES = {"slice": (), "recompute, ZeRO 2": _AS_TRAINED}
_LAYERS = 2, 6
_WARMUP, _STEPS = 5, 100
_PHASES = {"F": "forward", "BW": "backward", "UPDATE": "update"}
_CHIP = 90
"""Compute capability for which kernels are shaped."""


class PhaseTimes:
    """The host's seconds of each phase of a step; called by a `TrainStep` as its trace."""

    def __init__(self) -> None:
        self.by_phase: dict[str, float] = dict.fromkeys(_PHASES.values(), 0.0)

    @contextmanager
    def __call__(self, _: object, kind: str) -> Iterator[None]:
        """Return a context that adds its time to the phase of an action's kind."""
        begun = time.thread_time()
        yield
        if kind in _PHASES:
            self.by_phase[_PHASES[kind]] += time.thread_time() - begun


class CallCounter:
    """Counts calls of Python functions of a checkout by room; a function for `sys.setprofile`."""

    def __init__(self, checkout: Path) -> None:
        self._packages = {
            str(checkout / "megaframe") + os.sep: "",
            str(checkout / "kernels/megaframe_kernels") + os.sep: "kernels/",
        }
        self.by_room: Counter[str] = Counter()

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """Take an event of the interpreter."""
        if event == "call":
            file = frame.f_code.co_filename
            for package, prefix in self._packages.items():
                if file.startswith(package):
                    self.by_room[prefix + file.removeprefix(package).partition(os.sep)[0]] += 1


def measure_layers(checkout: Path, overrides: Sequence[str], layers: int) -> dict[str, Any]:
    """Return seconds by phase, calls by room and operators of a step with this many layers."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from megaframe.config import load
    from megaframe.data.microbatch import Microbatch
    from megaframe.distributed.mesh import Mesh
    from megaframe.layout import Layout
    from megaframe.training.train_step import TrainStep

    class OperatorCount(TorchDispatchMode):
        number = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.number += 1
            return func(*args, **(kwargs or {}))

    torch.set_num_threads(1)
    config = load(str(checkout / _CONFIG), [*_NARROW, *overrides, f"model.layers={layers}"])
    mesh = Mesh(Layout.from_parallel(config.parallel, 1), device="cpu")
    times = PhaseTimes()
    train_step = TrainStep(config, mesh, trace=times)
    train_step.optimizer.initialize(0)
    words = torch.randint(0, 256, (1, config.train.seq + 1))
    microbatch = Microbatch(words[:, :-1], words[:, 1:], torch.zeros(1, dtype=torch.int64))
    samples: dict[str, list[float]] = {phase: [] for phase in _PHASES.values()}
    for number in range(_WARMUP + _STEPS):
        times.by_phase = dict.fromkeys(samples, 0.0)
        train_step.train([microbatch], number, 1.0)
        if number >= _WARMUP:
            for phase, seconds in times.by_phase.items():
                samples[phase].append(seconds)
    calls = CallCounter(checkout)
    sys.setprofile(calls)
    train_step.train([microbatch], 0, 1.0)
    sys.setprofile(None)
    with OperatorCount() as operators:
        train_step.train([microbatch], 0, 1.0)
    mesh.close()
    fastest = {phase: statistics.quantiles(values, n=10)[0] for phase, values in samples.items()}
    return {"seconds": fastest, "calls": calls.by_room, "operators": operators.number}


def measure(checkout: Path) -> dict[str, Any]:
    """Return what a block takes in each case: the slope between two numbers of layers."""
    from megaframe_kernels.device import capture_launches

    few, many = _LAYERS
    results: dict[str, Any] = {}
    gc.disable()  # a collection would be charged to the step in which it happens
    with capture_launches(lambda launch: None, _CHIP):
        for name, overrides in CASES.items():
            less = measure_layers(checkout, overrides, few)
            more = measure_layers(checkout, overrides, many)
            results[name] = {
                key: _divide_difference(less[key], more[key], many - few)
                for key in ("seconds", "calls")
            }
            results[name]["operators"] = (more["operators"] - less["operators"]) / (many - few)
    return results


def _divide_difference(
    less: Mapping[str, float], more: Mapping[str, float], by: int
) -> dict[str, float]:
    return {name: (more[name] - less.get(name, 0)) / by for name in more}


def run(checkout: Path) -> dict[str, Any]:
    """Measure a checkout in a process of its own."""
    paths = os.pathsep.join(map(str, (checkout, checkout / "kernels")))
    environment = {**os.environ, "PYTHONPATH": paths, "TRITON_INTERPRET": "1"}
    command = [sys.executable, str(Path(__file__).resolve()), "--measure", str(checkout)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{checkout}: {(done.stdout + done.stderr)[-4000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def format_results(rounds: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Return all results as text: for each case a line per checkout, and its calls by room."""
    lines = []
    for case in CASES:
        lines.append(f"{case}: a block's microseconds of host time, and what they go to")
        for name, results in rounds.items():
            seconds = [result[case]["seconds"] for result in results]
            phases = {
                phase: 1e6 * statistics.median(one[phase] for one in seconds)
                for phase in _PHASES.values()
            }
            totals = sorted(1e6 * sum(one.values()) for one in seconds)
            shown = ", ".join(f"{phase} {time:,.0f}" for phase, time in phases.items())
            last = results[-1][case]
            calls = sum(last["calls"].values())
            lines.append(
                f"  {name}: {statistics.median(totals):,.0f} ({totals[0]:,.0f} to "
                f"{totals[-1]:,.0f}; {shown}); {calls:,.0f} Python calls, "
                f"{last['operators']:,.0f} operators"
            )
            rooms = Counter(last["calls"]).most_common()
            lines.append(f"    {', '.join(f'{room} {n:,.0f}' for room, n in rooms if n)}")
    return "\n".join(lines)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkouts", metavar="NAME=PATH", nargs="*", default=[f"this={ROOT}"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.measure)))
        return
    checkouts = {}
    for checkout in arguments.checkouts:
        name, _, path = checkout.partition("=")
        if not (Path(path) / "megaframe").is_dir():
            parser.error(f"{checkout}: is not NAME=PATH of a checkout")
        checkouts[name] = Path(path).resolve()
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in checkouts}
    for _ in range(arguments.rounds):
        for name, path in checkouts.items():
            rounds[name].append(run(path))
    print(format_results(rounds))
    sys.path[:0] = [str(ROOT / "tools")]
    from trace_step import trace_step

    for name, path in checkouts.items():
        step = trace_step(path)
        print(
            f"{name}: {step['step_calls']:,} Python calls in {step['step_files']} files for a step "
            "of one layer in plain code on one rank"
        )


if __name__ == "__main__":
    main()
