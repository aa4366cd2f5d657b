"""Recomputed blocks: on each stage as few as the memory of a chip allows."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaframe.architecture.pipeline import build_step_schedule
from megaframe.architecture.stages import plan_stages
from megaframe.config import RunConfig
from megaframe.hardware.cluster import load_cluster
from megaframe.layout import Layout
from megaframe.planner.candidates import SearchSpace
from megaframe.planner.constants import get_family_constants
from megaframe.planner.layout_search import search
from megaframe.planner.memory import compute_rank_memory
from megaframe.planner.peak_memory import (
    compute_overhead_bytes,
    fits_with_margin,
    resolve_recompute_blocks,
)
from megaframe.schedule import lower
from megaframe.training.auto_layout import choose_recomputed_blocks

H100 = load_cluster("h100-ib")
LAYOUTS = (
    {"tensor": 2},
    {"pipeline": 4, "zero": 1},
    {"pipeline": 2, "chunks": 2, "schedule": "interleaved"},
    {"pipeline": 4, "chunks": 2, "schedule": "zb-v"},
)


def make_config(parallel, recompute="none", blocks="auto", layers=16):
    return RunConfig(
        model={"layers": layers, "hidden": 4096, "heads": 32, "vocab": 50_000},
        train={
            "seq": 4096, "global_batch": 16, "recompute": recompute, "recompute_blocks": blocks
        },
        parallel={"data": 1, **parallel},
    )  # fmt: skip


def compute_needed(config, layout, chip, blocks):
    """Return the bytes of each pipeline rank if each stage recomputes that number of blocks."""
    train = config.train.model_copy(update={"recompute_blocks": blocks})
    config = config.model_copy(update={"train": train})
    schedule = lower(build_step_schedule(config, 16))
    plans = plan_stages(config)
    return [
        compute_rank_memory(config, layout, plans, schedule, rank).total
        + compute_overhead_bytes(chip)
        for rank in range(layout.pipeline)
    ]


@given(
    parallel=st.sampled_from(LAYOUTS),
    recompute=st.sampled_from(["none", "selective"]),
    part=st.floats(0.0, 1.1),
)
def test_every_rank_fits_and_no_stage_needs_one_fewer(parallel, recompute, part):
    config = make_config(parallel, recompute)
    layout = Layout.from_parallel(
        config.parallel, config.parallel.tensor * config.parallel.pipeline
    )
    plans = plan_stages(config)
    all_blocks = tuple(len(plan.blocks) for plan in plans)
    none = (0,) * len(plans)
    low, high = (
        max(compute_needed(config, layout, H100.chip, tried)) for tried in (all_blocks, none)
    )
    chip = replace(H100.chip, memory=round((low + part * (high - low)) / 0.95))
    blocks = resolve_recompute_blocks(config, layout, chip).train.recompute_blocks
    schedule = lower(build_step_schedule(config, 16))
    memory = compute_needed(config, layout, chip, blocks)
    for rank in range(layout.pipeline):
        stages = schedule.list_stages(rank)
        if not fits_with_margin(memory[rank], chip):
            assert all(blocks[stage] == all_blocks[stage] for stage in stages)
            continue
        for stage in stages:
            if blocks[stage]:
                fewer = (*blocks[:stage], blocks[stage] - 1, *blocks[stage + 1 :])
                assert not fits_with_margin(compute_needed(config, layout, chip, fewer)[rank], chip)


def test_earlier_ranks_of_a_pipeline_compute_more_again():
    config = make_config({"pipeline": 4})
    layout = Layout.from_parallel(config.parallel, 4)
    most = max(compute_needed(config, layout, H100.chip, (0,) * 4))
    chip = replace(H100.chip, memory=round(0.75 * most))
    blocks = resolve_recompute_blocks(config, layout, chip).train.recompute_blocks
    assert blocks[0] > blocks[1] > blocks[2] == 0  # the last rank has the head and its logits


def test_numbers_are_left_alone_and_a_run_says_what_was_chosen():
    given = make_config({}, blocks=3)
    assert resolve_recompute_blocks(given, Layout(), H100.chip) is given
    assert choose_recomputed_blocks(given, 1) == (given, [])
    config = make_config({"pipeline": 2, "cluster": "h100-ib"}, layers=80)
    resolved, (note,) = choose_recomputed_blocks(config, 2)
    assert resolved.train.recompute_blocks == (40, 40)
    assert "80 of 80 blocks are recomputed (40, 40 by stage)" in note
    assert resolved.model_copy(update={"train": config.train}) == config


@pytest.mark.parametrize("blocks", [0, "auto"])
def test_a_search_takes_fewer_blocks_where_it_may(blocks):
    config = RunConfig(
        model={"layers": 32, "hidden": 4096, "heads": 32, "vocab": 50_000},
        train={"seq": 4096, "global_batch": 32, "recompute_blocks": blocks},
        optim={"state": "bf16"},
    )
    family = get_family_constants(H100.chip.family)
    fixed = {"recompute": "full", "microbatch": 32, "tensor": 4, "pipeline": 1}
    best = search(SearchSpace(config, 4, H100, fixed), family).best
    if blocks == 0:
        assert best.config.train.recompute == "full"
    else:
        assert best.config.train.recompute == "selective"
        assert 0 < best.config.train.recompute_blocks[0] < 32
