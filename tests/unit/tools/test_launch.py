"""Launching on clusters: what a node does."""

import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from patience import PATIENCE, count_lines, wait_until
from programs import load_program
from slow_cases import slow
from tool_process import run_tool

from megaframe.config import load
from megaframe.errors import UserError
from megaframe.io.local_rendezvous import find_free_port

ROOT = Path(__file__).resolve().parents[3]
LAUNCH = ROOT / "tools/launch"
node = load_program(LAUNCH / "node.py")


def test_a_node_is_told_by_the_variables_of_torchrun_and_the_rest_is_usual():
    variables = {"PET_NNODES": "2:4", "PET_MASTER_ADDR": "first", "PET_MASTER_PORT": "29400"}
    settings = {**variables, **node.make_launcher_defaults(variables)}
    assert settings["PET_NNODES"] == "2:4" and settings["PET_RDZV_ENDPOINT"] == "first:29400"
    assert "SIGUSR1" in settings["PET_SIGNALS_TO_HANDLE"] and settings["PET_RDZV_BACKEND"] == "c10d"
    assert node.make_launcher_defaults({**settings, "PET_RDZV_ENDPOINT": "other:1"}) == {}


@pytest.mark.parametrize(
    ("nodes", "ranks", "world"), [("1", "3", 3), ("2", "2", 4), ("2:4", "8", 32)]
)
def test_the_config_is_checked_for_as_many_ranks_as_may_come(nodes, ranks, world):
    assert node.compute_largest_world(nodes, ranks) == world


@pytest.mark.parametrize(("nodes", "ranks"), [("many", "1"), ("1:2:3", "1"), ("1", "all")])
def test_numbers_of_nodes_and_ranks_that_are_none_are_refused(nodes, ranks):
    with pytest.raises(UserError, match="PET_N"):
        node.compute_largest_world(nodes, ranks)


def test_a_single_node_takes_any_free_port():
    """So two runs on one machine do not meet each other."""
    assert node.make_launcher_defaults({})["PET_RDZV_ENDPOINT"] == "localhost:0"
    assert node.make_launcher_defaults({"PET_NNODES": "2"})["PET_RDZV_ENDPOINT"] != "localhost:0"
    given = node.make_launcher_defaults({"MASTER_PORT": "1234"})
    assert given["PET_RDZV_ENDPOINT"] == "localhost:1234"


@pytest.mark.parametrize("address", ["", "127.0.0.1"])
def test_a_busy_port_is_refused_with_who_has_it(address, capsys):
    with socket.create_server((address, 0)) as server:
        endpoint = f"localhost:{server.getsockname()[1]}"
        settings = {"PET_NNODES": "1", "PET_RDZV_ENDPOINT": endpoint}
        with pytest.raises(UserError, match=rf"{endpoint} .*: process {os.getpid()} \(.* listens"):
            node.check_port(settings)
        node.check_port({**settings, "PET_NNODES": "2"})  # may be another node of the run
        assert f"process {os.getpid()} (" in capsys.readouterr().err
    node.check_port(settings)
    for elsewhere in ("host.invalid:29400", "localhost:0", "localhost:99999", "localhost"):
        node.check_port({**settings, "PET_RDZV_ENDPOINT": elsewhere})
    assert capsys.readouterr().err == ""


LATEST, NOWHERE = "checkpoint.resume=latest", "data.sources=[{path: /nowhere}]"


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (["model.layers=0"], "model.layers=0"),
        ([], "set checkpoint.resume=latest"),
        ([LATEST, "model.vocab=61"], "data.sources is empty"),
        ([LATEST, "model.vocab=61", NOWHERE], "data.sources: cannot open /nowhere.idx"),
        ([LATEST, "data.tokenizer=hf:/nowhere.json"], "cannot read tokenizer file /nowhere.json"),
    ],
)
def test_a_mistake_ends_a_node_before_its_ranks_are_started(keys, expected, monkeypatch, call_main):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(node, "launch", None)
    status, _, errors = call_main(node.main, *keys)
    assert status == 2 and expected in errors


