"""The division of layers into stages against all divisions; modelled work against counted FLOPs."""

from itertools import combinations_with_replacement

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaframe.architecture.model_blocks import describe_block
from megaframe.architecture.stages import (
    compute_output_work,
    compute_stage_costs,
    divide_blocks,
    plan_stages,
)
from megaframe.config import RunConfig
from megaframe.metrics import count_flops
from megaframe.model.layer_inputs import LayerSetup
from megaframe.model.model_chunk import build_chunks, list_model_specs
from megaframe.planner.activations import compute_block_bytes, compute_rotary_bytes
from megaframe.planner.memory import PlannedRank
from megaframe.planner.parameter_counts import RankParameters
from megaframe.schedule import generate

LATENT = {"kv_rank": 16, "head_dim": 10, "rotary_dim": 4, "value_dim": 12}


def make_config(layers=6, model=None, train=None, **parallel):
    shape = {"layers": layers, "hidden": 64, "heads": 4, "vocab": 1000, **(model or {})}
    train = {"seq": 32, "global_batch": 8, "microbatch": 1, **(train or {})}
    return RunConfig(model=shape, train=train, parallel=parallel)


def list_divisions(layers, stages):
    for cuts in combinations_with_replacement(range(layers + 1), stages - 1):
        yield tuple(b - a for a, b in zip((0, *cuts), (*cuts, layers), strict=True))


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=7).map(tuple),
    st.integers(0, 20),
    st.integers(1, 4),
    st.integers(0, 20),
)
def test_no_division_is_better_balanced(blocks, head, stages, embedding):
    def works(counts):
        work_per_stage, start = [], 0
        for count in counts:
            work_per_stage.append(sum(blocks[start : start + count]))
            start += count
        work_per_stage[0] += embedding
        work_per_stage[-1] += head
        return max(work_per_stage), sum(work * work for work in work_per_stage)

    counts = divide_blocks(blocks, head, stages, embedding)
    assert sum(counts) == len(blocks) and len(counts) == stages
    assert works(counts) == min(map(works, list_divisions(len(blocks), stages)))


@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 3))
def test_every_layer_is_on_one_stage(layers, ranks, chunks):
    plans = plan_stages(make_config(layers, pipeline=ranks, chunks=chunks))
    assert [layer for plan in plans for layer in plan.blocks] == list(range(layers))
    assert [plan.stage_index for plan in plans if plan.first] == [0]
    assert [plan.stage_index for plan in plans if plan.last] == [ranks * chunks - 1]


def test_a_heavy_head_is_a_stage_of_its_own():
    config = make_config(model={"vocab": 50304, "hidden": 512, "heads": 8}, pipeline=2)
    assert [len(plan.blocks) for plan in plan_stages(config)] == [6, 0]


def test_layers_count_with_what_their_windows_see():
    """Without a window, a layer's attention has five times the work of its matrices; with the
    windows here, almost none. Attention's backward has twice the work of its forward, and no weight
    gradients."""
    seq, matrices = 3840, 12 * 64 * 64
    model = {"window": (1,) * 7 + (None,) * 3, "vocab": 1}
    config = make_config(10, model=model, train={"seq": seq}, pipeline=2)
    plans = plan_stages(config)
    assert [len(plan.blocks) for plan in plans] == [8, 2]
    costs = compute_stage_costs(config.model, config.train, plans)
    local, full = (4 * 64 * keys for keys in (1 - 1 / (2 * seq), seq / 2))
    assert full == 5 * 2 * matrices
    for stage, (near_layers, far) in enumerate([(7, 1), (0, 2)]):
        forward, backward, weight = costs.forward[stage], costs.backward[stage], costs.weight[stage]
        head = 3 * 2 * 64 * stage
        attention_flops = near_layers * local + far * full
        assert forward == pytest.approx(
            (near_layers + far) * 2 * matrices + attention_flops + head, rel=1e-14
        )
        assert backward == pytest.approx(
            (near_layers + far) * 2 * matrices + 2 * attention_flops, rel=1e-14
        )
        assert weight == (near_layers + far) * 2 * matrices


