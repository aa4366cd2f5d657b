"""Islands of a parameter server, as threads of this process, against islands over process groups:
the same bits where all wait for all, and close to them where they do not
(`megaframe/optim/parameter_server`)."""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from bitwise import assert_bitwise_equal
from local_server import LocalServer
from parity_runs import share
from patience import PATIENCE
from repo_copy import ROOT
from slow_cases import slow

from megaframe.config import RunConfig
from megaframe.data.microbatch import Microbatch
from megaframe.distributed.mesh import Mesh, read_world_size
from megaframe.layout import Layout
from megaframe.metrics import StepTimer
from megaframe.optim.parameter_server.coordinator import describe_model
from megaframe.training import island_setup
from megaframe.training.layer_check.parity import make_global_batch
from megaframe.training.train_step import TrainStep

STEPS = 7
"""Three rounds of two steps, and one more before the end."""
SERVER = {"server": "local", "islands": 2}
FORMS = {"bulk_synchronous": {}, "bounded_staleness": {"staleness": 1}, "asynchronous": {}}
EVERY = {"every": 2}


def make_config(parallel=None, steps=STEPS, **sync):
    model = {"layers": 2, "hidden": 16, "heads": 4, "vocab": 37, "init_std": 0.2, "dropout": 0.0}
    return RunConfig(
        model={**model, "vocab": 37},
        train={"seq": 10, "precision": "fp64", "steps": steps, "global_batch": 8},
        optim={"lr": 0.01, "clip": 0.5, "schedule": "constant", "eps": 1e-3},
        parallel=parallel or {},
        sync={**EVERY, **sync},
    )


def train_island(config, island, islands):
    """Train on this rank; return its tensors: weights and optimizer state."""
    mesh = Mesh(
        Layout.from_parallel(config.parallel, read_world_size()), device="cpu", timeout=PATIENCE
    )
    train_step = TrainStep(config, mesh, StepTimer().time)
    train_step.optimizer.initialize(config.run.seed)
    island = mesh.coordinate["data"] if island is None else island
    train_step.islands.begin()
    step = train_step.islands.join(0)
    while step < config.train.steps:
        batch = make_global_batch(config.model, config.train, step)
        own = slice(island, None, islands)
        batch = Microbatch(batch.tokens_BS[own], batch.labels_BS[own], batch.samples_B[own])
        valid = float(batch.sum_label_weights())
        train_step.train(share(batch, config.train.microbatch, 0, 1, False), step, 1.0 / valid)
        step += 1
    tensors = {name: piece.clone() for name, *_, piece in train_step.optimizer.list_tensors()}
    mesh.finish()
    return tensors


def train_with_groups(config, islands):
    return train_island(config, None, islands)


def train_with_server(folder, monkeypatch, count=2, shards=2, make_server=LocalServer, **sync):
    """Train islands in threads; return their tensors and the server."""
    configs = [
        make_config(**{**SERVER, "islands": count, **sync, "island": each}) for each in range(count)
    ]
    server = make_server(folder, describe_model(configs[0]), configs[0].sync, shards)
    monkeypatch.setattr(island_setup, "RayServer", lambda *_: server)
    with ThreadPoolExecutor(count) as threads:
        islands = range(count)
        return [*threads.map(train_island, configs, islands, [count] * count)], server


def read_table():
    """Return {consistency: {outer optimizer: difference}} of the table."""
    text = (ROOT / "docs/design.md").read_text().partition("| islands of a server |")[2]
    head, _, *rows = text.splitlines()
    columns = [name.strip() for name in head.strip("| ").split("|")]
    cells = (
        [cell.strip() for cell in row.strip("| ").split("|")] for row in rows if row[:1] == "|"
    )
    return {
        re.search(r"sync.consistency=(\w+)", name)[1]: dict(zip(columns, values, strict=True))
        for name, *values in cells
        if "sync.consistency" in name
    }


def measure_difference(ours, theirs):
    return max(
        float((tensor - theirs[name]).abs().max())
        for name, tensor in ours.items()
        if not name.startswith("optimizer.")
    )


@pytest.fixture(scope="module")
def synchronous(pool):
    """The tensors of each of two and of three islands of one run."""
    keys = {count: make_config({"islands": count, "zero": 0}) for count in (2, 3)}
    return {count: pool.run(count, train_with_groups, c, count) for count, c in keys.items()}


@pytest.mark.parametrize(
    ("count", "shards"), [(2, 1), (3, 2)], ids=["two islands", "three islands, two shards"]
)
def test_a_bulk_synchronous_server_is_process_groups(
    count, shards, synchronous, tmp_path, monkeypatch
):
    results, _ = train_with_server(tmp_path, monkeypatch, count, shards)
    for own, expected in zip(results, synchronous[count], strict=True):
        assert own.keys() == expected.keys()
        assert_bitwise_equal(
            own.values(),
            expected.values(),
            because="both sum in the order of islands, and round products and sums one by one",
        )


@pytest.mark.parametrize("optimizer", ["sgd", slow("nesterov")])
def test_the_table_says_how_far_other_forms_come_from_process_groups(
    optimizer, pool, tmp_path, monkeypatch
):
    """Which island pushes first is up to the threads, and so is the last digit."""
    table = read_table()
    config = make_config({"islands": 2, "zero": 0}, optimizer=optimizer)
    groups = pool.run(2, train_with_groups, config, 2)
    for form, keys in FORMS.items():
        results, _ = train_with_server(
            tmp_path / form, monkeypatch, consistency=form, optimizer=optimizer, **keys
        )
        difference = max(map(measure_difference, results, groups))
        cell = table[form][f"`sync.optimizer={optimizer}`"]
        if cell == "same":
            assert difference == 0
        else:
            assert float(cell) / 3 < difference < 3 * float(cell), (form, difference)


def test_an_island_alone_is_the_same_without_others_to_wait_for(tmp_path, monkeypatch):
    """It has no stale differences. After its last round nothing is left to push."""
    plain, alone = (
        train_with_server(tmp_path / form, monkeypatch, 1, consistency=form, steps=6)[0][0]
        for form in ("bulk_synchronous", "asynchronous")
    )
    assert_bitwise_equal(
        alone.values(), plain.values(), because="each push of one island moves the momentum"
    )


class DyingServer(LocalServer):
    """Its first shard dies and comes back before each push and each pull of it."""

    def start_push(self, shard, *arguments):
        self.restart_first(shard)
        return super().start_push(shard, *arguments)

    def start_pull(self, shard, *arguments):
        self.restart_first(shard)
        return super().start_pull(shard, *arguments)

    def restart_first(self, shard):
        if shard == 0:
            with self.lock:
                self.restart_shard(0)


def test_a_shard_that_dies_loses_nothing(synchronous, tmp_path, monkeypatch):
    results, _ = train_with_server(tmp_path, monkeypatch, make_server=DyingServer)
    for own, expected in zip(results, synchronous[2], strict=True):
        assert_bitwise_equal(
            own.values(), expected.values(), because="its files have what it has acknowledged"
        )
