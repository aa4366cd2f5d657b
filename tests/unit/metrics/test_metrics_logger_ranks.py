"""Real ranks over gloo: reductions, one writer, islands, and metrics that do not match."""

import json
import math
from contextlib import redirect_stdout
from io import StringIO

import pytest
import torch
from patience import PATIENCE

from megaframe.config import RunConfig
from megaframe.distributed.mesh import Mesh
from megaframe.layout import Layout
from megaframe.metrics import MetricsLogger
from megaframe.metrics.records import StepRecords
from megaframe.model.model_chunk import list_model_specs


def log_metrics(folder):
    """Return what this rank prints, and its results."""
    with redirect_stdout(StringIO()) as printed:
        results = run_ranks(folder)
    return printed.getvalue(), results


def run_ranks(folder):
    mesh = Mesh(Layout(data=2), device="cpu", timeout=PATIENCE)
    rank, world, cpu = mesh.rank, mesh.world, mesh.device
    results = []

    def reduce_entries(entries):
        records = StepRecords()
        for entry in entries:
            records.add(*entry)
        world.traffic.take()
        reduction = records.reduce(world, cpu)
        calls = world.traffic.take()[1]
        return reduction.wait(), calls

    entries = [
        *(("last", rank + 7.0, "last"), (f"only{rank}", 1.0, "last"), ("sum", rank + 1.0, "sum")),
        *(("max", float(rank), "max"), ("min", torch.tensor(float(rank)), "min")),
        *(("mean", 1.0, "mean"), *[("mean", 4.0, "mean")] * (2 * rank)),
    ]
    values, calls = reduce_entries(entries)
    results.append({"values": values, "calls": calls})
    nan = math.nan if rank == 1 else 1.0
    results.append(
        reduce_entries(
            [(reduction, nan, reduction) for reduction in ("sum", "mean", "max", "min")]
        )[0]
    )
    for name, count in ((f"a{rank}", 1), ("b", 1 + rank)):
        try:
            reduce_entries([(f"{name}{i}", 1.0, "sum") for i in range(count)])
            results.append("")
        except RuntimeError as error:
            results.append(str(error))

    config = RunConfig(
        run={"dir": str(folder)},
        train={"steps": 3, "seq": 16, "precision": "fp32"},
        model={"layers": 2, "hidden": 32, "heads": 4, "vocab": 97},
    )
    logger = MetricsLogger(config, mesh, list_model_specs(config.model, config.train))
    logger.note(f"note of rank {rank}")
    for step in (1, 2, 3):
        logger.start_step()
        with logger.time("compute"):
            torch.ones(64, 64) @ torch.ones(64, 64)
        logger.record("loss", torch.tensor(float(step + rank)), "sum")
        logger.record("tokens", 64)
        logger.flush(step)
    logger.close()
    mesh.finish()
    return results


@pytest.fixture(scope="module")
def ranks(pool, tmp_path_factory):
    """Return (run folder, standard output of each rank, results of each rank)."""
    folder = tmp_path_factory.mktemp("ranks")
    return folder, *zip(*pool.run(2, log_metrics, folder), strict=True)


def test_reductions_in_two_collectives(ranks):
    for rank, (first, *_) in enumerate(ranks[2]):
        assert first["calls"] == 2
        assert first["values"] == {
            "last": rank + 7.0,  # not communicated: only the first rank's value is used
            f"only{rank}": 1.0,
            "sum": 3.0,
            "max": 1.0,
            "min": 0.0,
            "mean": (1 + 1 + 4 + 4) / 4,
        }


def test_one_ranks_nan_reaches_all(ranks):
    for _, values, *_ in ranks[2]:
        assert all(value != value or abs(value) == float("inf") for value in values.values())


def test_different_metrics_are_noticed_whether_in_name_or_number(ranks):
    for rank, (_, _, name, number) in enumerate(ranks[2]):
        assert f"those of rank {rank}: ['a{rank}0:sum']" in name
        assert "different metrics" in number and "'b0:sum'" in number


def test_only_the_first_rank_writes(ranks):
    folder, outputs, _ = ranks
    lines = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in lines] == [(1, 3.0), (2, 5.0), (3, 7.0)]
    for line in lines:
        assert sum(line["time"].values()) == line["seconds"]
        assert line["tokens_per_second"] == pytest.approx(64 / line["seconds"])
    assert outputs[1] == ""
    assert "note of rank 0" in outputs[0]
    assert "measured matmul peak" in (folder / "run.log").read_text()
    assert "note of rank 1" not in outputs[0]


def reduce_in_islands():
    """Return this rank's values reduced over all ranks at once, those reduced by islands, and what
    is said if islands recorded different metrics."""
    mesh = Mesh(Layout(data=4, islands=2), device="cpu", timeout=PATIENCE)

    def reduce(entries, *groups):
        records = StepRecords()
        for entry in entries:
            records.add(*entry)
        return records.reduce(groups[0], mesh.device, *groups[1:])

    by_island = mesh.island, mesh.island_control_group
    nan = math.nan if mesh.rank == 3 else 1.0
    row = torch.tensor([mesh.rank, -mesh.rank])
    entries = [
        (f"{how} of {i}", x, how)
        for how in ("sum", "mean", "max", "min")
        for i, x in enumerate((float(mesh.rank), row, nan))
    ]
    expected = reduce(entries, mesh.world).wait()
    reduction = reduce(entries, *by_island)
    reduction.advance()
    found = reduction.wait()
    try:
        reduce([(f"a{mesh.rank // 2}", 1.0, "sum")], *by_island).wait()
    except RuntimeError as error:
        mismatch = str(error)
    mesh.finish()
    return expected, found, reduction.steps, mismatch


def test_islands_reduce_what_one_world_does_a_step_later(pool):
    first, *others = pool.run(4, reduce_in_islands)
    for rank, (expected, found, steps, mismatch) in enumerate((first, *others)):
        assert steps == 2
        assert repr(found) == repr(expected) == repr(first[1])
        assert f"those of rank {rank}: ['a{rank // 2}:sum']" in mismatch
