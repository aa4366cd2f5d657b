"""No layout changes what an extension's parts do: 1e-10 in fp64, like our own."""

import hashlib
import re
from pathlib import Path

import pytest
from parity_runs import (
    EXAMPLES,
    FEW,
    LAYOUTS,
    MODELS,
    assert_same,
    run,
    run_with,
    run_with_extensions,
)
from patience import PATIENCE
from slow_cases import mark_slow

from megaframe.config import RunConfig
from megaframe.config.registry import Extension, Registry, use_registry
from megaframe.distributed.mesh import Mesh, read_world_size
from megaframe.errors import UserError
from megaframe.extensions import load_extensions
from megaframe.layout import Layout
from megaframe.metrics import StepTimer
from megaframe.planner.memory import compute_optimizer_state_bytes
from megaframe.training.same_on_ranks import check_same_extensions
from megaframe.training.train_step import TrainStep

OPTIMIZER = {
    "name": {"kind": "adabelief", "belief_eps": 1e-8},
    "schedule": {"kind": "root_decay", "share": 0.9},
    "warmup": 1,
}


@pytest.fixture(scope="module")
def expected(pool):
    arguments = str(EXAMPLES / "optimizer.py"), MODELS["llama"], {}, {}, OPTIMIZER
    return pool.run(1, run_with, *arguments)[0]


@pytest.mark.parametrize("layout", mark_slow(LAYOUTS, except_for=["all", "tensor", "zero 3"]))
def test_an_optimizer_and_a_schedule_are_those_of_one_process(layout, pool, expected):
    ranks, parallel, train = LAYOUTS[layout]
    arguments = str(EXAMPLES / "optimizer.py"), MODELS["llama"], train, parallel, OPTIMIZER
    assert_same(pool.run(ranks, run_with, *arguments), expected)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_pipeline_schedule_is_that_of_one_process(ranks, pool):
    example, model = [str(EXAMPLES / "schedule.py")], {**MODELS["llama"], "layers": 4}
    parallel = {"pipeline": ranks, "schedule": {"kind": "eager", "apart": 2}}
    (alone,) = pool.run(1, run, model, FEW)
    train = {**FEW, "microbatch": 1}
    assert_same(pool.run(ranks, run_with_extensions, example, run, model, train, parallel), alone)


def test_the_example_is_not_adamw(pool, expected):
    (adamw,) = pool.run(1, run, MODELS["llama"], FEW, {}, False, False, False, {"warmup": 1})
    assert adamw.losses[0] == expected.losses[0] and adamw.losses[1] != expected.losses[1]
    assert any(name.startswith("optimizer.belief/") for name in expected.weights)


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_is_one_short_file(example):
    assert len(example.read_text(encoding="utf-8").splitlines()) < 150


def test_the_plan_counts_the_state_to_a_byte():
    with use_registry(Registry()):
        load_extensions(None, [f"run.extensions=[{EXAMPLES / 'optimizer.py'}]"])
        config = RunConfig(
            model={"layers": 1, "hidden": 16, "heads": 2, "vocab": 32},
            train={"seq": 8, "precision": "fp32"},
            optim={"name": "adabelief"},
        )
        mesh = Mesh(Layout(), device="cpu", timeout=PATIENCE)
        optimizer = TrainStep(config, mesh, StepTimer().time).optimizer
        mesh.finish()
        memory = optimizer.count_memory_bytes()
        elements = memory["weights"] // 4
        assert memory["optimizer"] == compute_optimizer_state_bytes(config.optim, elements, 0, 4)


def differ_by_rank():
    """Pretend that each rank has loaded another source."""
    mesh = Mesh(
        Layout.from_parallel(RunConfig().parallel, read_world_size()),
        device="cpu",
        timeout=PATIENCE,
    )
    registry = Registry()
    messages = []
    for text in ("same", f"rank {mesh.rank}"):
        registry.extensions = [Extension("own.py", hashlib.sha256(text.encode()).hexdigest())]
        with use_registry(registry):
            try:
                check_same_extensions(RunConfig(run={"extensions": ["own.py"]}).run, mesh)
                messages.append("")
            except UserError as error:
                messages.append(str(error))
    mesh.finish()
    return messages


def test_ranks_with_different_sources_are_refused_on_all(pool):
    for rank, (same, different) in enumerate(pool.run(2, differ_by_rank)):
        assert same == ""
        assert f"rank {rank} has own.py with SHA-256" in different


def test_a_wrong_number_of_moments_is_named(tmp_path, pool):
    text = (EXAMPLES / "optimizer.py").read_text(encoding="utf-8")
    wrong = Path(tmp_path / "wrong.py")
    wrong.write_text(re.sub(r"return 2\n", "return 1\n", text), encoding="utf-8")
    with use_registry(Registry()):
        load_extensions(None, [f"run.extensions=[{wrong}]"])
        config = RunConfig(
            model={"layers": 1, "hidden": 16, "heads": 2, "vocab": 32}, optim=OPTIMIZER
        )
        mesh = Mesh(Layout(), device="cpu", timeout=PATIENCE)
        with pytest.raises(UserError, match=r"count_moments says 1 and make_transforms keeps 2"):
            TrainStep(config, mesh, StepTimer().time)
        mesh.finish()
