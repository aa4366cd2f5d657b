"""What islands are worth on slow links, beside data parallelism with and without compression.

A small GPT trains on the demo's corpus (`make demo` makes it), the first half of the steps as data
parallelism and from that checkpoint on by each method, with the same batches. Losses and bytes are
those of whole runs on this machine: where a method sends does not change them. Speeds are those of
shorter runs on hosts of a network lab with one single-threaded rank each, in turns, beside the same
hosts that train alone on their share of the batch and send nothing. Speeds need Linux and root.

sudo python benchmarks/network/islands.py --write benchmarks/results/islands.json
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "benchmarks")]

from harness import describe_measurement  # noqa: E402
from network_lab import Host, Link, emulate_hosts, run_on_hosts  # noqa: E402

RUNS = Path("runs/islands-benchmark")
MODEL = ["model.layers=2", "model.hidden=128", "model.ffn=384"]
BATCH = 64
EVERY = 8
"""Steps between synchronisations; timed steps are a multiple of it."""
ISLANDS = [
    "parallel.islands={count}",
    f"sync.every={EVERY}",
    "sync.fragments=2",
    "sync.delay=2",
    "sync.compress=int4",
    "sync.mix=0.05",
    "sync.outer_lr=0.9",
    "sync.outer_momentum=0.8",
]
CODECS = {
    "fp16": ["parallel.compress=fp16"],
    "8 bits": ["parallel.compress=int8"],
    "4 bits": ["parallel.compress=int4"],
    "top-k, 1%": ["parallel.compress=topk", "parallel.compress_keep=0.01"],
    "threshold, 1%": ["parallel.compress=threshold", "parallel.compress_keep=0.01"],
    "random-k, 1%": ["parallel.compress=randomk", "parallel.compress_keep=0.01"],
    "PowerSGD, rank 4": ["parallel.compress=powersgd", "parallel.compress_keep=4"],
}
# With ZeRO weights would be gathered, and those are not compressed.
METHODS = {
    "data parallel": [],
    **{name: ["parallel.zero=0", *keys] for name, keys in CODECS.items()},
    "islands": ISLANDS,
}
PLAIN = "data parallel"
ALONE = "alone"
"""Each host trains by itself, on its share of the batch."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--counts", type=int, nargs="+", default=[2, 4], help="islands")
    parser.add_argument("--rates", nargs="+", default=["50mbit", "200mbit"])
    parser.add_argument("--latency", default="50ms", help="of what a host sends")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--steps", type=int, default=400, help="of the runs for losses")
    parser.add_argument("--timed-steps", type=int, default=2 * EVERY)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=("losses", "speeds"))
    parser.add_argument("--write", type=Path, help="write all measurements as JSON to this file")
    arguments = parser.parse_args()
    if arguments.timed_steps % EVERY:
        parser.error(f"--timed-steps {arguments.timed_steps} is no multiple of {EVERY}")
    if PLAIN not in arguments.methods:
        parser.error(f"--methods: {PLAIN!r} is what all others stand beside")
    os.chdir(ROOT)
    document: dict[str, Any] = {
        **describe_measurement(),
        "config": {name: value for name, value in vars(arguments).items() if name != "write"}
        | {"model": MODEL, "batch": BATCH, "methods": METHODS},
    }
    if arguments.only != "speeds":
        document["losses"] = measure_losses(arguments)
    if arguments.only != "losses":
        document["speeds"] = {}
        for count in arguments.counts:
            for rate in arguments.rates:
                speeds = measure_speeds(arguments, count, rate)
                document["speeds"][f"{count} at {rate}"] = speeds
                show_speeds(count, rate, speeds)
    if arguments.write:
        arguments.write.write_text(json.dumps(document, indent=2) + "\n")
        print(f"wrote {arguments.write}")


