"""The network lab: its links do not change a run's results, they are as slow as declared, and a lab
leaves nothing behind, however it ends."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from entry_runs import read_losses
from hypothesis import given, settings
from hypothesis import strategies as st
from patience import wait_until
from programs import load_program
from slow_cases import slow
from tolerances import promised

from megaframe.errors import UserError

ROOT = Path(__file__).resolve().parents[3]
TOOL = ROOT / "tools/netlab.py"
sys.path.insert(0, str(ROOT))
sys.path.append(str(TOOL.parent))  # at the end: tools bear names of installed packages
netlab = load_program(TOOL)
from network_lab import Link, LinkOutage, emulate_hosts, run_on_hosts  # noqa: E402
from network_lab.hosts import check_links, remove_stale_namespaces  # noqa: E402

import pretrain_gpt  # noqa: E402


def explain_refusal():
    """Return why this machine can have no lab, or None."""
    try:
        check_links([Link("1gbit")])
    except UserError as error:
        return str(error)
    return None


lab = pytest.mark.skipif(explain_refusal() is not None, reason=str(explain_refusal()))


def list_namespaces():
    listed = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True)
    return [line.split()[0] for line in listed.stdout.splitlines() if line.startswith("netlab-")]


def list_processes(mark):
    """Return the ids of the processes with `mark` among the words of their command line."""
    pids = []
    for name in filter(str.isdigit, os.listdir("/proc")):  # a glob fails at a process that ends
        path = Path("/proc", name, "cmdline")
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if mark.encode() in words:
            pids.append(int(path.parent.name))
    return pids


def start(folder, *words):
    """Start the tool as a shell starts it in the foreground.

    SIGINT is reset to its default, because a background job, which the tests may be, ignores it.
    """
    return subprocess.Popen(
        [sys.executable, str(TOOL), "--folder", str(folder / "lab"), *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def train(overrides):
    sys.argv = ["pretrain_gpt.py", *overrides]
    pretrain_gpt.main()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--hosts", "0"], "--hosts 0 --ranks 1: both are 1 or more"),
        (["--hosts", "101"], "101 hosts; use 1 to 100"),
        (["--link", "fast"], "rate 'fast' is not a number above 0 with kbit, mbit or gbit"),
        (["--link", "0mbit"], "above 0"),
        (["--slow", "2=1mbit"], "--slow 2=1mbit: with --hosts 2 they are numbered 0 to 1"),
        (["--slow", "1:1mbit"], "is not HOST=RATE"),
        (["--slow", "1=slow"], "rate 'slow'"),
        (["--drop", "2@1"], "--drop 2@1: with --hosts 2 they are numbered 0 to 1"),
        (["--drop", "1@1.2.3"], "is not HOST@SECONDS or HOST@SECONDS:SECONDS"),
        (["--latency", "soon"], "latency 'soon' is not a number with us, ms or s"),
    ],
)
def test_what_makes_no_lab_is_refused(words, expected, call_main):
    status, _, errors = call_main(netlab.main, *words, "--", "true")
    assert status == 2 and expected in errors


@given(st.integers(0, 9), st.floats(0, 1e6), st.none() | st.floats(0, 1e6))
@settings(max_examples=30)
def test_a_lost_link_is_read_as_it_is_written(host, after, length):
    text = f"{host}@{after:.3f}" + ("" if length is None else f":{length:.3f}")
    outage = netlab.parse_outage(text, 10)
    assert (outage.host, outage.after) == (host, pytest.approx(after, abs=1e-3))
    assert outage.length == (None if length is None else pytest.approx(length, abs=1e-3))


@lab
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["pretrain_gpt.py", "model.layer=2"], "model.layers"),
        (["no_such_file.py"], "there is no file no_such_file.py"),
    ],
)
def test_a_mistake_in_the_command_is_found_before_a_host_is_made(
    words, expected, monkeypatch, call_main
):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(netlab, "emulate_hosts", None)
    status, _, errors = call_main(netlab.main, "--", *words)
    assert status == 2 and expected in errors


_ANSWER = """
import hashlib, socket
connection, _ = socket.create_server(("0.0.0.0", 5000)).accept()
connection.send(connection.recv(1))
content = b"".join(iter(lambda: connection.recv(1 << 16), b""))
print(hashlib.sha256(content).hexdigest())
"""
_ASK = """
import hashlib, random, socket, sys, time
while True:
    try:
        connection = socket.create_connection((sys.argv[1], 5000))
        break
    except ConnectionRefusedError:
        time.sleep(0.05)
