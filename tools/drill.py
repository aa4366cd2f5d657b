"""Break runs on purpose, and check that they notice, recover by themselves, and lose nothing.

python tools/drill.py --ranks 4 --faults kill,stop,link --rounds 5 --folder runs/drill

Each round starts a small run, causes one fault at a random moment, and waits for the end of the
run. The run must report the fault, and its losses must equal those of an undisturbed run: bitwise,
or to 1e-10 if the layout changed. Faults inside a rank's process (wrong numbers, memory, code) are
not covered here but in tests/end_to_end.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from drill_hosts import hosts, small_disk
from drill_runs import (
    EVERY,
    LIMIT,
    STEPS,
    Drill,
    Process,
    Skipped,
    corpus,
    end,
    finish,
    import_seconds,
    wait_for,
    workers,
)

from megaframe.io.untrusted import whole_number

LATEST = STEPS - 20
"""Faults are caused after a random step below this one."""


@dataclass(frozen=True)
class Round:
    """Result of a round. what: the fault. said: how the run reported it. seconds: from the fault to
    the next step; None if that was not measured."""

    what: str
    said: str
    seconds: float | None = None


def struck(drill: Drill, draw: random.Random, number: signal.Signals) -> Round:
    """Send a signal to a random rank at a random moment."""
    process = drill.launch()
    step = drill.reached(draw.randrange(1, LATEST), process)
    time.sleep(draw.random() * 0.2)
    rank = draw.randrange(drill.ranks)
    os.kill(workers(process.pid)[rank], number)
    struck_at = time.monotonic()
    seconds = drill.goes_on(process) - struck_at
    finish(process)
    return Round(f"{number.name} to rank {rank} after step {step}", drill.verdict(), seconds)


def kill(drill: Drill, draw: random.Random) -> Round:
    """kill -9 of a rank at any moment of a step"""
    return struck(drill, draw, signal.SIGKILL)


def stop(drill: Drill, draw: random.Random) -> Round:
    """a rank hangs, and does not react to anything"""
    return struck(drill, draw, signal.SIGSTOP)


def save(drill: Drill, draw: random.Random) -> Round:
    """kill -9 of a rank during a save"""
    process = drill.launch(checkpoint__memory_every=0)
    drill.reached(draw.randrange(1, LATEST), process)
    home = drill.run / "checkpoints"
    wait_for(lambda: any(home.glob("*.tmp")), process, 5e-4)
    time.sleep(draw.random() * 0.01)
    rank = draw.randrange(drill.ranks)
    os.kill(workers(process.pid)[rank], signal.SIGKILL)
    struck_at = time.monotonic()
    seconds = drill.goes_on(process) - struck_at
    finish(process)
    return Round(f"kill of rank {rank} in a save", drill.verdict(), seconds)


def load(drill: Drill, draw: random.Random) -> Round:
    """kill -9 of a rank, and again of a rank while the run restarts and loads"""
    process = drill.launch()
    drill.reached(draw.randrange(1, LATEST), process)
    first = workers(process.pid)
    os.kill(first[draw.randrange(drill.ranks)], signal.SIGKILL)
    struck_at = time.monotonic()
    wait_for(lambda: _others(process, first) == drill.ranks, process)
    time.sleep(draw.random() * 4.0)
    rank = draw.randrange(drill.ranks)
    os.kill(workers(process.pid)[rank], signal.SIGKILL)
    seconds = drill.goes_on(process) - struck_at
    finish(process)
    return Round(f"kill of a rank, and of rank {rank} in the start after", drill.verdict(), seconds)


def _others(process: Process, before: dict[int, int]) -> int:
    return len(set(workers(process.pid).values()) - set(before.values()))


def term(drill: Drill, draw: random.Random) -> Round:
    """the launcher gets SIGTERM, as before a node is taken away, and is started again"""
    process = drill.launch()
    step = drill.reached(draw.randrange(1, LATEST), process)
    asked_at = time.monotonic()
    process.send_signal(signal.SIGTERM)
    process.wait(LIMIT)
    saved = json.loads((drill.newest / "manifest.json").read_text())["step"]
    process = drill.launch()
    seconds = drill.goes_on(process) - asked_at
    finish(process)
    return Round(f"asked to leave after step {step}", f"saved step {saved} on the way out", seconds)


def fewer(drill: Drill, draw: random.Random) -> Round:
    """a rank is killed, the run continues with one rank fewer, and later with all of them"""
    process = drill.launch(restarts=0)
    drill.reached(draw.randrange(1, STEPS // 2), process)
    rank = draw.randrange(drill.ranks)
    os.kill(workers(process.pid)[rank], signal.SIGKILL)
    struck_at = time.monotonic()
    process.wait(LIMIT)
    process = drill.launch(drill.ranks - 1, restarts=0)
    seconds = drill.goes_on(process) - struck_at
    drill.reached(drill.steps[-1] + EVERY + 2, process)
    process.send_signal(signal.SIGTERM)
    process.wait(LIMIT)
    finish(drill.launch())
    what = f"kill of rank {rank}, then {drill.ranks - 1} ranks, then {drill.ranks}"
    return Round(what, drill.verdict(), seconds)


def slow(drill: Drill, draw: random.Random) -> Round:
    """a rank is stopped for two thirds of the time"""
    process = drill.launch(faults__straggler_factor=2)
    drill.reached(1, process)
    rank = draw.randrange(drill.ranks)
    pid = workers(process.pid)[rank]
    words = f"rank {rank} is slow"
    while process.poll() is None and drill.steps[-1] < LATEST and not drill.noted(words):
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.02)
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.01)
    finish(process)
    return Round(f"rank {rank} slowed down", drill.noted(words))


def full(drill: Drill, draw: random.Random) -> Round:
    """the disk of the checkpoints is full for a while"""
    filler = drill.run / "checkpoints/filler"

    def fill() -> None:
        with open(filler, "wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(1 << 16))

    return _without_disk(drill, draw, fill, filler.unlink)


def read_only(drill: Drill, draw: random.Random) -> Round:
    """the folder of the checkpoints is read-only for a while"""

    def remount(how: str) -> None:
        command = ["mount", "-o", f"remount,{how}", str(drill.run / "checkpoints")]
        while subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode:
            time.sleep(0.01)  # fails while a file is open for writing

    return _without_disk(drill, draw, lambda: remount("ro"), lambda: remount("rw"))


def _without_disk(
    drill: Drill, draw: random.Random, take: Callable[[], None], give: Callable[[], None]
) -> Round:
    with small_disk(drill.run / "checkpoints", "64m"):
        process = drill.launch()
        step = drill.reached(draw.randrange(1, LATEST), process)
        take()
        wait_for(lambda: bool(drill.noted("warning: ")), process)
        give()
        finish(process)
        return Round(f"no disk after step {step}", drill.noted("warning: "))


def damage(drill: Drill, draw: random.Random) -> Round:
    """all ranks are killed at once, and a file of the newest checkpoint is damaged"""
    process = drill.launch(checkpoint__memory_every=0)
    drill.reached(draw.randrange(3 * EVERY, LATEST), process)
    end(process)
    step, home = drill.newest, drill.run / "checkpoints"
    shard = step / f"rank-{draw.randrange(drill.ranks):05d}.safetensors"
    flips = [("flip", path) for path in (shard, step / "manifest.json", home / "latest")]
    how, path = draw.choice([*flips, ("cut", shard), ("remove", shard)])
    content = bytearray(path.read_bytes())
    if how == "flip":
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        path.write_bytes(content)
    elif how == "cut":
        path.write_bytes(content[: draw.randrange(len(content))])
    else:
        path.unlink()
    finish(drill.launch(checkpoint__memory_every=0))
    name = path.name
    said = drill.noted(name) or next(
        (one for one in drill.text("console.txt").splitlines() if name in one), ""
    )
    return Round(f"{how} of {path.relative_to(home)}", said)


def link(drill: Drill, draw: random.Random) -> Round:
    """the link over which hosts exchange tensors goes down, while that to the store stays up"""
    with hosts() as both:
        first, *_ = both.start(drill)
        step = drill.reached(draw.randrange(1, LATEST), first)
        both.set("data", "down")
        struck_at = time.monotonic()
        wait_for(lambda: (drill.run / "faults/ended.jsonl").exists(), first)
        both.set("data", "up")
        seconds = drill.goes_on(first) - struck_at
        statuses = both.finish()
    what = f"data link down after step {step}, statuses {statuses}"
    return Round(what, drill.noted("restarted in the same processes"), seconds)


def network(drill: Drill, draw: random.Random) -> Round:
    """two hosts lose all links between them, and the run is started again later"""
    with hosts() as both:
        changes = {"parallel__timeout": 10}
        first, *_ = both.start(drill, **changes)
        step = drill.reached(draw.randrange(1, LATEST), first)
        both.set("data", "down")
        both.set("control", "down")
        struck_at = time.monotonic()
        statuses = both.finish()
        seconds = time.monotonic() - struck_at
        both.set("data", "up")
        both.set("control", "up")
        both.start(drill, **changes)
        both.finish()
    what = f"no network after step {step}, all left within {seconds:.1f} s with {set(statuses)}"
    return Round(what, drill.verdict())


KINDS: dict[str, Callable[[Drill, random.Random], Round]] = {
    "kill": kill,
    "save": save,
    "load": load,
    "stop": stop,
    "slow": slow,
    "term": term,
    "fewer": fewer,
    "full": full,
    "read-only": read_only,
    "damage": damage,
    "link": link,
    "network": network,
}


def main() -> None:
    """Run the drill; exit with status 1 if a run did not survive or did not report its fault."""
    arguments = parse_arguments()
    folder, draw = arguments.folder.absolute(), random.Random(arguments.seed)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    corpus(folder / "tokens")
    importing = import_seconds()
    print(f"import of torch: {importing:.1f} s", flush=True)
    whole = Drill(folder, folder / "whole", arguments.ranks)
    finish(whole.launch())
    expected, bad = whole.losses, 0
    lost: dict[str, list[dict[str, float]]] = defaultdict(list)
    for number in range(arguments.rounds):
        for fault in arguments.faults:
            drill = Drill(folder, folder / f"{fault}-{number}", arguments.ranks)
            try:
                done = KINDS[fault](drill, draw)
            except Skipped as why:
                print(f"{fault:<9} skipped: {why}", flush=True)
                continue
            good, text = judged(drill, expected, 1e-10 if fault == "fewer" else 0.0)
            bad += not (good and done.said)
            lost[fault].append(drill.lost)
            if done.seconds is not None:
                text += f"; next step after {done.seconds:.1f} s"
            verdict = "" if good and done.said else "FAILED "
            print(f"{fault:<9} {verdict}{done.what}; {text}", flush=True)
            print(f"{'':<9} said: {done.said[:200] or 'nothing'}", flush=True)
    costs = measured(lost, importing)
    costs["whole"] = {"stall": round(whole.stall, 4)}
    print(json.dumps(costs))
    if arguments.write is not None:
        arguments.write.write_text(json.dumps(costs, indent=1) + "\n", encoding="utf-8")
    sys.exit(bool(bad))


def judged(drill: Drill, expected: Sequence[float], limit: float) -> tuple[bool, str]:
    """Return whether the losses are those of the undisturbed run, and in words how they differ.

    limit: largest relative difference that is accepted.
    """
    found = drill.losses
    if len(found) != len(expected):
        return False, f"{len(drill.steps)} steps instead of {len(expected)}"
    largest = max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))
    return largest <= limit, f"losses differ by {largest:.1e}"


def measured(
    lost: dict[str, list[dict[str, float]]], importing: float
) -> dict[str, dict[str, float]]:
    """Return the median seconds that each kind of fault cost, by cause, and the seconds of
    importing torch."""
    found: dict[str, dict[str, float]] = {"import": {"torch": round(importing, 2)}}
    for fault, rounds in lost.items():
        found[fault] = {cause: round(median(r[cause] for r in rounds), 3) for cause in rounds[0]}
    return found


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line. words: its words; None for those of the process."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="faults:\n" + "\n".join(f"  {n:<10} {kind.__doc__}" for n, kind in KINDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=whole_number(2, 1024), default=4, help="an even number")
    parser.add_argument(
        "--rounds", type=whole_number(1), default=1, help="times that each fault is tried"
    )
    parser.add_argument("--faults", type=_kinds, default=list(KINDS), help="names, by commas")
    parser.add_argument("--folder", type=Path, default=Path("runs/drill"), help="is emptied first")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--write", type=Path, help="write what faults cost to this file")
    return parser.parse_args(words)


def _kinds(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in KINDS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]} is not one of {', '.join(KINDS)}")
    return names


if __name__ == "__main__":
    main()
