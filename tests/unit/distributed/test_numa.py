"""NUMA binding: what is read from /sys, how ranks divide cores, and a process that is bound."""

import json
import os

import pytest
from tool_process import run_tool

from megaframe.distributed.numa import (
    assign_nodes,
    divide_cores,
    find_node_at,
    format_ranges,
    read_node_cores,
)

GPUS = {"0000:3b:00.0": 0, "0000:5e:00.0": 0, "0000:af:00.0": 1, "0000:d8:00.0": -1}


@pytest.fixture
def system(tmp_path):
    """Return the root of a machine of two NUMA nodes with 8 cores each, of which each has two
    hardware threads; a third node has memory only."""

    def write(name, text):
        path = tmp_path / "sys" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")

    for node, cores in enumerate(("0-7,16-23", "8-15,24-31", "")):
        write(f"devices/system/node/node{node}/cpulist", cores)
    for number in range(32):
        siblings = f"{number % 16},{number % 16 + 16}"
        write(f"devices/system/cpu/cpu{number}/topology/thread_siblings_list", siblings)
    for address, node in GPUS.items():
        write(f"bus/pci/devices/{address}/numa_node", str(node))
    return tmp_path


def parse_numbers(text):
    """Return the numbers in `0-3,8`."""
    parts = (part.split("-") for part in text.split(","))
    return {n for ends in parts for n in range(int(ends[0]), int(ends[-1]) + 1)}


def test_nodes_and_devices_are_read_as_the_kernel_writes_them(system):
    known = read_node_cores(system)
    assert {node: format_ranges(cores) for node, cores in known.items()} == {
        0: "0-7,16-23",
        1: "8-15,24-31",
    }
    nodes = {address: find_node_at(address.upper(), known, system) for address in GPUS}
    assert [*nodes.values()] == [0, 0, 1, None]
    assert find_node_at("0000:00:00.0", known, system) is None
    assert find_node_at("0000:d8:00.0", {0: known[0]}, system) == 0, "there is only one"
    assert read_node_cores(system / "nothing") == {}


@pytest.mark.parametrize(
    ("nodes", "allowed", "expected"),
    [
        ([0, 0, 1], "0-31", ["0-3,16-19", "4-7,20-23", "8-15,24-31"]),
        # A container: what is allowed is divided, and hardware threads stay together.
        ([0, 0], "0-2,16-18", ["0,16", "1-2,17-18"]),
        ([0, 0], "0-3", ["0-1", "2-3"]),
        # A node without allowed cores, one that is not known, and more ranks than cores.
        ([0, 1], "0-7", ["0-7", ""]),
        ([None, 1], "0-31", ["", "8-15,24-31"]),
        ([0, 0, 0], "1-2,17", ["1-2,17"] * 3),
    ],
)
def test_ranks_of_a_node_divide_its_allowed_cores(nodes, allowed, expected, system):
    binding = divide_cores(nodes, read_node_cores(system), parse_numbers(allowed), system)
    assert [format_ranges(cores) for cores in binding.cores] == expected


def test_without_gpus_ranks_are_spread_over_the_nodes_they_may_use(system):
    known = read_node_cores(system)
    assert assign_nodes(4, known, range(32)) == [0, 0, 1, 1]
    assert assign_nodes(3, known, range(32)) == [0, 0, 1]
    assert assign_nodes(2, known, range(8, 12)) == [1, 1]
    assert assign_nodes(2, {}, range(8)) == [None, None]


def test_the_log_says_where_the_ranks_of_a_machine_are(system):
    binding = divide_cores([0, 0, 1, 1, None], read_node_cores(system), range(32), system)
    assert str(binding) == (
        "local ranks 0-1 on node 0 (cores 0-3,16-19 and 4-7,20-23), "
        "local ranks 2-3 on node 1 (cores 8-11,24-27 and 12-15,28-31)"
    )


BOUND = """
import json, os, sys, threading
from contextlib import suppress
from pathlib import Path
import torch
from megaframe.distributed.numa import bind_to_numa_node
for wanted, root in zip(sys.argv[1::2], sys.argv[2::2]):
    lines = bind_to_numa_node(wanted, torch.device("cpu"), root=Path(root))
    found = []
    thread = threading.Thread(target=lambda: found.append(sorted(os.sched_getaffinity(0))))
    thread.start(); thread.join()
    sets = set()
    for path in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):  # a thread that is joined may not have left yet
            sets.add(tuple(sorted(os.sched_getaffinity(int(path.name)))))
    print(json.dumps([lines, found[0], len(sets)]))
"""
"""Binds itself, each time as two words say, and prints what it logs, the cores of a thread that it
starts, and how many sets of cores its threads have."""


def test_a_process_is_bound_with_all_its_threads(tmp_path):
    allowed = sorted(os.sched_getaffinity(0))
    folder = tmp_path / "sys/devices/system/node/node0"
    folder.mkdir(parents=True)
    (folder / "cpulist").write_text(format_ranges(allowed) + "\n")
    own_environment = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "2"}
    words = ["auto", tmp_path, "node", tmp_path / "nothing", "node", tmp_path]
    (tmp_path / "bound.py").write_text(BOUND)
    process = run_tool(tmp_path / "bound.py", *words, environment=own_environment)
    assert process.returncode == 0, process.stderr
    reports = [json.loads(line) for line in process.stdout.splitlines()]
    assert reports[0][:2] == [[], allowed], "a CPU's ranks are bound only if asked"
    (line,), cores, _ = reports[1]
    assert cores == allowed
    assert line.endswith("not bound: the system does not say which cores a NUMA node has")
    (line,), cores, sets = reports[2]
    assert cores == (allowed[len(allowed) // 2 :] or allowed) and sets == 1
    assert line.startswith("bound to NUMA nodes, ") and "local ranks 0-1 on node 0 (cores " in line
