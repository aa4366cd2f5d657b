"""Samples per second that one process reads, compared with megatron-core, and the cost of a data
order.

Both read the same synthetic token file from the page cache, so this measures the loaders and not a
disk. The order is that of a source of ten billion tokens, a sparse file.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import tracemalloc
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness import PEERS, ROOT, Spread, describe_measurement

from megaframe.data.gpt_dataset import GPTDataset
from megaframe.data.indexed_dataset import HEADER, MAGIC, VERSION, get_dtype_code
from megaframe.data.indexed_dataset_writer import IndexedDatasetWriter
from megaframe.data.shuffle import derive_source_key, sample_indices

SEQ, VOCAB = 256, 50304
HUGE_TOKENS, HUGE_DOCUMENT = 10_000_000_000, 2_000
VARIANTS: dict[str, tuple[str, ...]] = {
    "megaframe": ("--batch", "512"),
    "megaframe, document masks": ("--batch", "512", "--documents"),
    "megaframe, read ahead": ("--batch", "512", "--prefetch", "2"),
    "megaframe, 8 a step": ("--batch", "8"),
}


def write_synthetic(prefix: str, tokens: int) -> None:
    """Write random token ids as u16, in documents of about 500 tokens with a long tail."""
    draw = np.random.default_rng(0)
    with IndexedDatasetWriter(prefix, np.dtype("<u2")) as writer:
        while tokens > 0:
            lengths = np.maximum(2, draw.lognormal(5.7, 1.0, 20_000)).astype(np.int64)
            ids = draw.integers(1, VOCAB, int(lengths.sum()), dtype=np.uint16)
            ids[np.cumsum(lengths) - 1] = 0
            writer.append_batch(ids, lengths)
            tokens -= ids.size


def write_sparse(prefix: str) -> None:
    """Write a token file of ten billion tokens whose `.bin` takes no disk space."""
    documents = HUGE_TOKENS // HUGE_DOCUMENT
    dtype = np.dtype("<u2")
    with open(f"{prefix}.bin", "wb") as file:
        os.truncate(file.fileno(), HUGE_TOKENS * dtype.itemsize)
    with open(f"{prefix}.idx", "wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, get_dtype_code(dtype), documents, documents + 1))
        file.write(np.full(documents, HUGE_DOCUMENT, "<i4").data)
        file.write((np.arange(documents) * HUGE_DOCUMENT * dtype.itemsize).astype("<i8").data)
        file.write(np.arange(documents + 1).astype("<i8").data)


def measure_order(folder: str) -> dict[str, Any]:
    """Return the seconds and bytes until the first batch's places are known, without and with the
    file."""
    prefix = f"{folder}/huge"
    write_sparse(prefix)
    windows = (HUGE_TOKENS - 1) // SEQ
    measured: dict[str, Any] = {"tokens": HUGE_TOKENS, "samples": windows}
    numbers = np.arange(512)

    def order() -> None:
        sample_indices(numbers, windows, derive_source_key(1, prefix))

    def open_and_shuffle() -> None:
        GPTDataset(prefix, "train", (0.98, 0.02, 0.0), SEQ, VOCAB)
        order()

    for name, action in (("order", order), ("file and order", open_and_shuffle)):
        start = time.perf_counter()
        action()
        seconds = time.perf_counter() - start
        tracemalloc.start()
        action()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        measured[name] = {"seconds": seconds, "peak_bytes": peak}
        print(f"{name:<16}{seconds * 1e3:10.2f} ms{peak / 1e6:10.3f} MB at the peak")
    return measured


def run_once(command: list[str]) -> dict[str, Any]:
    """Run one contender in its own process; its last line of output is its measurement."""
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    result = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, cwd=ROOT
    )
    if result.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{result.stdout[-2000:]}\n{result.stderr[-4000:]}")
    return json.loads(result.stdout.strip().splitlines()[-1])


def measure_speed(arguments: argparse.Namespace, prefix: str) -> dict[str, list[dict[str, Any]]]:
    """Run all contenders in turns."""
    common = ["--prefix", prefix, "--seq", str(SEQ), "--seconds", str(arguments.seconds)]
    commands = {
        name: [sys.executable, str(PEERS / "loader_ours.py"), *common, *options]
        for name, options in VARIANTS.items()
    }
    if arguments.megatron_python:
        # Not resolved: the python of a virtual environment is a link.
        python = str(arguments.megatron_python.absolute())
        script = str(PEERS / "loader_megatron_core.py")
        samples = str(arguments.tokens // SEQ)
        commands["megatron-core"] = [python, script, *common, "--samples", samples]
    else:
        print("megatron-core is left out: --megatron-python PATH gives an interpreter that has it")
    outcomes: dict[str, list[dict[str, Any]]] = {name: [] for name in commands}
    for number in range(arguments.rounds):
        for name, command in commands.items():
            outcomes[name].append(run_once(command))
            speed = outcomes[name][-1]["samples_per_second"]
            print(f"round {number + 1}/{arguments.rounds}  {name:<28}{speed:10.0f} samples/s")
    return outcomes


def summarise(outcomes: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Print and return medians, spreads and, with a peer, ratios to it within rounds."""
    speeds = {name: [run["samples_per_second"] for run in runs] for name, runs in outcomes.items()}
    peer_speeds = speeds.get("megatron-core")
    summary: dict[str, Any] = {}
    for name, values in speeds.items():
        spread = Spread.of(values)
        memory = max(run["peak_rss_bytes"] for run in outcomes[name])
        line = f"{name:<28}{spread.median:10.0f} samples/s ({spread.low:.0f}-{spread.high:.0f})"
        summary[name] = {"samples_per_second": asdict(spread), "peak_rss_bytes": memory}
        if peer_speeds:
            ratio = Spread.of([a / b for a, b in zip(values, peer_speeds, strict=True)])
            summary[name]["ratio"] = asdict(ratio)
            line += f"  ratio {ratio.median:.2f} ({ratio.low:.2f}-{ratio.high:.2f})"
        print(f"{line}  {memory / 1e6:.0f} MB")
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each contender")
    parser.add_argument("--seconds", type=float, default=3.0, help="length of each run")
    parser.add_argument("--tokens", type=int, default=50_000_000, help="of the file that is read")
    parser.add_argument("--megatron-python", type=Path, help="interpreter with megatron-core")
    parser.add_argument(
        "--write",
        type=Path,
        nargs="?",
        const=ROOT / "benchmarks/results/loader.json",
        help="write all measurements as JSON (default: benchmarks/results/loader.json)",
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        order = measure_order(folder)
        prefix = f"{folder}/tokens"
        write_synthetic(prefix, arguments.tokens)
        outcomes = measure_speed(arguments, prefix)
    summary = summarise(outcomes)
    if arguments.write:
        document = {
            **describe_measurement(),
            "config": {"seq": SEQ, "tokens": arguments.tokens, "seconds": arguments.seconds},
            "order": order,
            "summary": summary,
            "rounds": outcomes,
        }
        arguments.write.parent.mkdir(parents=True, exist_ok=True)
        arguments.write.write_text(json.dumps(document, indent=2) + "\n")
        print(f"wrote {arguments.write}")


if __name__ == "__main__":
    main()
