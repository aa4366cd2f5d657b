"""Islands with a parameter server on slow links, one of which is killed and comes back.

As `islands.py`, from which model, data and the first half of the steps are: the second half is done
by data parallelism, and on a network lab by islands that are runs of their own, each on a host that
is a node of a Ray cluster, with the server on one more host. That is done twice: undisturbed, and
with one host killed, processes and all, and started again. Speeds are beside those of the same
nodes, each of which trains by itself and sends nothing. Needs Linux, root and the extra `ray`.

sudo python benchmarks/network/server_islands.py --write benchmarks/results/server_islands.json
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from islands import (
    ALONE,
    BATCH,
    PLAIN,
    ROOT,
    RUNS,
    describe_measurement,
    make_overrides,
    read_lines,
    run_first_half,
    run_here,
)
from network_lab import Host, Link, emulate_hosts

PORT = 6379
TIMED = 25
"""Steps that hosts alone are timed for."""
PATIENCE = 300.0
"""Seconds for a host to come up, or for the next step."""
OBJECTS = 10**8
"""Bytes of a node's object store."""
SYNC: dict[str, Any] = {
    "sync.server": "outer",
    "sync.every": 25,
    "sync.delay": 5,
    "sync.mix": 0.05,
    "sync.outer_lr": 0.9,
    "sync.outer_momentum": 0.8,
    "sync.timeout": 10,
    "parallel.timeout": 120,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--islands", type=int, default=4)
    parser.add_argument("--rate", default="200mbit")
    parser.add_argument("--latency", default="50ms", help="of what a host sends")
    parser.add_argument("--steps", type=int, default=400, help="of which half are compared")
    parser.add_argument("--killed", type=float, default=0.25, help="after this share of the steps")
    parser.add_argument("--joins", type=float, default=0.5, help="again, after this share of them")
    parser.add_argument("--write", type=Path, help="write all measurements as JSON to this file")
    arguments = parser.parse_args()
    os.chdir(ROOT)
    count, steps = arguments.islands, arguments.steps
    document: dict[str, Any] = {
        **describe_measurement(),
        "config": {name: value for name, value in vars(arguments).items() if name != "write"}
        | {"batch": BATCH, "sync": SYNC},
    }
    first, length = run_first_half(steps, count)
    folder = copy_run(first, "second-half")
    plain = run_here(folder, PLAIN, count, length)[steps // 2 :]
    document[PLAIN] = summarize([plain], count)
    with emulate_hosts([Link(arguments.rate, arguments.latency)] * (count + 1)) as hosts:
        alone = [time_alone(hosts, first, length)]
        begun = steps // 2
        moments = [begun + int(steps // 2 * part) for part in (arguments.killed, arguments.joins)]
        for name, faults in (("undisturbed", ()), ("one killed and back", moments)):
            lines, said = run_islands(hosts, first, length, faults)
            document[name] = summarize(lines) | {"server": said}
        alone.append(time_alone(hosts, first, length))
    document[ALONE] = alone
    show(document)
    if arguments.write:
        arguments.write.write_text(json.dumps(document, indent=2) + "\n")
        print(f"wrote {arguments.write}")


def run_islands(
    hosts: Sequence[Host],
    first: Path,
    length: Sequence[str],
    faults: Sequence[int] = (),
    *,
    share: bool = True,
) -> tuple[list[list[dict[str, Any]]], list[str]]:
    """Continue a run on islands.

    Args:
        hosts: That of the server, and one for each island.
        first: The run.
        length: Overrides.
        faults: The steps of the first island at which the host of the last one is killed, and at
            which it is started again; nothing for neither.
        share: Whether they synchronise; else each trains by itself.

    Returns:
        The lines of each island, and what the server has said.
    """
    server_host, *island_hosts = hosts
    folders = [copy_run(first, f"island-{number}") for number in range(len(island_hosts))]
    begun = len(read_lines(first))
    ray = str(Path(sys.executable).with_name("ray"))
    subprocess.run([ray, "get-auth-token", "--generate"], stdout=subprocess.DEVNULL, check=True)
    sync = [f"{key}={value}" for key, value in SYNC.items()] + [f"sync.islands={len(folders)}"]
    batch = f"train.global_batch={BATCH // len(folders)}"
    words = [
        make_overrides(
            folder, [*sync, f"sync.island={number}"] if share else [], 1, [batch, *length]
        )
        for number, folder in enumerate(folders)
    ]
    shutil.rmtree(RUNS / "server", ignore_errors=True)
    serve = ["tools/launch/ray_server.py", "--folder", f"{RUNS}/server", "--"]
    serve += make_overrides(folders[0], sync, 1, [batch, *length])

    go = RUNS / "go"
    go.unlink(missing_ok=True)

    def start(number: int) -> Node:
        return Node(island_hosts[number], ["pretrain_gpt.py", *words[number]], go, server_host)

    with Node(server_host, serve, ROOT) as server:
        server.wait_for_text("waits for islands")
        nodes = []
        try:
            for number in range(len(folders)):
                nodes.append(start(number))
                nodes[-1].wait_for_text("Ray runtime started")
            go.touch()  # together, so that none is late
            if faults:
                killed, joins = faults
                nodes[0].wait(lambda: read_lines(folders[0])[-1]["step"] >= killed)
                nodes[-1].kill()
                nodes[0].wait(lambda: read_lines(folders[0])[-1]["step"] >= joins)
                nodes[-1] = start(len(folders) - 1)
            for node in nodes:
                node.wait_for_end()
        finally:
            for node in nodes:
                node.kill()
        said = [line for line in server.read().splitlines() if line.startswith("island ")]
    return [read_lines(folder)[begun:] for folder in folders], said


def time_alone(hosts: Sequence[Host], first: Path, length: Sequence[str]) -> float:
    """Return tokens a second of all hosts of islands together, each of which trains by itself on
    its share of the batch."""
    end = len(read_lines(first)) + SYNC["sync.every"] + TIMED
    lines, _ = run_islands(hosts, first, [*length, f"train.stop_after={end}"], share=False)
    speed: float = summarize(lines)["tokens_per_second"]
    return speed


class Node:
    """A host as a node of a Ray cluster, and a program of ours on it.

    Args:
        host: The host.
        command: Of the program.
        start: The program begins when this file exists.
        head: Host of the cluster's first node; None for this one.
    """

    def __init__(
        self, host: Host, command: Sequence[str], start: Path, head: Host | None = None
    ) -> None:
        address = f"{(head or host).address}:{PORT}"
        # Actors are only on the first node, where the server is.
        place = [f"--address={address}", "--num-cpus=0"]
        if head is None:
            place = ["--head", f"--port={PORT}", "--num-cpus=4", "--include-dashboard=false"]
        limits = ["--disable-usage-stats", f"--object-store-memory={OBJECTS}"]
        ray = str(Path(sys.executable).with_name("ray"))
        join = shlex.join([ray, "start", f"--node-ip-address={host.address}", *place, *limits])
        # Hosts have one file system; the node keeps its files and sockets for itself.
        script = [
            "set -e",
            "mkdir -p /tmp/ray",
            "mount -t tmpfs tmpfs /tmp/ray",
            join,
            f"until [ -e {start} ]; do sleep 0.1; done",
            f"exec {shlex.join([sys.executable, *command])}",
        ]
        environment = {
            **os.environ,
            "RAY_ADDRESS": address,
            "RAY_AUTH_MODE": "token",
            "OMP_NUM_THREADS": "1",
        }
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        self._output = RUNS / f"{host.address}.txt"
        with self._output.open("w") as file:
            self.process = subprocess.Popen(
                [*host.command, "sh", "-c", "\n".join(script)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def read(self) -> str:
        """Return the output of the program so far."""
        return self._output.read_text()

    def wait(self, condition: Callable[[], bool]) -> None:
        """Wait for what the program is to do; end everything if it fails or takes too long."""
        end = time.monotonic() + PATIENCE
        while not condition():
            if self.process.poll() is not None or time.monotonic() > end:
                sys.exit(self.read()[-4000:])
            time.sleep(0.2)

    def wait_for_text(self, text: str) -> None:
        """Wait for an output."""
        self.wait(lambda: text in self.read())

    def wait_for_end(self) -> None:
        """Wait for the end of the program; end everything if it fails or takes too long."""
        if self.process.wait(PATIENCE):
            sys.exit(self.read()[-4000:])

    def kill(self) -> None:
        """Kill all processes of the host, as a loss of power does."""
        self.process.kill()
        self.process.wait()


def copy_run(first: Path, name: str) -> Path:
    """Copy the run of the first half."""
    folder = RUNS / name
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(first, folder)
    return folder


def summarize(islands: Sequence[Sequence[dict[str, Any]]], ranks: int = 1) -> dict[str, Any]:
    """Return what the lines of all runs' second halves say, each of so many ranks. Speed is that of
    all runs together after the first one's first synchronisation, without the evaluation at the
    end."""
    first, lines = islands[0], [line for island in islands for line in island]
    begin, end = first[SYNC["sync.every"]]["at"], first[-2]["at"]
    trained = sum(line["tokens"] for line in lines if begin < line["at"] <= end)
    sent = ranks * sum(
        line["bytes"].get("data", 0) + line["bytes"].get("islands", 0) for line in lines
    )
    return {
        "loss": first[-1]["eval_loss"],
        "tokens": sum(line["tokens"] for line in lines),
        "bytes_per_token": sent / sum(line["tokens"] for line in lines),
        "tokens_per_second": trained / (end - begin),
        "steps": [[line["step"] for line in island] for island in islands],
    }


def show(document: dict[str, Any]) -> None:
    plain, alone = document[PLAIN], statistics.mean(document[ALONE])
    head = f"{'':<22}{'loss':>8}{'beside':>9}{'bytes/token':>13}{'fewer':>8}{'tokens/s':>10}"
    print(f"{head} of alone")
    for name in (PLAIN, "undisturbed", "one killed and back"):
        row = document[name]
        speed, fewer = row["tokens_per_second"], plain["bytes_per_token"] / row["bytes_per_token"]
        print(
            f"{name:<22}{row['loss']:>8.4f}{row['loss'] / plain['loss'] - 1:>9.2%}"
            f"{row['bytes_per_token']:>13.2f}{fewer:>8.1f}"
            + ("" if name == PLAIN else f"{speed:>10,.0f} {speed / alone:.1%}")
        )
        for line in row.get("server", ()):
            print(f"    {line}")


if __name__ == "__main__":
    main()
