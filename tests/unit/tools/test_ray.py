"""Runs and sweeps on a real Ray cluster of two nodes on this machine: a killed rank is replaced and
nothing is lost, and a sweep stops the worse trials."""

import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from tolerances import promised

if find_spec("ray") is None:
    pytest.skip("the extra 'ray' is not installed", allow_module_level=True)

from entry_runs import read_losses, train

ROOT = Path(__file__).resolve().parents[3]
LAUNCH = ROOT / "tools/launch"
sys.path.insert(0, str(LAUNCH))

import ray_train  # noqa: E402
import ray_tune  # noqa: E402

from megaframe.dashboard.sweep import Sweep  # noqa: E402
from megaframe.errors import UserError  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster():
    """Yield the address of a cluster of two nodes with one CPU each."""
    from ray.cluster_utils import Cluster  # every worker would wait for it when it lists the tests

    started = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    started.add_node(num_cpus=1)
    started.wait_for_nodes()
    yield started.address
    started.shutdown()


@pytest.fixture
def start(tmp_path):
    """start(tool, *words) -> process, whose output goes to tmp_path/output.

    A pipe would block the process while a test waits for something else and does not read it.
    """
    started = []

    def make(tool, *words):
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}
        command = [sys.executable, str(LAUNCH / tool), *words]
        with open(tmp_path / "output", "w") as log_file:
            started.append(
                subprocess.Popen(command, env=environment, stdout=log_file, stderr=log_file)
            )
        return started[-1]

    yield make
    for process in started:
        process.kill()
        process.wait()


def wait_for_end(process, tmp_path):
    """Wait for a process; return its exit status and output."""
    return process.wait(300), (tmp_path / "output").read_text()


def find_worker(run, rank):
    """Return the id of Ray's process that started a rank of a run. Raises `LookupError`."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().split(b"\0")
            variables = (path / "environ").read_bytes().split(b"\0")
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        is_rank_of_run = {ray_train.ENTRY.encode(), f"run.dir={run}".encode()} <= {*words}
        if is_rank_of_run and f"RANK={rank}".encode() in variables:
            return parent
    raise LookupError(f"no process of rank {rank}")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--ranks", "2"], "set checkpoint.resume=latest"),
        (["--ranks", "few", "--failures", "0"], "--ranks few is neither a number nor two"),
        (["--ranks", "1:2", "--failures", "0"], "--ranks 1:2 needs faults.elastic=true"),
        (["--failures", "0", "--address", "127.0.0.1:1"], "there is no Ray cluster at 127.0.0.1:1"),
    ],
)
def test_what_cannot_run_is_refused(words, expected, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["ray_train.py", *words])
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "1")
    if "--address" in words:
        import ray

        def refuse(**_):
            raise ConnectionError("refused")

        monkeypatch.setattr(ray, "init", refuse)
    with pytest.raises(SystemExit) as ended:
        ray_train.main()
    assert ended.value.code == 2
    assert expected in capsys.readouterr().err


def test_more_ranks_than_the_cluster_has_places_are_refused(cluster, start, overrides, tmp_path):
    options = ("--address", cluster, "--ranks", "3", "--failures", "0")
    status, output = wait_for_end(start("ray_train.py", *options, "--", *overrides()), tmp_path)
    assert status == 2
    assert "3 ranks need 3 CPU and the cluster has 2" in output


def test_a_worker_that_is_killed_is_replaced_and_the_run_goes_on(
    cluster, start, pool, overrides, tmp_path
):
    keys = {"train__steps": 150, "train__microbatch": 2, "checkpoint__every": 10}
    pool.run(1, train, overrides(run__dir=tmp_path / "alone", **keys))
    words = overrides(**keys, checkpoint__resume="latest", parallel__tensor=2)
    options = ("--address", cluster, "--ranks", "2", "--failures", "2")
    process = start("ray_train.py", *options, "--", *words)
    metrics, deadline = tmp_path / "run/metrics.jsonl", time.monotonic() + 300
    while time.monotonic() < deadline and process.poll() is None:
        if metrics.exists() and metrics.read_text().count("\n") >= 25:
            break
        time.sleep(0.02)
    os.kill(find_worker(tmp_path / "run", 1), signal.SIGKILL)
    status, output = wait_for_end(process, tmp_path)
    assert status == 0, output
    ledger = (tmp_path / "run/faults/ledger.jsonl").read_text()
    assert ledger.count('"start"') == 2, output
    assert '"restart"' in ledger and '"idle"' not in ledger
    assert read_losses(tmp_path / "run") == promised(read_losses(tmp_path / "alone"))


def test_a_mistake_that_only_the_ranks_find_is_not_tried_again(cluster, start, overrides, tmp_path):
    words = overrides(data__sources="[{path: /nowhere}]", checkpoint__resume="latest")
    options = ("--address", cluster, "--ranks", "2", "--failures", "9")
    status, output = wait_for_end(start("ray_train.py", *options, "--", *words), tmp_path)
    assert status == 2, output
    assert "/nowhere" in output


def test_a_space_is_checked_against_the_config_before_a_trial():
    sweep = Sweep.parse([], ["optim.lr=[1e-3, 1e-2]", "optim.beta2=uniform:0.9:1.5"], "loss")
    with pytest.raises(UserError, match="beta2"):
        sweep.check(ray_tune.list_extreme_trials(sweep))
    sweep = Sweep.parse([], ["optim.no_key=[1]"], "loss")
    with pytest.raises(UserError, match="no_key"):
        sweep.check(ray_tune.list_extreme_trials(sweep))


def test_a_sweep_finds_the_better_rate_and_stops_the_others(cluster, start, overrides, tmp_path):
    keys = {"train__steps": 400, "train__global_batch": 16, "train__microbatch": 2}
    words = overrides(run__dir=tmp_path / "sweep", **keys)
    options = (
        "--address",
        cluster,
        "--sweep",
        "optim.lr=[1e-2, 1e-6, 2e-6, 3e-6]",
        "--grace",
        "50",
    )
    status, output = wait_for_end(start("ray_tune.py", *options, "--", *words), tmp_path)
    assert status == 0, output
    trials = json.loads((tmp_path / "sweep/sweep.json").read_text())
    assert len(trials) == 4 and all(trial["error"] is None for trial in trials)
    assert "best: optim.lr=1e-2" in output
    assert min(one["step"] for one in trials) < 400 == max(one["step"] for one in trials)
