"""Breaks runs on purpose, and looks whether they notice, go on by themselves, and lose nothing.

python tools/drill.py --ranks 4 --faults kill,stop,term,fewer --rounds 5 --folder runs/drill

Each round starts a small run under torchrun, does one thing to one rank at a random moment (of a
step, a save or a load), and waits for the end of the run. The losses must be those of a run that
nobody disturbed: bitwise, or to 1e-10 where the layout changed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megaframe.data.indexed import TokenFileWriter

ROOT = Path(__file__).resolve().parent.parent
STEPS, EVERY, LIMIT = 60, 5, 300.0
"""Steps of a run, steps between its saves, and seconds after which a round has failed."""
SHAPE = {
    "model.layers": 4,
    "model.hidden": 64,
    "model.heads": 4,
    "model.vocab": 61,
    "train.seq": 64,
    "train.steps": STEPS,
    "train.global_batch": 8,
    "train.microbatch": 1,
    "train.precision": "fp64",
    "checkpoint.every": EVERY,
    "checkpoint.keep": 4,
    "checkpoint.resume": "latest",
    "data.split": "[1, 0, 0]",
    "meter.peak_tflops": 1,
    "faults.step_timeout": 8,
    "faults.elastic": "true",
    "parallel.timeout": 60,
    "parallel.pipeline": 2,
}


@dataclass(frozen=True)
class Round:
    """What was done, and how it went. seconds: from there to the next line of a step."""

    fault: str
    rank: int
    after: int
    seconds: float
    largest: float
    said: str


def main() -> None:
    """Run the drill; ends with status 1 if a run did not survive."""
    arguments = parse_arguments()
    folder, draw = arguments.folder.absolute(), random.Random(arguments.seed)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    corpus(folder / "tokens")
    importing = import_seconds()
    print(f"import of torch: {importing:.1f} s", flush=True)
    whole = folder / "whole"
    finish(launch(folder, whole, arguments.ranks))
    expected, bad = losses(whole), 0
    for number in range(arguments.rounds):
        for fault in arguments.faults.split(","):
            run = folder / f"{fault}-{number}"
            done = FAULTS[fault](folder, run, arguments.ranks, draw)
            found = losses(run)
            largest = max(
                (abs(a - b) / abs(b) for a, b in zip(found, expected, strict=False)), default=1.0
            )
            limit = 1e-10 if fault == "fewer" else 0.0
            good = len(found) == len(expected) and largest <= limit
            bad += not good
            print(
                f"{fault:<6} rank {done.rank} after {done.after:>2} steps: next step after "
                f"{done.seconds:5.1f} s, {done.seconds - importing:5.1f} s beyond the import; "
                f"losses differ by {largest:.1e} {'' if good else 'FAILED '}| {done.said}",
                flush=True,
            )
    sys.exit(bool(bad))


def struck(number: int) -> Callable[[Path, Path, int, random.Random], Round]:
    """A round in which one rank gets a signal."""

    def run_round(folder: Path, run: Path, ranks: int, draw: random.Random) -> Round:
        process = launch(folder, run, ranks)
        after, rank = draw.randrange(1, STEPS - 10), draw.randrange(ranks)
        wait_for(lambda: len(steps(run)) >= after, process)
        time.sleep(draw.random() * 0.2)
        pid = workers(process.pid)[rank]
        before = steps(run)[-1]
        os.kill(pid, number)
        struck_at = time.monotonic()
        reached = wait_for_another_start(run, before, process)
        finish(process)
        name = signal.Signals(number).name
        return Round(name, rank, before, reached - struck_at, 0.0, verdict(run))

    return run_round


def told(folder: Path, run: Path, ranks: int, draw: random.Random) -> Round:
    """The launcher is asked to leave, as before a node is taken away; then the run is started
    again."""
    process = launch(folder, run, ranks)
    after = draw.randrange(1, STEPS - 10)
    wait_for(lambda: len(steps(run)) >= after, process)
    before, struck_at = steps(run)[-1], time.monotonic()
    process.send_signal(signal.SIGTERM)
    process.wait(LIMIT)
    saved = json.loads((newest(run) / "manifest.json").read_text())["step"]
    process = launch(folder, run, ranks)
    reached = wait_for_another_start(run, saved, process)
    finish(process)
    said = f"saved step {saved} on the way out"
    return Round("term", -1, before, reached - struck_at, 0.0, said)


def fewer(folder: Path, run: Path, ranks: int, draw: random.Random) -> Round:
    """A rank is killed, one fewer comes back, and later all of them."""
    process = launch(folder, run, ranks, restarts=0)
    after, rank = draw.randrange(1, STEPS // 2), draw.randrange(ranks)
    wait_for(lambda: len(steps(run)) >= after, process)
    before = steps(run)[-1]
    os.kill(workers(process.pid)[rank], signal.SIGKILL)
    struck_at = time.monotonic()
    process.wait(LIMIT)
    process = launch(folder, run, ranks - 1, restarts=0)
    reached = wait_for_another_start(run, before, process)
    wait_for(lambda: len(steps(run)) >= before + EVERY + 2, process)
    process.send_signal(signal.SIGTERM)
    process.wait(LIMIT)
    finish(launch(folder, run, ranks))
    return Round(
        "fewer", rank, before, reached - struck_at, 0.0, f"{ranks - 1} ranks, then {ranks}"
    )


FAULTS = {
    "kill": struck(signal.SIGKILL),
    "stop": struck(signal.SIGSTOP),
    "term": told,
    "fewer": fewer,
}


def launch(folder: Path, run: Path, ranks: int, restarts: int = 3) -> subprocess.Popen[bytes]:
    """A run under torchrun; what it says goes into the run's folder."""
    keys = {**SHAPE, "run.dir": run, "data.sources": f"[{{path: {folder / 'tokens'}}}]"}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    command += ["--max-restarts", str(restarts), "--master-port", str(free_port())]
    command += [str(ROOT / "pretrain_gpt.py"), *(f"{key}={value}" for key, value in keys.items())]
    run.mkdir(parents=True, exist_ok=True)
    with open(run / "console.txt", "ab") as console:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
        return subprocess.Popen(command, stdout=console, stderr=console, env=environment)


