"""Islands that are runs of their own and a parameter server, on a real Ray cluster: the numbers of
islands over process groups, also when a shard dies; and they go on when one of them dies, and when
it comes back."""

import json
import os
import shlex
import sys
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from bitwise import assert_bitwise_equal

if find_spec("ray") is None:
    pytest.skip("the extra 'ray' is not installed", allow_module_level=True)

from entry_runs import read_losses, train
from patience import count_lines, wait_until
from tolerances import promised
from tool_process import start_tool

from megaframe.config import load
from megaframe.distributed.ray_cluster import connect_to_ray
from megaframe.errors import UserError
from megaframe.optim.parameter_server.ray_actors import NAMESPACE, start_actors

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tools/launch"))

import ray_server  # noqa: E402

EQUAL_STEPS = 6
CONFIG = str(ROOT / "configs/demo-server.yaml")
KEYS = {
    "train__steps": 4000,
    "train__microbatch": 2,
    "train__eval_every": 0,
    "model__ffn": 32,
    "optim__schedule": "constant",
    "data__tokenizer": "null",
    "checkpoint__every": 2,
    "checkpoint__resume": "latest",
    "metrics__every": 1,
    "sync__every": 2,
}
"""The demo of the guide, on few tokens of a tiny model."""
ISLAND = {**KEYS, "train__global_batch": 4, "sync__timeout": 6}


def list_guide_commands():
    """Return the words of each command of the guide that calls a program of ours."""
    section = (ROOT / "docs/guides/islands.md").read_text().partition("## A parameter server")[2]
    lines = section.partition("```console\n")[2].partition("```")[0].splitlines()
    return [shlex.split(line)[2:] for line in lines if line.startswith("$ python ")]


@pytest.fixture(scope="module")
def cluster():
    """Yield the address of a cluster of this machine."""
    import ray

    ray.init("local", num_cpus=2, include_dashboard=False, namespace=NAMESPACE)
    connect_to_ray("auto")  # which this process already is
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()


class RunningTool:
    """A tool that runs, in the form that `wait_until` knows."""

    def __init__(self, process, output):
        self.process, self.output = process, output

    def poll(self):
        return self.process.exitcode

    def read(self):
        return self.output.read_text() if self.output.exists() else ""

    def kill(self):
        self.process.kill()
        self.process.join()


@pytest.fixture
def start(cluster, tmp_path):
    """start(tool, name, *words) -> what runs, whose output goes to tmp_path/NAME.txt."""
    started = []

    def make(tool, name, *words):
        output, environment = tmp_path / f"{name}.txt", {"RAY_ADDRESS": cluster}
        process = start_tool(tool, *words, output=output, environment=environment)
        started.append(RunningTool(process, output))
        return started[-1]

    yield make
    for each in started:
        each.kill()


@pytest.mark.slow
def test_islands_of_a_server_die_and_come_back(pool, start, overrides, tmp_path):
    """The server and the islands of the guide."""
    import ray

    groups = {
        **KEYS,
        "run__dir": tmp_path / "groups",
        "train__global_batch": 8,
        "train__stop_after": EQUAL_STEPS,
        "sync__server": "null",
        "sync__islands": 1,
        "parallel__islands": 2,
    }
    pool.run(2, train, ["--config", CONFIG, *overrides(**groups)])
    serve, *islands = list_guide_commands()
    folder = "--folder", tmp_path / "server", "--"
    tool, words = serve[0], [word for word in serve[1:] if word != "--"]
    options, run = words[: words.index("--config")], words[words.index("--config") :]
    server = start(tool, "server", *options, *folder, *run, *overrides(**ISLAND))
    wait_until(lambda: "waits for islands 0 to 1" in server.read(), server, describe=server.read)

    def start_island(number, name, **changes):
        tool, *words = islands[number]
        changes = {"run__dir": tmp_path / f"island{number}", **changes}
        return start(tool, name, *words, *overrides(**{**ISLAND, **changes}))

    def count_steps(number):
        return count_lines(tmp_path / f"island{number}/metrics.jsonl")

    first, second = (start_island(number, f"island{number}") for number in range(2))
    wait_until(lambda: count_steps(0) >= 1, first, second, describe=first.read)
    ray.kill(ray.get_actor("outer-shard-0", NAMESPACE), no_restart=False)
    for number in range(2):
        wait_until(lambda n=number: count_steps(n) >= 20, first, second, describe=second.read)
    losses = [
        torch.tensor(read_losses(tmp_path / name)[:EQUAL_STEPS], dtype=torch.float64)
        for name in ("groups", "island0", "island1")
    ]
    assert_bitwise_equal(
        [(losses[1] + losses[2]) / 2],
        [losses[0]],
        because="islands read the same samples, and a server sums as process groups do",
    )

    second.kill()
    other = start_island(0, "other", run__dir=tmp_path / "other", model__hidden=32)
    missing = start_island(0, "missing", run__dir=tmp_path / "missing", sync__server="inner")
    wait_until(lambda: "is left out" in server.read(), first, server, describe=server.read)
    alone = count_steps(0)
    wait_until(lambda: count_steps(0) >= alone + 10, first, describe=first.read)
    again = start_island(1, "again")
    log = tmp_path / "island1/run.log"
    wait_until(lambda: "joins the other islands at step" in log.read_text(), again, first)
    begun = count_steps(1)
    wait_until(lambda: count_steps(1) >= begun + 6, again, first, describe=again.read)
    lines = [json.loads(line) for line in (log.parent / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines]
    assert max(later - step for step, later in pairwise(steps)) > 10
    assert "island 1 was not heard for" in server.read()
    assert any(line["bytes"]["islands"] > 0 for line in lines)

    wait_until(lambda: other.poll() is not None)
    assert other.poll() == 2
    assert "island 0 does not train what server outer synchronises: parameter" in other.read()
    wait_until(lambda: missing.poll() is not None)
    assert "there is no server sync.server=inner on this Ray cluster" in missing.read()


def train_with_server(address, words):
    """Train on a rank that imported Ray before there was a cluster with a token."""
    os.environ["RAY_ADDRESS"] = address
    os.environ.pop("RAY_AUTH_MODE", None)
    import ray  # noqa: F401

    train(words)


@pytest.mark.slow
def test_an_island_of_any_layout_that_averages_alone_is_a_run_without_a_server(
    cluster, pool, overrides, tmp_path
):
    """Each rank exchanges its own boxes with two shards, which have the rows of all."""
    keys = {"train__steps": 7, "train__microbatch": 2}
    pool.run(1, train, overrides(run__dir=tmp_path / "plain", **keys))
    layout = {"parallel__tensor": 2, "parallel__data": 2, "parallel__zero": 3}
    sync = {"sync__server": "alone", "sync__every": 2, "sync__optimizer": "sgd"}
    words = overrides(**keys, **layout, **sync)
    take_notes = start_actors(load(None, words), tmp_path / "server", 2)
    pool.run(4, train_with_server, cluster, words)
    assert read_losses(tmp_path / "run") == promised(read_losses(tmp_path / "plain"))
    assert take_notes() == ["island 0 joins at round 0", "island 0 leaves after round 4"]


def test_a_server_that_cannot_be_is_refused(overrides):
    config = ray_server.parse_run(overrides())[0]
    with pytest.raises(UserError, match=r"sync\.server is missing"):
        ray_server.check_server(config, 1)
    keys = {"sync__server": "s", "sync__staleness": 1}
    config = ray_server.parse_run(overrides(**keys))[0]
    with pytest.raises(UserError, match=r"staleness=1 does not go with .*\n  --shards 0"):
        ray_server.check_server(config, 0)
