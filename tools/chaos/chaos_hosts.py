"""Two emulated hosts on one machine, for chaos tests: network namespaces with two links between
them.

The link `data` carries tensors between ranks, and `control` their connection to the store. Each can
be taken down on its own.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from chaos_run import LIMIT, ROOT, ChaosRun, FaultSkipped, Process

from megaframe.io.local_rendezvous import find_free_port

LINKS = {"control": "10.213.77", "data": "10.213.78"}


class HostPair:
    """The two hosts. The first half of a run's ranks is on the first host. Each rank is a process
    that no launcher restarts.

    Raises:
        FaultSkipped: If such hosts cannot be made here.
    """

    def __init__(self) -> None:
        if os.geteuid() or shutil.which("ip") is None:
            raise FaultSkipped("two hosts need root, and iproute2")
        tag = secrets.token_hex(3)
        self._names = [f"chaos-{tag}-{number}" for number in range(2)]
        self._processes: list[Process] = []
        try:
            for name in self._names:
                _run_ip("netns", "add", name)
                _run_ip("-n", name, "link", "set", "lo", "up")
            for link, network in LINKS.items():
                near, far = self._names
                _run_ip(
                    "link", "add", link, "netns", near, "type", "veth", "peer", link, "netns", far
                )
                for number, name in enumerate(self._names, 1):
                    _run_ip("-n", name, "addr", "add", f"{network}.{number}/24", "dev", link)
                self.set_link(link, "up")
        except subprocess.CalledProcessError as error:
            self.close()
            raise FaultSkipped(f"no network namespaces here: {error.stderr.strip()}") from None

    def set_link(self, link: str, state: str) -> None:
        """Set both ends of a link `up` or `down`."""
        for name in self._names:
            _run_ip("-n", name, "link", "set", link, state)

    def start(self, run: ChaosRun, **changes: object) -> list[Process]:
        """Start all ranks of a run, and return their processes.

        Args:
            run: The run.
            changes: As in `ChaosRun.overrides`.
        """
        ranks = run.ranks
        variables: dict[str, object] = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks // 2}
        variables |= {"MASTER_ADDR": f"{LINKS['control']}.1", "MASTER_PORT": find_free_port()}
        self._processes = []
        for rank in range(ranks):
            host, local = divmod(rank, ranks // 2)
            memory = run.folder / f"memory-{host}"  # both hosts would share /dev/shm
            memory.mkdir(exist_ok=True)
            command = ["ip", "netns", "exec", self._names[host], sys.executable]
            command += [str(ROOT / "pretrain_gpt.py"), *run.make_overrides(**changes)]
            command += [f"checkpoint.memory_dir={memory}"]
            of_rank = {"RANK": rank, "LOCAL_RANK": local, "GLOO_SOCKET_IFNAME": "data"}
            self._processes.append(run.start(command, variables | of_rank))
        return self._processes

    def wait(self) -> list[int]:
        """Wait for all ranks, kill those that do not end, and return the exit statuses."""
        for process in self._processes:
            try:
                process.wait(LIMIT)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        return [process.returncode for process in self._processes]

    def close(self) -> None:
        """Kill all ranks and remove the hosts."""
        for process in self._processes:
            process.kill()
            process.wait()
        for name in self._names:
            with suppress(subprocess.CalledProcessError):
                _run_ip("netns", "del", name)


@contextmanager
def make_host_pair() -> Iterator[HostPair]:
    """Make two hosts, and remove them on exit.

    Raises:
        FaultSkipped: If they cannot be made here.
    """
    pair = HostPair()
    try:
        yield pair
    finally:
        pair.close()


@contextmanager
def mount_small_disk(path: Path, size: str) -> Iterator[None]:
    """Mount a separate file system of this size at `path`, and remove it on exit.

    Args:
        path: Folder at which it is mounted.
        size: As in `mount`.

    Raises:
        FaultSkipped: If it cannot be mounted.
    """
    path.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        raise FaultSkipped(f"no file system of its own here: {mounted.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def _run_ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