def finish(process: subprocess.Popen[bytes]) -> None:
    """Wait for the end; what does not end is ended."""
    try:
        process.wait(LIMIT)
    except subprocess.TimeoutExpired:
        process.kill()


def wait_for(there: Callable[[], bool], process: subprocess.Popen[bytes]) -> float:
    """Return when it is so, or the process or the time has ended; the moment."""
    deadline = time.monotonic() + LIMIT
    while process.poll() is None and time.monotonic() < deadline and not there():
        time.sleep(0.02)
    return time.monotonic()


def wait_for_another_start(run: Path, before: int, process: subprocess.Popen[bytes]) -> float:
    """Return when the run has gone back to a checkpoint and made a step from there."""
    ledger = run / "faults/ledger.jsonl"
    starts = ledger.read_text().count('"start"') if ledger.exists() else 0
    wait_for(lambda: ledger.read_text().count('"start"') > starts, process)
    started = json.loads(
        [line for line in ledger.read_text().splitlines() if '"start"' in line][-1]
    )
    return wait_for(lambda: steps(run)[-1:] > [started["step"]], process)


def workers(launcher: int) -> dict[int, int]:
    """Process of each rank that a launcher has started."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            variables = (path / "environ").read_bytes().split(b"\0")
        except (OSError, ValueError):
            continue
        ranks = [text[5:] for text in variables if text.startswith(b"RANK=")]
        if parent == launcher and ranks:
            found[int(ranks[0])] = int(path.name)
    return found


def steps(run: Path) -> list[int]:
    """Of the lines that the run has written."""
    return [line["step"] for line in lines(run)]


def losses(run: Path) -> list[float]:
    """In the order of the steps; empty where steps are missing or twice there."""
    found = list(lines(run))
    right = [line["step"] for line in found] == list(range(1, STEPS + 1))
    return [line["loss"] or math.nan for line in found] if right else []


def lines(run: Path) -> Iterator[dict[str, float]]:
    """Whole lines of the metrics."""
    path = run / "metrics.jsonl"
    if path.exists():
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                yield json.loads(line)


def newest(run: Path) -> Path:
    """The checkpoint that the pointer names."""
    folder = run / "checkpoints"
    return folder / (folder / "latest").read_text().strip()


def verdict(run: Path) -> str:
    """What the run, or its launcher, said about the fault."""
    text = (run / "console.txt").read_text(errors="replace").splitlines()
    said = [line for line in text if line.startswith("error: ")]
    said += [line for line in text if "exitcode" in line and "failed" in line]
    return said[0][:160] if said else "nothing"


def import_seconds() -> float:
    """Seconds that a process needs to import torch."""
    start = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.monotonic() - start


def corpus(prefix: Path) -> None:
    """Documents that can be learned."""
    draw = np.random.default_rng(0)
    with TokenFileWriter(str(prefix), np.dtype(np.uint16)) as writer:
        for _ in range(200):
            start, step = draw.integers(0, 60, 2)
            words = (start + step * np.arange(int(draw.integers(30, 200)))) % 60
            writer.append(np.append(words, 60).astype(np.uint16))


def free_port() -> int:
    """A port that nobody has."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4, help="an even number")
    parser.add_argument("--rounds", type=int, default=1, help="times that each fault is tried")
    parser.add_argument("--faults", default=",".join(FAULTS), help="which, in this order")
    parser.add_argument("--folder", type=Path, default=Path("runs/drill"), help="is emptied first")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    return parser.parse_args(words)


if __name__ == "__main__":
    main()
