"""Break runs on purpose, and check that they notice, recover by themselves, and lose nothing.

python tools/chaos/chaos_test.py --ranks 4 --faults kill,stop,link --rounds 5 --folder runs/chaos

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

from chaos_hosts import make_host_pair, mount_small_disk
from chaos_run import (
    EVERY,
    LIMIT,
    STEPS,
    ChaosRun,
    FaultSkipped,
    Process,
    find_ranks,
    kill_all,
    time_import,
    wait_for,
    wait_or_kill,
    write_corpus,
)

from megaframe.io.closed_output import allow_closed_output
from megaframe.io.regular_file import write_file
from megaframe.io.untrusted import make_integer_parser

LATEST = STEPS - 20
"""Faults are caused after a random step below this one."""


@dataclass(frozen=True)
class FaultResult:
    """Result of a round.

    Attributes:
        fault: The fault.
        report: How the run reported it.
        seconds: From the fault to the next step; None if that was not measured.
    """

    fault: str
    report: str
    seconds: float | None = None


def signal_rank(run: ChaosRun, draw: random.Random, number: signal.Signals) -> FaultResult:
    """Send a signal to a random rank at a random moment.

    Args:
        run: The run.
        draw: Draws step, moment and rank.
        number: The signal.
    """
    process = run.launch()
    step = run.wait_for_step(draw.randrange(1, LATEST), process)
    time.sleep(draw.random() * 0.2)
    rank = draw.randrange(run.ranks)
    os.kill(find_ranks(process.pid)[rank], number)
    struck_at = time.monotonic()
    seconds = run.wait_for_resume(process) - struck_at
    wait_or_kill(process)
    return FaultResult(
        f"{number.name} to rank {rank} after step {step}", run.find_first_error(), seconds
    )


def kill_rank(run: ChaosRun, draw: random.Random) -> FaultResult:
    """kill -9 of a rank at any moment of a step"""
    return signal_rank(run, draw, signal.SIGKILL)


def stop_rank(run: ChaosRun, draw: random.Random) -> FaultResult:
    """a rank hangs, and does not react to anything"""
    return signal_rank(run, draw, signal.SIGSTOP)


def kill_in_save(run: ChaosRun, draw: random.Random) -> FaultResult:
    """kill -9 of a rank during a save"""
    process = run.launch(checkpoint__memory_every=0)
    run.wait_for_step(draw.randrange(1, LATEST), process)
    home = run.run / "checkpoints"
    wait_for(lambda: any(home.glob("*.tmp")), process, 5e-4)
    time.sleep(draw.random() * 0.01)
    rank = draw.randrange(run.ranks)
    os.kill(find_ranks(process.pid)[rank], signal.SIGKILL)
    struck_at = time.monotonic()
    seconds = run.wait_for_resume(process) - struck_at
    wait_or_kill(process)
    return FaultResult(f"kill of rank {rank} in a save", run.find_first_error(), seconds)


def kill_in_load(run: ChaosRun, draw: random.Random) -> FaultResult:
    """kill -9 of a rank, and again of a rank while the run restarts and loads"""
    process = run.launch()
    run.wait_for_step(draw.randrange(1, LATEST), process)
    first = find_ranks(process.pid)
    os.kill(first[draw.randrange(run.ranks)], signal.SIGKILL)
    struck_at = time.monotonic()
    wait_for(lambda: _count_new_ranks(process, first) == run.ranks, process)
    time.sleep(draw.random() * 4.0)
    rank = draw.randrange(run.ranks)
    os.kill(find_ranks(process.pid)[rank], signal.SIGKILL)
    seconds = run.wait_for_resume(process) - struck_at
    wait_or_kill(process)
    return FaultResult(
        f"kill of a rank, and of rank {rank} in the start after", run.find_first_error(), seconds
    )


def _count_new_ranks(process: Process, before: dict[int, int]) -> int:
    return len(set(find_ranks(process.pid).values()) - set(before.values()))


def terminate(run: ChaosRun, draw: random.Random) -> FaultResult:
    """the launcher gets SIGTERM, as before a node is taken away, and is started again"""
    process = run.launch()
    step = run.wait_for_step(draw.randrange(1, LATEST), process)
    asked_at = time.monotonic()
    process.send_signal(signal.SIGTERM)
    process.wait(LIMIT)
    saved = json.loads((run.newest_checkpoint / "manifest.json").read_text())["step"]
    process = run.launch()
    seconds = run.wait_for_resume(process) - asked_at
    wait_or_kill(process)
    return FaultResult(
        f"asked to leave after step {step}", f"saved step {saved} on the way out", seconds
    )


def continue_with_fewer(run: ChaosRun, draw: random.Random) -> FaultResult:
    """a rank is killed, the run continues with one rank fewer, and later with all of them"""
    process = run.launch(restarts=0)
    run.wait_for_step(draw.randrange(1, STEPS // 2), process)
    rank = draw.randrange(run.ranks)
    os.kill(find_ranks(process.pid)[rank], signal.SIGKILL)
    struck_at = time.monotonic()
    process.wait(LIMIT)
    process = run.launch(run.ranks - 1, restarts=0)
    seconds = run.wait_for_resume(process) - struck_at
    run.wait_for_step(run.steps[-1] + EVERY + 2, process)
    process.send_signal(signal.SIGTERM)
    process.wait(LIMIT)
    wait_or_kill(run.launch())
    fault = f"kill of rank {rank}, then {run.ranks - 1} ranks, then {run.ranks}"
    return FaultResult(fault, run.find_first_error(), seconds)


def slow_down(run: ChaosRun, draw: random.Random) -> FaultResult:
    """a rank is stopped for two thirds of the time"""
    process = run.launch(faults__straggler_factor=2)
    run.wait_for_step(1, process)
    rank = draw.randrange(run.ranks)
    pid = find_ranks(process.pid)[rank]
    words = f"rank {rank} is slow"
    while process.poll() is None and run.steps[-1] < LATEST and not run.find_in_log(words):
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.02)
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.01)
    wait_or_kill(process)
    return FaultResult(f"rank {rank} slowed down", run.find_in_log(words))


def fill_disk(run: ChaosRun, draw: random.Random) -> FaultResult:
    """the disk of the checkpoints is full for a while"""
    filler = run.run / "checkpoints/filler"

    def fill() -> None:
        with open(filler, "wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(1 << 16))

    return _withhold_disk(run, draw, fill, filler.unlink)


def make_read_only(run: ChaosRun, draw: random.Random) -> FaultResult:
    """the folder of the checkpoints is read-only for a while"""

    def remount(how: str) -> None:
        command = ["mount", "-o", f"remount,{how}", str(run.run / "checkpoints")]
        while subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode:
            time.sleep(0.01)  # fails while a file is open for writing

    return _withhold_disk(run, draw, lambda: remount("ro"), lambda: remount("rw"))


def _withhold_disk(
    run: ChaosRun, draw: random.Random, withhold: Callable[[], None], restore: Callable[[], None]
) -> FaultResult:
    with mount_small_disk(run.run / "checkpoints", "64m"):
        process = run.launch()
        step = run.wait_for_step(draw.randrange(1, LATEST), process)
        withhold()
        wait_for(lambda: bool(run.find_in_log("warning: ")), process)
        restore()
        wait_or_kill(process)
        return FaultResult(f"no disk after step {step}", run.find_in_log("warning: "))


def damage_checkpoint(run: ChaosRun, draw: random.Random) -> FaultResult:
    """all ranks are killed at once, and a file of the newest checkpoint is damaged"""
    process = run.launch(checkpoint__memory_every=0)
    run.wait_for_step(draw.randrange(3 * EVERY, LATEST), process)
    kill_all(process)
    step, home = run.newest_checkpoint, run.run / "checkpoints"
    shard = step / f"rank-{draw.randrange(run.ranks):05d}.safetensors"
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
    wait_or_kill(run.launch(checkpoint__memory_every=0))
    name = path.name
    report = run.find_in_log(name) or next(
        (line for line in run.read_text("console.txt").splitlines() if name in line), ""
    )
    return FaultResult(f"{how} of {path.relative_to(home)}", report)


def cut_data_link(run: ChaosRun, draw: random.Random) -> FaultResult:
    """the link over which hosts exchange tensors goes down, while that to the store stays up"""
    with make_host_pair() as hosts:
        first, *_ = hosts.start(run)
        step = run.wait_for_step(draw.randrange(1, LATEST), first)
        hosts.set_link("data", "down")
        struck_at = time.monotonic()
        wait_for(lambda: (run.run / "faults/ended.jsonl").exists(), first)
        hosts.set_link("data", "up")
        seconds = run.wait_for_resume(first) - struck_at
        statuses = hosts.wait()
    fault = f"data link down after step {step}, statuses {statuses}"
    return FaultResult(fault, run.find_in_log("restarted in the same processes"), seconds)


def cut_network(run: ChaosRun, draw: random.Random) -> FaultResult:
    """two hosts lose all links between them, and the run is started again later"""
    with make_host_pair() as hosts:
        changes = {"parallel__timeout": 10}
        first, *_ = hosts.start(run, **changes)
        step = run.wait_for_step(draw.randrange(1, LATEST), first)
        hosts.set_link("data", "down")
        hosts.set_link("control", "down")
        struck_at = time.monotonic()
        statuses = hosts.wait()
        seconds = time.monotonic() - struck_at
        hosts.set_link("data", "up")
        hosts.set_link("control", "up")
        hosts.start(run, **changes)
        hosts.wait()
    fault = f"no network after step {step}, all left within {seconds:.1f} s with {set(statuses)}"
    return FaultResult(fault, run.find_first_error())


FAULTS: dict[str, Callable[[ChaosRun, random.Random], FaultResult]] = {
    "kill": kill_rank,
    "save": kill_in_save,
    "load": kill_in_load,
    "stop": stop_rank,
    "slow": slow_down,
    "term": terminate,
    "fewer": continue_with_fewer,
    "full": fill_disk,
    "read-only": make_read_only,
    "damage": damage_checkpoint,
    "link": cut_data_link,
    "network": cut_network,
}


def main() -> None:
    """Run the chaos test; exit with status 1 if a run did not survive or did not report its
    fault."""
    arguments = parse_arguments()
    folder, draw = arguments.folder.absolute(), random.Random(arguments.seed)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_corpus(folder / "tokens")
    importing = time_import()
    print(f"import of torch: {importing:.1f} s", flush=True)
    undisturbed = ChaosRun(folder, folder / "whole", arguments.ranks)
    wait_or_kill(undisturbed.launch())
    expected, failures = undisturbed.losses, 0
    lost: dict[str, list[dict[str, float]]] = defaultdict(list)
    for number in range(arguments.rounds):
        for fault in arguments.faults:
            run = ChaosRun(folder, folder / f"{fault}-{number}", arguments.ranks)
            try:
                result = FAULTS[fault](run, draw)
            except FaultSkipped as why:
                print(f"{fault:<9} skipped: {why}", flush=True)
                continue
            good, text = compare_losses(run, expected, 1e-10 if fault == "fewer" else 0.0)
            failures += not (good and result.report)
            lost[fault].append(run.lost_seconds)
            if result.seconds is not None:
                text += f"; next step after {result.seconds:.1f} s"
            verdict = "" if good and result.report else "FAILED "
            print(f"{fault:<9} {verdict}{result.fault}; {text}", flush=True)
            print(f"{'':<9} said: {result.report[:200] or 'nothing'}", flush=True)
    costs = compute_median_costs(lost, importing)
    costs["whole"] = {"stall": round(undisturbed.mean_stall, 4)}
    print(json.dumps(costs))
    if arguments.write is not None:
        write_file(arguments.write, json.dumps(costs, indent=1) + "\n")
    sys.exit(bool(failures))


def compare_losses(run: ChaosRun, expected: Sequence[float], limit: float) -> tuple[bool, str]:
    """Return whether the losses are those of the undisturbed run, and in words how they differ.

    Args:
        run: The run.
        expected: Losses of the undisturbed run.
        limit: Largest relative difference that is accepted.
    """
    losses = run.losses
    if len(losses) != len(expected):
        return False, f"{len(run.steps)} steps instead of {len(expected)}"
    largest = max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))
    return largest <= limit, f"losses differ by {largest:.1e}"


def compute_median_costs(
    lost: dict[str, list[dict[str, float]]], importing: float
) -> dict[str, dict[str, float]]:
    """Return the median seconds that each kind of fault cost, by cause, and the seconds of
    importing torch."""
    costs: dict[str, dict[str, float]] = {"import": {"torch": round(importing, 2)}}
    for fault, rounds in lost.items():
        costs[fault] = {cause: round(median(r[cause] for r in rounds), 3) for cause in rounds[0]}
    return costs


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line.

    Args:
        words: Its words; None for those of the process.
    """
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="faults:\n" + "\n".join(f"  {n:<10} {kind.__doc__}" for n, kind in FAULTS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--ranks", type=make_integer_parser(2, 1024), default=4, help="an even number"
    )
    parser.add_argument(
        "--rounds", type=make_integer_parser(1), default=1, help="times that each fault is tried"
    )
    parser.add_argument(
        "--faults", type=_parse_fault_names, default=list(FAULTS), help="names, by commas"
    )
    parser.add_argument("--folder", type=Path, default=Path("runs/chaos"), help="is emptied first")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--write", type=Path, help="write what faults cost to this file")
    return parser.parse_args(words)


def _parse_fault_names(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in FAULTS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]} is not one of {', '.join(FAULTS)}")
    return names


if __name__ == "__main__":
    with allow_closed_output():
        main()
