"""Stages balanced by measured times: all ranks measure the same, and the run is that of a config
with the numbers that were chosen.

Tests `megaframe.training.measured_stages`.
"""

import pytest
import yaml
from bitwise import assert_same_losses
from entry_runs import read_lines, read_losses, train
from patience import PATIENCE
from slow_cases import slow

from megaframe.architecture.stages import PartWorks, PassWork
from megaframe.config import RunConfig
from megaframe.distributed.mesh import Mesh, read_world_size
from megaframe.layout import Layout
from megaframe.training.measured_stages import divide_by_times, measure_parts

SLOW_FIRST = {
    "optim__schedule": "constant",
    "model__layers": 4,
    "model__moe": "{experts: 8, top_k: 1, ffn: 32}",
    "model__blocks": "[{mixer: {kind: gated_delta_net, key_heads: 2, value_heads: 2, key_dim: 8, "
    "value_dim: 8}, feed_forward: moe}, {repeat: 3}]",
    "parallel__pipeline": 2,
    "train__microbatch": 2,
}


def measure(sections):
    config = RunConfig(**sections)
    layout = Layout.from_parallel(config.parallel, read_world_size())
    mesh = Mesh(layout, device="cpu", timeout=PATIENCE)
    works = measure_parts(config, mesh)
    mesh.finish()
    return works


SMALL = {"layers": 3, "hidden": 16, "heads": 4, "vocab": 37}
TRAIN = {"seq": 8, "global_batch": 4, "microbatch": 1, "precision": "fp64"}
EMULATED = {"forward": 0.01, "backward": 0.02, "weight": 0.03}


def test_bubbles_of_both_divisions_are_those_of_a_closed_form():
    """Eight blocks of equal work, of which the first four take three times as long. Each pass of a
    fast one takes a unit. The first rank has most to do, and waits for the other one where it has
    nothing else to do: beside its second forward pass and beside its last but one backward pass."""
    slow_block, fast_block, nothing = (PassWork(n, n, n) for n in (3, 1, 0))
    works = PartWorks(nothing, (slow_block,) * 4 + (fast_block,) * 4, nothing)
    for microbatches in (2, 8, 64):
        config = RunConfig(
            model={**SMALL, "layers": 8},
            train={**TRAIN, "global_batch": microbatches},
            parallel={"pipeline": 2, "layers_per_stage": "measured"},
        )
        layers, times = divide_by_times(config, 1, works)
        assert layers == (3, 5)
        before = 36 * microbatches  # 4 slow blocks and 4 fast ones: 36 and 12 for a microbatch
        after = 27 * microbatches + (21 - 9) + (21 - 18)  # 27 and 21
        assert times.values == {
            "bubble_by_work": pytest.approx(1 - 48 * microbatches / (2 * before), rel=1e-12),
            "bubble": pytest.approx(1 - 48 * microbatches / (2 * after), rel=1e-12),
        }
        assert "[3, 5]; bubble" in times.notes[0] and "by work: [4, 4] 33.3%" in times.notes[0]


def test_every_part_takes_at_least_as_long_as_it_waits_and_equally_long_on_all_ranks(pool):
    sections = {
        "model": {**SMALL, "emulate": EMULATED},
        "train": TRAIN,
        "parallel": {"pipeline": 3, "layers_per_stage": "measured"},
    }
    results = pool.run(3, measure, sections)
    assert all(works == results[0] for works in results)
    for block in results[0].blocks:
        assert block.forward >= 0.01e9 and block.backward >= 0.02e9 and block.weight >= 0.03e9
        assert block == results[0].blocks[0], "equal blocks are measured once"


@pytest.mark.parametrize(
    ("ranks", "model", "parallel"),
    [
        (2, {"tie_embeddings": True, "mtp_depth": 1}, {"pipeline": 2, "zero": 3}),
        slow(4, {"kv_heads": 1}, {"pipeline": 2, "tensor": 2, "reduce_precision": "bf16"}),
        slow(4, {}, {"pipeline": 2, "context": 2, "compress": "int8"}),
        slow(4, {"moe": {"experts": 4, "ffn": 8, "first": 1}}, {"pipeline": 2, "expert": 2}),
    ],
)
def test_parts_are_measured_under_every_axis(ranks, model, parallel, pool):
    parallel = {**parallel, "layers_per_stage": "measured"}
    sections = {"model": {**SMALL, **model}, "train": TRAIN, "parallel": parallel}
    first, *others = pool.run(ranks, measure, sections)
    assert all(works == first for works in others)
    assert len(first.blocks) == 3 and first.output.forward > 0 and first.embedding.forward > 0
    if "moe" in model:
        assert first.blocks[0] != first.blocks[1] == first.blocks[2]


def read_config(folder):
    return yaml.safe_load((folder / "config.yaml").read_text())


def test_a_run_is_that_of_the_chosen_numbers_and_keeps_them(pool, overrides, tmp_path):
    """The first block, a gated delta net with experts, has 1.3 times the work of another one and
    takes several times as long, so the others share a rank."""
    measured = {"parallel__layers_per_stage": "measured", "checkpoint__every": 2}
    resume = {"checkpoint__resume": "latest", **measured}
    for steps in (2, 4):
        pool.run(2, train, overrides(**SLOW_FIRST, **resume, train__steps=steps))
    layers = read_config(tmp_path / "run")["parallel"]["layers_per_stage"]
    assert layers == [1, 3]
    log = (tmp_path / "run/run.log").read_text()
    assert "parallel.layers_per_stage=measured: [1, 3]; bubble by measured times" in log
    assert "divided by work: [2, 2]" in log and "each of blocks 1-3" in log
    assert "the division that the run started with" in log
    lines = read_lines(tmp_path / "run")
    bubbles = lines[0]["measured_stages"]
    assert 0 < bubbles["bubble"] < bubbles["bubble_by_work"] < 1
    assert all("measured_stages" not in line for line in lines[1:])
    explicit = {"parallel__layers_per_stage": layers, "run__dir": tmp_path / "explicit"}
    pool.run(2, train, overrides(**SLOW_FIRST, **explicit, train__steps=4))
    assert_same_losses(
        read_losses(tmp_path / "run"),
        read_losses(tmp_path / "explicit"),
        because="the key has the same numbers before anything is built",
    )
