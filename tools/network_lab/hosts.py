"""Emulated hosts on one machine, connected by links of a given rate. Needs Linux and root.

Each host is a network namespace with a single link to a switch, which is a bridge in another
namespace. The machine's own network is not touched, and everything disappears with the namespaces.
Token buckets (`tc tbf`) shape the links in both directions: a transfer takes as long as on a wire
of that rate, while the processor sleeps. What a host sends can be delayed (`delay.py`).

A host's programs run in a process namespace whose first process dies with this process, so nothing
keeps running even if this process is killed. Its empty network namespaces then remain. The next lab
removes them; their names contain the process that made them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from megaframe.errors import UserError
from megaframe.io.process import read_start_time

BURST, QUEUE = "128kb", "4mb"
"""Bytes that a link sends at once before the rate applies, and bytes of its queue, for `tc`."""
UPLINK = "uplink"
"""Name of the network interface at each host's end of its link."""
MOST_HOSTS = 100
_TOOLS = ("ip", "tc", "unshare", "setpriv")
_RATE = re.compile(r"[0-9]+(\.[0-9]+)?([kmg]bit)", re.IGNORECASE)
_TIME = re.compile(r"([0-9]+(?:\.[0-9]+)?)(us|ms|s)", re.IGNORECASE)
_SECONDS_OF_UNIT = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_NAMESPACE = re.compile(r"netlab-([0-9]+)-([0-9]+)-")


@dataclass(frozen=True)
class Link:
    """A link between a host and the switch.

    Attributes:
        rate: Of each direction, in the format of `tc`, such as 500mbit.
        latency: Delay of what the host sends, such as 1ms, or None.
    """

    rate: str
    latency: str | None = None


@dataclass(frozen=True)
class Host:
    """A host. A command line prefixed with `command` runs on it.

    Attributes:
        name: Its network namespace.
        switch: The switch's namespace.
        port: The switch's end of the link.
    """

    name: str
    address: str
    link: Link
    switch: str
    port: str

    @property
    def relay(self) -> tuple[str, str]:
        """Where the link has a latency: the interface on the bridge, and its other end, which is
        relayed to and from `port`."""
        return f"bridged-{self.port}", f"relayed-{self.port}"

    @property
    def command(self) -> tuple[str, ...]:
        """Prefix of a command line. It also tells gloo and NCCL which network interface to use."""
        interfaces = (f"GLOO_SOCKET_IFNAME={UPLINK}", f"NCCL_SOCKET_IFNAME={UPLINK}")
        alive = ("setpriv", "--pdeathsig", "KILL", "ip", "netns", "exec", self.name)
        apart = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "env", *interfaces)
        return (*alive, *apart)

    def transferred_bytes(self) -> tuple[int, int]:
        """Return the bytes that the host has sent and received over its link, as counters by the
        interface, headers included."""
        text = _run("ip", "-n", self.name, "-s", "-j", "link", "show", UPLINK)
        counters = json.loads(text)[0]["stats64"]
        return counters["tx"]["bytes"], counters["rx"]["bytes"]

    def set_connected(self, up: bool) -> None:
        """Connect the host's link to the switch, or cut it."""
        _run("ip", "-n", self.switch, "link", "set", self.port, "up" if up else "down")


@contextmanager
def emulate_hosts(links: Sequence[Link]) -> Iterator[list[Host]]:
    """Make a host for each link. On exit, for whatever reason, all processes on the hosts are
    killed.

    Raises `UserError` before anything is made if the machine or the links do not allow it.
    """
    check_links(links)
    remove_stale_namespaces()
    with ExitStack() as stack:
        switch = stack.enter_context(_make_namespace("switch"))
        _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "bridge", "up")
        hosts: list[Host] = []
        for number, link in enumerate(links):
            name = stack.enter_context(_make_namespace(f"host{number}"))
            # All addresses have the same length, because torchrun orders nodes by address as text.
            address = f"10.0.0.{100 + number}"
            hosts.append(Host(name, address, link, switch, f"port{number}"))
            _connect_to_switch(hosts[-1])
        stack.enter_context(_delay_links(hosts))
        yield hosts


def check_links(links: Sequence[Link]) -> None:
    """Raise `UserError` if a lab with these links cannot be made on this machine."""
    if not 1 <= len(links) <= MOST_HOSTS:
        raise UserError(f"{len(links)} hosts; use 1 to {MOST_HOSTS}")
    for link in links:
        check_rate(link.rate)
        if link.latency is not None and not _TIME.fullmatch(link.latency):
            raise UserError(f"latency {link.latency!r} is not a number with us, ms or s: 1ms")
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        raise UserError(
            f"the network lab needs Linux with {', '.join(missing)}; Debian has them in the "
            "packages iproute2 and util-linux"
        )
    if os.geteuid() != 0:
        raise UserError("the network lab makes network namespaces, which needs root")
    if error := _find_kernel_error("tbf", "rate", "1mbit", "burst", BURST, "limit", QUEUE):
        raise UserError(f"this machine cannot shape links (tc tbf): {error}")