def test_a_node_checks_the_split_that_is_evaluated(overrides):
    config = load(None, overrides(train__eval_every=1))
    node.check_data(config)
    few = load(None, overrides(train__eval_every=1, data__split="[0.999, 0.001, 0]"))
    with pytest.raises(UserError, match=r"leaves the validation split of .* without a document"):
        node.check_data(few)


@pytest.mark.parametrize(("status", "starts"), [(2, 1), slow(5, 3)])
def test_ranks_are_started_again_unless_the_user_has_made_a_mistake(status, starts, tmp_path):
    program = tmp_path / "rank.py"
    program.write_text(
        f"import os, sys, time\nopen({str(tmp_path / 'starts')!r}, 'a').write(os.environ['RANK'])\n"
        f"if os.environ['RANK'] == '1':\n    sys.exit({status})\ntime.sleep(60)\n"
    )
    process = launch_program(program, PET_MAX_RESTARTS="2", PET_MONITOR_INTERVAL="0.05")
    assert process.returncode == status, process.stderr
    assert f"rank 1 failed first, with status {status}" in process.stderr
    assert (tmp_path / "starts").read_text().count("1") == starts


@pytest.mark.slow
def test_a_mistake_of_one_node_ends_the_others_too(tmp_path):
    program = tmp_path / "rank.py"
    program.write_text(
        "import os, sys, time\n"
        f"open({str(tmp_path / 'starts')!r}, 'a').write(os.environ['RANK'])\n"
        "time.sleep(1 if os.environ['RANK'] == '1' else 4)\n"
        "sys.exit(2 if os.environ['RANK'] == '1' else 3)\n"
    )
    endpoint = {"PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": f"localhost:{find_free_port()}"}
    both = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_MAX_RESTARTS": "3", **endpoint}
    with ThreadPoolExecutor() as nodes:
        ended = list(nodes.map(lambda _: launch_program(program, **both), range(2)))
    assert sorted(node.returncode for node in ended) == [1, 2]
    (other,) = (node for node in ended if node.returncode == 1)
    assert "another node has ended the run" in other.stderr
    assert "Traceback" not in other.stderr
    assert sorted((tmp_path / "starts").read_text()) == ["0", "1"]


def launch_program(program, **variables):
    """Run two ranks of a program as a node does; return the finished process."""
    launcher = program.with_name("launcher.py")
    launcher.write_text(
        f"import sys\nsys.path.insert(0, {str(LAUNCH)!r})\nimport node\n"
        f"sys.exit(node.launch([{str(program)!r}]))\n"
    )
    return run_tool(launcher, environment={"PET_NPROC_PER_NODE": "2", **variables})


@pytest.mark.slow
def test_a_node_ends_with_the_status_of_the_rank_that_failed_first(tmp_path):
    """A rank that a signal ended gives 128 plus the signal's number, as in a shell."""
    program = tmp_path / "rank.py"
    program.write_text(
        "import os, sys, time\nif os.environ['RANK'] == '1':\n    sys.exit(3)\ntime.sleep(60)\n"
    )
    process = launch_program(program, PET_MAX_RESTARTS="0")
    assert process.returncode == 3, process.stderr
    assert "rank 1 failed first, with status 3" in process.stderr
    assert node.report_failure(0, -signal.SIGKILL) == 137


@pytest.mark.slow
def test_a_node_that_is_asked_to_leave_saves_and_tells_so(overrides, tmp_path):
    keys = overrides(train__steps=10**6, checkpoint__every=10**6, checkpoint__resume="latest")
    command = [sys.executable, str(LAUNCH / "node.py"), "--no-doctor", *keys]
    with open(tmp_path / "output", "w") as log_file:
        process = subprocess.Popen(command, stdout=log_file, stderr=log_file, cwd=ROOT)
    try:
        metrics, output = tmp_path / "run/metrics.jsonl", tmp_path / "output"
        wait_until(lambda: count_lines(metrics) >= 2, process, describe=output.read_text)
        process.send_signal(signal.SIGUSR1)
        assert process.wait(PATIENCE) == 138, output.read_text()
    finally:
        process.kill()
    assert (tmp_path / "run/checkpoints/latest").exists()