def test_frozen_layers_and_a_frozen_head_have_no_weight_gradients():
    """So a frozen layer is two thirds of the work of another one, where keys are few."""
    frozen = {"frozen": (*(f"blocks.{layer}.*" for layer in range(6)), "*.gain")}
    config = make_config(10, model={"vocab": 1, "window": 1}, pipeline=2).replace(optim=frozen)
    plans = plan_stages(config)
    assert [len(plan.blocks) for plan in plans] == [6, 4]
    costs = compute_stage_costs(config.model, config.train, plans, config.frozen_patterns)
    matrices = 2 * 12 * 64 * 64
    assert costs.weight == (0, 4 * matrices)
    assert plan_stages(make_config(10, model={"vocab": 1, "window": 1}, pipeline=2)) != plans
    head = compute_output_work(config.model, config.train)
    for pattern, products in (("head.*", 2), ("embedding.*", 3)):
        work = compute_output_work(config.model, config.train, (pattern,))
        assert work.total / head.total == products / 3
    tied = config.model.model_copy(update={"tie_embeddings": True})
    assert compute_output_work(tied, config.train, ("embedding.*",)).total == head.total * 2 / 3


def test_layers_are_as_given_and_blocks_run_again_as_said():
    config = make_config(pipeline=2, layers_per_stage=(1, 5), train={"recompute_blocks": (2, 3)})
    plans = plan_stages(config)
    assert [list(plan.blocks) for plan in plans] == [[0], [1, 2, 3, 4, 5]]
    assert [plan.recomputed for plan in plans] == [1, 3]
    full = plan_stages(make_config(pipeline=2, train={"recompute": "full"}))
    assert all(plan.recomputed == len(plan.blocks) > 0 for plan in full)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(
    "model",
    [
        {},
        {"activation": "swiglu", "kv_heads": 2, "window": 7},
        {"window": (7, 20, None, 7), "mtp_depth": 3},
        {"latent": {**LATENT, "query_rank": 24}},
        {"latent": LATENT, "mtp_depth": 2},
    ],
)
def test_work_adds_up_to_the_counted_flops(model, recompute):
    config = make_config(model=model, pipeline=3, train={"recompute": recompute})
    costs = compute_stage_costs(config.model, config.train, plan_stages(config))
    specs = list_model_specs(config.model, config.train)
    flops = count_flops(specs, config)
    assert sum(map(sum, costs.list_by_stage(3))) == pytest.approx(flops.hardware, rel=1e-12)
    matrices = sum(spec.size for spec in specs if spec.role == "matrix")
    depth = config.model.mtp_depth
    blocks = sum(describe_block(config.model, layer).matrix_elements for layer in range(6 + depth))
    assert blocks + 2 * 64 * 64 * depth == matrices


@pytest.mark.parametrize(("tied", "depth"), [(True, 0), (False, 1), (True, 2)])
def test_stages_hold_the_parameters_of_the_model_once(tied, depth):
    model = {"tie_embeddings": tied, "position": "learned", "mtp_depth": depth}
    config = make_config(pipeline=3, model=model)
    parameters = [
        p
        for plan in plan_stages(config)
        for chunk in build_chunks(config.model, config.train, [plan], LayerSetup()).values()
        for p in chunk.parameters()
    ]
    specs = list_model_specs(config.model, config.train)
    assert [p.spec for p in parameters if not p.replica] == specs
    assert [p.spec.name for p in parameters if p.replica] == ["embedding.tokens.weight"]


NOTHING = RankParameters(0, (), ())


def test_activations_are_those_in_flight():
    """1F1B keeps p - rank microbatches; recomputed blocks keep only their input."""
    config = make_config(8, pipeline=4, layers_per_stage=(2, 2, 2, 2))
    stream = 32 * 64 * 2
    plans = plan_stages(config)
    for rank, actions in enumerate(generate("1f1b", 4, 1, 8).ranks):
        plan = PlannedRank(config, NOTHING, 1, [plans[rank]], actions).compute_memory()
        each = 2 * (
            stream + compute_block_bytes(config.model, config.parallel, config.train, 0)
        ) + 2 * stream * (rank == 3)
        each += compute_rotary_bytes(config.model, config.train) + 32 * 2 * 2 * (
            rank == 3
        )  # the last norm's numbers
        assert plan.activations == (4 - rank) * each
        assert (plan.logits > 0) == (rank == 3)
    recomputed = make_config(8, pipeline=4, train={"recompute": "full"})
    plan = PlannedRank(
        recomputed, NOTHING, 1, plan_stages(recomputed)[:1], generate("1f1b", 4, 1, 8).ranks[0]
    ).compute_memory()
    assert plan.activations == 4 * (
        2 * stream + compute_rotary_bytes(recomputed.model, recomputed.train)
    ) + compute_block_bytes(recomputed.model, recomputed.parallel, recomputed.train, 0)
