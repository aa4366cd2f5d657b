"""What is gained by interleaving a forward and a backward pass when tokens travel to experts over a
slow link.

Four emulated hosts with one rank each are joined by shaped links (`lab_ranks.py`): two pipeline
ranks times two ranks that divide the experts. The same steps of the same model run in turns in the
same processes, with and without `parallel.expert_overlap`; both answers must be bitwise equal. Four
ranks share the machine's cores, so only the time of the links can be hidden.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness import Spread, describe_measurement
from lab_ranks import LIMIT, open_hosts, start_ranks

RANKS, SCHEDULE = 4, "dualpipe-v"
SHAPE: Mapping[str, Any] = {
    "layers": 8,
    "hidden": 256,
    "heads": 4,
    "vocab": 512,
    "activation": "swiglu",
}
MOE: Mapping[str, Any] = {"experts": 8, "ffn": 256, "top_k": 2}
MICROBATCHES, SEQ = 8, 256
WAYS = {"one after the other": False, "by turns": True}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rates", nargs="+", default=["100mbit", "200mbit", "400mbit"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", type=Path, help="write all measurements as JSON to this file")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        print(json.dumps(measure(arguments)))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that hosts are removed
    results: dict[str, dict[str, Any]] = {}
    for rate in arguments.rates:
        with open_hosts(RANKS, rate) as all_hosts:
            answers = start_ranks(all_hosts, (__file__, f"--rounds={arguments.rounds}"))
        rank_results = [json.loads(answer.splitlines()[-1]) for answer in answers]
        seconds = {way: [*map(max, *(result[way] for result in rank_results))] for way in WAYS}
        results[rate] = {"seconds": seconds, "summary": summarize(seconds)}
        before, now = (statistics.median(seconds[way]) for way in WAYS)
        speedup = results[rate]["summary"]["speedup in rounds"]
        print(
            f"{rate:<10} one after the other {before:.3f} s, by turns {now:.3f} s: "
            f"{before / now:.3f} times as fast ({speedup['low']:.3f}-{speedup['high']:.3f})",
            flush=True,
        )
    if arguments.write:
        document = {
            **describe_measurement(),
            "config": {"model": {**SHAPE, "moe": MOE}, "schedule": SCHEDULE, "seq": SEQ}
            | {"microbatches": MICROBATCHES, "threads of a rank": 1, "rounds": arguments.rounds},
            "results": results,
        }
        arguments.write.parent.mkdir(parents=True, exist_ok=True)
        arguments.write.write_text(json.dumps(document, indent=2) + "\n")
        print(f"wrote {arguments.write}")


def summarize(seconds: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Return the spreads of both variants, and of the speedup within rounds."""
    before, now = (seconds[way] for way in WAYS)
    speedups = [slower / other for slower, other in zip(before, now, strict=True)]
    results = {way: asdict(Spread.of(values)) for way, values in seconds.items()}
    return {**results, "speedup in rounds": asdict(Spread.of(speedups))}


def measure(arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Measure on one rank: a step of each variant per round, after an uncounted one."""
    import torch

    from megaframe.config import RunConfig
    from megaframe.data.microbatch import Microbatch
    from megaframe.distributed.collectives import barrier
    from megaframe.distributed.mesh import Mesh
    from megaframe.layout import Layout
    from megaframe.metrics import StepTimer
    from megaframe.training.train_step import TrainStep

    torch.set_num_threads(1)
    layout = Layout(pipeline=2, data=2, expert=2)
    mesh = Mesh(layout, device="cpu", timeout=LIMIT)
    train_steps = {}
    for way, overlap in WAYS.items():
        config = RunConfig.model_validate(
            {
                "model": {**SHAPE, "moe": MOE},
                "train": {"seq": SEQ, "global_batch": 2 * MICROBATCHES, "precision": "fp32"},
                "parallel": {
                    **{"pipeline": 2, "chunks": 2, "schedule": SCHEDULE, "expert": 2},
                    **{"data": 2, "expert_overlap": overlap},
                },
            }
        )
        train_steps[way] = TrainStep(config, mesh, StepTimer().time)
        train_steps[way].optimizer.initialize(1)
    generator = torch.Generator().manual_seed(mesh.coordinate["data"])
    microbatches = []
    for number in range(MICROBATCHES):
        tokens = torch.randint(0, SHAPE["vocab"], (1, SEQ), generator=generator)
        microbatches.append(Microbatch(tokens, tokens, torch.tensor([number])))
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(1 + arguments.rounds):
        norms = set()
        for way, train_step in train_steps.items():
            barrier(mesh.world)
            start = time.perf_counter()
            result = train_step.train(microbatches, number, 1.0 / (2 * MICROBATCHES * SEQ))
            barrier(mesh.world)
            if number:
                seconds[way].append(time.perf_counter() - start)
            norms.add(float(result.update.grad_norm))
        if len(norms) > 1:
            sys.exit(f"round {number}: the gradients' norms differ: {norms}")
    mesh.close()
    return seconds


if __name__ == "__main__":
    main()
