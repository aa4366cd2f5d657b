"""How much communication of tensor parallel linears is exposed on a slow link.

Two emulated hosts with one rank each are joined by a shaped link (`lab_ranks.py`). A column and a
row linear run forward and backward, in turns in the same processes, in four ways: with every
transfer finished before anything else is done (`parallel.serial`), overlapped, overlapped in
several parts (`parallel.tensor_chunks`), and without transfers, over torch's fake process group.
The exposed time of a way is its time minus that of the last way; its ratio is to that of the first.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness import Spread, describe_measurement
from lab_ranks import LIMIT, Host, open_hosts, start_ranks

if TYPE_CHECKING:
    from megaframe.tensor_parallel.axis import TensorParallel
    from megaframe.tensor_parallel.linear import Linear

RANKS = 2
ALONE, SERIAL = "compute alone", "serial"
CHUNKS = {"overlapped": 1, "2 parts": 2, "4 parts": 4}
WAYS = (ALONE, SERIAL, *CHUNKS)
PASSES = ("column forward", "row forward", "column backward", "row backward")
SUMS = {"forward": PASSES[:2], "backward": PASSES[2:]}

Seconds = dict[str, dict[str, list[float]]]
"""By way and pass, one number per round."""


@dataclass(frozen=True)
class ExposedTime:
    """One way compared with compute alone, in seconds.

    Attributes:
        ratio: Of what is exposed to that of serial, for the medians and within rounds.
    """

    seconds: Spread
    exposed: float
    ratio: float
    ratio_in_rounds: Spread


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rates", nargs="+", default=["400mbit", "800mbit", "1600mbit"])
    parser.add_argument("--rows", type=int, default=2048, help="of both ranks together")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--ffn", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
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
            "config": {"ranks": RANKS, "precision": "fp32", "threads of a rank": 1}
            | {name: getattr(arguments, name) for name in ("rows", "hidden", "ffn", "rounds")},
            "summary": {rate: summarize(seconds) for rate, seconds in results.items()},
            "seconds": results,
        }
        arguments.write.parent.mkdir(parents=True, exist_ok=True)
        arguments.write.write_text(json.dumps(document, indent=2) + "\n")
        print(f"wrote {arguments.write}")


def run_in_world(hosts: Sequence[Host], arguments: argparse.Namespace) -> Seconds:
    """Run one rank on each host and return what they measured: in each round, the slower one's
    time."""
    shape = [f"--{name}={getattr(arguments, name)}" for name in ("rows", "hidden", "ffn", "rounds")]
    answers = start_ranks(hosts, (__file__, *shape))
    first, second = (json.loads(answer) for answer in answers)
    return {
        way: {name: [*map(max, first[way][name], second[way][name])] for name in PASSES}
        for way in WAYS
    }


def measure(arguments: argparse.Namespace) -> Seconds:
    """Measure both linears on one rank, each way once per round, after an uncounted round."""
    import torch
    import torch.distributed as dist
    import torch.testing._internal.distributed.fake_pg  # registers the backend

    from megaframe.distributed.collectives import barrier
    from megaframe.distributed.mesh import Mesh
    from megaframe.layout import Layout
    from megaframe.tensor_parallel.axis import TensorParallel

    torch.set_num_threads(1)
    torch.manual_seed(arguments.rank)
    mesh = Mesh(Layout(tensor=RANKS), device="cpu", timeout=LIMIT)
    group = mesh.group("tensor")
    fake = dist.new_group(backend="fake")
    ways = {way: TensorParallel(group, chunks=CHUNKS.get(way, 1)) for way in WAYS}
    ways[SERIAL] = replace(ways[SERIAL], group=replace(group, serial=True))
    ways[ALONE] = replace(ways[ALONE], group=replace(group, handle=fake))
    linears = (
        (
            "column",
            make_linear("column", arguments.hidden, arguments.ffn, 0, mesh.rank, ways[ALONE]),
        ),
        ("row", make_linear("row", arguments.ffn, arguments.hidden, 1, mesh.rank, ways[ALONE])),
    )
    seconds: Seconds = {way: {name: [] for name in PASSES} for way in WAYS}
    for number in range(1 + arguments.rounds):
        for way, tensor in ways.items():
            for kind, module in linears:
                module.tensor = tensor
                barrier(group)
                forward, backward = measure_passes(module, arguments, group)
                if number:
                    seconds[way][f"{kind} forward"].append(forward)
                    seconds[way][f"{kind} backward"].append(backward)
    barrier(group)
    mesh.close()
    return seconds


def make_linear(
    name: str, inputs: int, outputs: int, split: int, rank: int, tensor: TensorParallel
) -> Linear:
    """Return a linear with random weights and with the storage that it has in a run."""
    import torch

    from megaframe.architecture.linear import LinearSpec
    from megaframe.tensor_parallel.linear import Linear

    linear = Linear(name, LinearSpec((inputs,), (outputs,), std=0.02, split=split), tensor)
    box = linear.weight.spec.find_local_box({"tensor": rank}, {"tensor": RANKS})
    linear.weight.bind(box, lambda: None)
    linear.weight.value = 0.02 * torch.randn(box.shape)
    linear.weight.grad = torch.zeros(box.shape)
    return linear


def measure_passes(
    module: Linear, arguments: argparse.Namespace, group: Any
) -> tuple[float, float]:
    """Return the seconds of one forward and of one backward, started on all ranks together."""
    import torch

    from megaframe.distributed.collectives import barrier
    from megaframe.tensor_parallel.deferred_gradients import DeferredGradients

    module.weight.fresh = True
    rows = arguments.rows // RANKS if module.column else arguments.rows
    width = arguments.hidden if module.column else arguments.ffn // RANKS
    x = torch.randn(rows, width, requires_grad=True)
    barrier(group)
    start = time.perf_counter()
    y = module(x, DeferredGradients())
    forward = time.perf_counter() - start
    dy = torch.randn_like(y)
    barrier(group)
    start = time.perf_counter()
    y.backward(dy)
    return forward, time.perf_counter() - start


def summarize(seconds: Seconds) -> dict[str, dict[str, Any]]:
    """Compare each way with compute alone, by pass and for the sum of both linears' passes."""
    summary: dict[str, dict[str, Any]] = {}
    for name, summed in {**{name: (name,) for name in PASSES}, **SUMS}.items():
        rounds = {
            way: [
                sum(parts)
                for parts in zip(*(seconds[way][pass_name] for pass_name in summed), strict=True)
            ]
            for way in WAYS
        }
        summary[name] = {way: asdict(compute_exposed(rounds, way)) for way in WAYS}
    return summary


def compute_exposed(rounds: dict[str, list[float]], way: str) -> ExposedTime:
    """Return one way of one pass, given the seconds of every round."""
    median = {name: statistics.median(values) for name, values in rounds.items()}
    ratios = [
        (seconds - alone) / (serial - alone)
        for seconds, alone, serial in zip(rounds[way], rounds[ALONE], rounds[SERIAL], strict=True)
    ]
    longer = median[way] - median[ALONE]
    ratio = longer / (median[SERIAL] - median[ALONE])
    return ExposedTime(Spread.of(rounds[way]), longer, ratio, Spread.of(ratios))


def show(rate: str, seconds: Seconds) -> None:
    """Print one rate as a table: milliseconds, exposed milliseconds, and their ratio to serial."""
    print(f"\n{rate:<18}" + "".join(f"{way:>20}" for way in WAYS))
    for name, ways in summarize(seconds).items():
        cells = [f"{1e3 * ways[ALONE]['seconds']['median']:.0f} ms"]
        for way in WAYS[1:]:
            result = ways[way]
            cells.append(f"{1e3 * result['exposed']:+.0f} ms ({result['ratio']:.2f})")
        print(f"{name:<18}" + "".join(f"{cell:>20}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