def check_rate(rate: str) -> None:
    """Raise `UserError` if `rate` is not a rate above 0 in kbit, mbit or gbit."""
    if not _RATE.fullmatch(rate) or not float(rate[:-4]):
        raise UserError(f"rate {rate!r} is not a number above 0 with kbit, mbit or gbit: 200mbit")


def remove_stale_namespaces() -> list[str]:
    """Remove the namespaces of labs whose process is gone, kill what still runs in them, and return
    their names."""
    removed = []
    for line in _run("ip", "netns", "list").splitlines():
        name = line.split()[0] if line.split() else ""
        owner = _NAMESPACE.match(name)
        if owner and read_start_time(int(owner[1])) != int(owner[2]):
            _remove(name)
            removed.append(name)
    return removed


def _find_kernel_error(*discipline: str) -> str | None:
    """Return the kernel's error message for a queueing discipline, or None if it accepts it. It is
    tried in an unnamed namespace, which ends with the command."""
    command = ("unshare", "--net", "tc", "qdisc", "add", "dev", "lo", "root", *discipline)
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    message = " ".join(completed.stderr.split())
    return None if completed.returncode == 0 else message or f"status {completed.returncode}"


def _connect_to_switch(host: Host) -> None:
    """Make the host's link to the switch, and shape it. Where it has a latency, a relay stands
    between the link and the bridge."""
    ends = ((host.name, UPLINK), (host.switch, host.port))
    pair = ("type", "veth", "peer", "name", host.port, "netns", host.switch)
    _run("ip", "link", "add", UPLINK, "netns", host.name, *pair)
    bridged = host.port
    if host.link.latency:
        bridged, relayed = host.relay
        _run(*f"ip -n {host.switch} link add {relayed} type veth peer name {bridged}".split())
        for device in host.relay:
            _run("ip", "-n", host.switch, "link", "set", device, "up")
    _run("ip", "-n", host.switch, "link", "set", bridged, "master", "bridge")
    _run("ip", "-n", host.name, "addr", "add", f"{host.address}/24", "dev", UPLINK)
    for namespace, device in (*ends, (host.name, "lo")):
        _run("ip", "-n", namespace, "link", "set", device, "up")
    shape = ("tbf", "rate", host.link.rate, "burst", BURST, "limit", QUEUE)
    for namespace, device in ends:
        _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *shape)


@contextmanager
def _delay_links(hosts: Sequence[Host]) -> Iterator[None]:
    """Relay the frames of all hosts whose links have a latency, in one process."""
    words = [
        f"{host.port}:{host.relay[1]}:{_parse_seconds(host.link.latency)}"
        for host in hosts
        if host.link.latency
    ]
    if not words:
        yield
        return
    inside = ("setpriv", "--pdeathsig", "KILL", "ip", "netns", "exec", hosts[0].switch)
    command = (*inside, sys.executable, str(Path(__file__).with_name("delay.py")), *words)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as relay:
        assert relay.stdout is not None and relay.stderr is not None
        try:
            if relay.stdout.readline() != b"ready\n":
                error = " ".join(relay.stderr.read().decode(errors="replace").split())
                raise UserError(f"this machine cannot delay links (AF_PACKET sockets): {error}")
            yield
        finally:
            relay.kill()


def _parse_seconds(latency: str) -> float:
    match = _TIME.fullmatch(latency)
    assert match is not None
    return float(match[1]) * _SECONDS_OF_UNIT[match[2].lower()]


@contextmanager
def _make_namespace(name: str) -> Iterator[str]:
    """Make a network namespace that belongs to this process, and yield its name. On exit it is
    removed, and all processes in it are killed."""
    name = f"netlab-{os.getpid()}-{read_start_time(os.getpid())}-{name}"
    try:
        _run("ip", "netns", "add", name)
        yield name
    finally:
        with _block_signals():
            _remove(name)


def _remove(name: str) -> None:
    """Remove a namespace, if it exists, and kill all processes in it."""
    if not (Path("/run/netns") / name).exists():
        return
    for process in _run("ip", "netns", "pids", name).split():
        with suppress(ProcessLookupError):
            os.kill(int(process), signal.SIGKILL)
    _run("ip", "netns", "delete", name)


@contextmanager
def _block_signals() -> Iterator[None]:
    """Defer SIGINT and SIGTERM for this process and its children: ctrl-C reaches both, and some
    launchers send SIGTERM twice."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run(*command: str) -> str:
    """Run a command and return its output. Raises `UserError` with its error output if it fails."""
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    if completed.returncode:
        raise UserError(f"{' '.join(command)}: {' '.join(completed.stderr.split())}")
    return completed.stdout