begin = time.monotonic()
connection.send(b"?")
connection.recv(1)
print(time.monotonic() - begin)
content = random.Random(0).randbytes(2_000_000)
connection.sendall(content)
print(hashlib.sha256(content).hexdigest())
"""


@lab
def test_what_hosts_send_arrives_late_and_whole():
    links = [Link("200mbit", "30ms"), Link("200mbit", "10ms"), Link("200mbit")]
    with emulate_hosts(links) as hosts:
        relay = list_processes(f"{hosts[0].port}:{hosts[0].relay[1]}:0.03")
        assert relay
        for asking, least in ((1, 0.04), (2, 0.03)):
            command = [*hosts[0].command, sys.executable, "-c", _ANSWER]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as answering:
                command = [*hosts[asking].command, sys.executable, "-c", _ASK, hosts[0].address]
                asked = subprocess.run(command, check=True, capture_output=True, text=True)
                seconds, sent = asked.stdout.split()
                assert answering.communicate()[0].split() == [sent]
            assert float(seconds) >= least
    own = f"netlab-{os.getpid()}-"  # other tests may have labs at the same time
    assert not [name for name in list_namespaces() if name.startswith(own)]
    assert not set(relay) & set(list_processes(f"{hosts[0].port}:{hosts[0].relay[1]}:0.03"))


@pytest.mark.slow
@lab
def test_a_run_over_links_is_the_run_without_them(pool, overrides, tmp_path):
    keys = {"train__steps": 4, "model__hidden": 32}
    pool.run(1, train, overrides(run__dir=tmp_path / "alone", **keys))
    words = ["--hosts", "2", "--link", "100mbit", "--slow", "1=50mbit", "--", "pretrain_gpt.py"]
    process = start(tmp_path, *words, *overrides(run__dir=tmp_path / "run", **keys))
    output = process.communicate()[0].decode()
    assert process.returncode == 0, output
    assert "4/4" in output and "50mbit" in output
    assert read_losses(tmp_path / "run") == promised(read_losses(tmp_path / "alone"))
    summary = json.loads((tmp_path / "lab/summary.json").read_text())
    assert summary["steps"] == 3 and summary["bytes"]["data"] > 0
    for (sent, _), other in zip(
        summary["link_bytes"], reversed(summary["link_bytes"]), strict=True
    ):
        assert sent > 3 * summary["bytes"]["data"] / 2  # with two ranks, half of a sum stays local
        # The other host receives everything that one sends, except a few packets at both ends.
        assert other[1] == pytest.approx(sent, rel=0.05)
    assert (tmp_path / "lab/host-1.txt").exists()


SEND = """
import os, socket, sys, time
rank, size, address = int(os.environ["NODE_RANK"]), int(sys.argv[1]), os.environ["MASTER_ADDR"]
if rank == 0:
    with socket.create_server((address, 7000)) as server:
        other, _ = server.accept()
        start, left = time.monotonic(), size
        while left:
            left -= len(other.recv(min(left, 1 << 16)))
        print(time.monotonic() - start)
else:
    for _ in range(400):
        try:
            first = socket.create_connection((address, 7000))
            break
        except OSError:
            time.sleep(0.02)
    first.sendall(bytes(size))
"""


@lab
def test_a_transfer_takes_at_least_as_long_as_its_link_says(tmp_path):
    size, burst = 1_000_000, 128 * 1024
    with emulate_hosts([Link("1gbit"), Link("20mbit")]) as hosts:
        outcome = run_on_hosts(
            hosts, [sys.executable, "-c", SEND, str(size)], ranks=1, folder=tmp_path
        )
    assert outcome.statuses == (0, 0)
    assert outcome.link_bytes[1][0] > size and outcome.link_bytes[0][1] > size
    # The path has two token buckets, the host's and the switch's; each lets a burst through.
    assert float((tmp_path / "host-0.txt").read_text()) > (size - 2 * burst) * 8 / 20e6


@lab
def test_a_link_is_lost_when_asked_and_comes_back(tmp_path):
    """Host 1 waits for the loss, and for its end; host 0 watches its own link until then."""
    watch = """
        record() { c=$(cat /sys/class/net/uplink/carrier); echo $c >> $0/$NODE_RANK; sleep 0.02; }
        if [ $NODE_RANK = 1 ]; then
            until record; [ $c = 0 ]; do :; done
            until record; [ $c = 1 ]; do :; done
            touch $0/back
        else
            until record; [ -e $0/back ]; do :; done
        fi
    """
    # The loss lasts longer than it may take a busy machine to start the hosts.
    outage = LinkOutage(1, 0.3, 2.0)
    command = ["sh", "-c", watch, str(tmp_path)]
    with emulate_hosts([Link("1gbit")] * 2) as hosts:
        outcome = run_on_hosts(hosts, command, ranks=1, folder=tmp_path, outages=[outage])
    assert outcome.status == 0
    first, second = ((tmp_path / str(n)).read_text().split() for n in (0, 1))
    changes = [a for a, b in zip(second, [*second[1:], None], strict=True) if a != b]
    assert changes[-2:] == ["0", "1"] and len(changes) <= 3
    assert set(first) == {"1"}


@lab
def test_a_host_that_fails_ends_the_lab_with_its_status_and_nothing_stays(tmp_path, monkeypatch):
    monkeypatch.setattr("network_lab.run.GRACE_SECONDS", 0.2)
    before, mark = list_namespaces(), f"9{os.getpid()}"
    script = f"sleep {mark} & if [ $NODE_RANK = 1 ]; then exit 7; fi; sleep {mark}"
    with emulate_hosts([Link("1gbit")] * 2) as hosts:
        outcome = run_on_hosts(hosts, ["sh", "-c", script], ranks=1, folder=tmp_path)
    assert outcome.statuses[1] == 7 and outcome.statuses[0] != 0
    wait_until(lambda: not list_processes(mark))
    assert list_namespaces() == before


@lab
@pytest.mark.parametrize("number", [signal.SIGTERM, slow(signal.SIGINT), signal.SIGKILL])
def test_nothing_runs_on_after_the_tool_was_ended(number, tmp_path):
    mark = f"{8 + number}{os.getpid()}"
    process = start(tmp_path, "--", "sh", "-c", f"sleep {mark} & sleep {mark}")
    try:
        wait_until(lambda: len(list_processes(mark)) >= 4)
        own_namespaces = [
            name for name in list_namespaces() if name.startswith(f"netlab-{process.pid}-")
        ]
        assert len(own_namespaces) == 3
        process.send_signal(number)
        process.wait(20)
        wait_until(lambda: not list_processes(mark))
    finally:
        process.kill()
        process.communicate()
    left = [name for name in list_namespaces() if name in own_namespaces]
    if number == signal.SIGKILL:
        assert sorted(left) == sorted(own_namespaces)
        assert sorted(remove_stale_namespaces()) == sorted(own_namespaces)
    else:
        assert left == []
    assert not set(list_namespaces()) & set(own_namespaces)