def measure_losses(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the last validation loss, and the bytes that all ranks send for a token, of each
    number of islands and method."""
    first, length = run_first_half(arguments.steps, min(arguments.counts))
    found: dict[str, dict[str, Any]] = {}
    for count in arguments.counts:
        rows = found[str(count)] = {}
        for method in arguments.methods:
            folder = RUNS / "second-half"
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(first, folder)
            lines = run_here(folder, method, count, length)[arguments.steps // 2 :]
            sent = sum(line["bytes"]["data"] + line["bytes"].get("islands", 0) for line in lines)
            tokens = sum(line["tokens"] for line in lines)
            rows[method] = {
                "loss": lines[-1]["eval_loss"],
                "bytes_per_token": sent * count / tokens,
            }
            show_loss(count, method, rows)
    return found


def run_first_half(steps: int, count: int) -> tuple[Path, list[str]]:
    """Train half of the steps as data parallelism; return the run, and what to continue it with."""
    half, first = steps // 2, RUNS / "first-half"
    length = [f"train.steps={steps}", f"train.eval_every={half}", f"checkpoint.every={half}"]
    shutil.rmtree(RUNS, ignore_errors=True)
    run_here(first, PLAIN, count, [*length, f"train.stop_after={half}"])
    return first, length


def run_here(folder: Path, method: str, count: int, length: list[str]) -> list[dict[str, Any]]:
    """Run or continue a run with so many ranks, and return the lines of all of its steps."""
    words = make_overrides(folder, METHODS[method], count, [f"train.global_batch={BATCH}", *length])
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    output = folder.with_suffix(".txt")
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("w") as file:
        command = [*launcher, "pretrain_gpt.py", *words]
        ended = subprocess.run(command, env=environment, stdout=file, stderr=file, check=False)
    if ended.returncode:
        sys.exit(output.read_text()[-4000:])
    return read_lines(folder)


def measure_speeds(arguments: argparse.Namespace, count: int, rate: str) -> dict[str, list[float]]:
    """Return tokens a second of all islands together, one number a round."""
    speeds: dict[str, list[float]] = {name: [] for name in [ALONE, *arguments.methods]}
    with emulate_hosts([Link(rate, arguments.latency)] * count) as hosts:
        for _ in range(arguments.rounds):
            for method in speeds:
                speeds[method].append(time_steps(hosts, method, arguments.timed_steps))
    return speeds


def time_steps(hosts: Sequence[Host], method: str, steps: int) -> float:
    """Return tokens a second of all hosts over so many steps, after a warm-up of EVERY steps."""
    count = len(hosts)
    # One more step: at the end of a run everything is synchronised at once.
    length = [f"train.steps={EVERY + steps + 1}", "train.eval_every=0", "checkpoint.every=0"]
    with open(os.devnull, "w") as nowhere:
        if method == ALONE:
            share = [f"train.global_batch={BATCH // count}"]
            folders = [RUNS / f"alone-{number}" for number in range(count)]
            words = make_overrides(RUNS / "alone-$NODE_RANK", [], 1, [*share, *length])
            line = " ".join([sys.executable, "pretrain_gpt.py", *words])
            command = ["sh", "-c", f"exec {line}"]
        else:
            folders = [RUNS / "together"]
            whole = [f"train.global_batch={BATCH}"]
            words = make_overrides(folders[0], METHODS[method], count, [*whole, *length])
            command = [sys.executable, "-m", "torch.distributed.run", "pretrain_gpt.py", *words]
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        result = run_on_hosts(hosts, command, ranks=1, folder=RUNS / "lab", output=nowhere)
    if result.status:
        sys.exit((RUNS / "lab/host-0.txt").read_text()[-4000:])
    total = 0.0
    for folder in folders:
        timed = read_lines(folder)[EVERY - 1 : EVERY + steps]
        tokens = sum(line["tokens"] for line in timed[1:])
        total += tokens / (timed[-1]["at"] - timed[0]["at"])
    return total


def make_overrides(folder: Path, keys: list[str], count: int, more: list[str]) -> list[str]:
    """Return the words after `pretrain_gpt.py`."""
    given = [key.format(count=count) for key in keys]
    fixed = ["train.microbatch=8", "metrics.every=1"]
    return ["--config", "configs/demo.yaml", f"run.dir={folder}", *MODEL, *fixed, *given, *more]


def read_lines(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of the steps that a run has written so far."""
    text = (folder / "metrics.jsonl").read_text().rpartition("\n")[0]
    return [line for line in map(json.loads, text.splitlines()) if "tokens" in line]


def show_loss(count: int, method: str, rows: dict[str, dict[str, float]]) -> None:
    plain, row = rows[PLAIN], rows[method]
    if method == PLAIN:
        print(f"{f'{count} ranks':<22}{'loss':>8}{'beside':>10}{'bytes/token':>14}{'fewer':>8}")
    beside = row["loss"] / plain["loss"] - 1
    fewer = plain["bytes_per_token"] / row["bytes_per_token"]
    print(
        f"{method:<22}{row['loss']:>8.4f}{beside:>10.2%}{row['bytes_per_token']:>14.2f}{fewer:>8.1f}",
        flush=True,
    )


def show_speeds(count: int, rate: str, speeds: dict[str, list[float]]) -> None:
    alone = statistics.median(speeds[ALONE])
    print(f"{f'{count} ranks at {rate}':<22}{'tokens/s':>8}{'of alone':>10}   spread")
    for method, values in speeds.items():
        median, spread = statistics.median(values), f"{min(values):.0f}-{max(values):.0f}"
        print(f"{method:<22}{median:>8.0f}{median / alone:>10.1%}   {spread}", flush=True)


if __name__ == "__main__":
    main()
