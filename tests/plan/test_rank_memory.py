"""The memory plan of a rank, from integers alone, against specs and against a rank played alone."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megaframe.comm import ALONE
from megaframe.config import RunConfig
from megaframe.layout import Layout
from megaframe.plan.held import held_of, rank_memory
from megaframe.plan.schedules import step_schedule
from megaframe.plan.stages import stage_plans
from megaframe.rehearsal import rehearse
from megaframe.schedule import lower
from megaframe.spec import EXPERT_AXES, copies_of
from megaframe.stage import build_stages

LLAMA = {"norm": "rmsnorm", "activation": "swiglu", "kv_heads": 4}
LATENT = {"kv_rank": 64, "head_dim": 32, "rotary_dim": 16, "value_dim": 32, "query_rank": 96}
MOE = {**LLAMA, "moe": {"experts": 16, "ffn": 128}}
INTERLEAVED = {"pipeline": 4, "chunks": 2, "schedule": "interleaved"}
CASES = {
    "one rank": (1, {}, {}, {}),
    "zero 1": (4, LLAMA, {}, {"zero": 1}),
    "zero 2, tied": (4, {**LLAMA, "tie_embeddings": True}, {}, {"zero": 2}),
    "zero 2, learned": (4, {"position": "learned", "bias": True}, {}, {"zero": 2}),
    "zero 3": (4, LLAMA, {"microbatch": 2}, {"zero": 3}),
    "zero 3, fp32": (4, LLAMA, {"precision": "fp32"}, {"zero": 3, "data_replicate": 2}),
    "tensor": (8, LLAMA, {}, {"tensor": 4}),
    "shared heads": (8, {**LLAMA, "kv_heads": 2}, {}, {"tensor": 4, "zero": 1}),
    "context": (8, LLAMA, {"recompute": "selective"}, {"context": 2, "zero": 2}),
    "pipeline": (8, LLAMA, {}, {"pipeline": 4, "zero": 1}),
    "interleaved": (16, LLAMA, {}, {**INTERLEAVED, "zero": 1, "tensor": 2}),
    "zb-v": (8, LLAMA, {}, {"pipeline": 4, "chunks": 2, "schedule": "zb-v"}),
    "experts": (8, MOE, {}, {"expert": 4, "zero": 1}),
    "experts, zero 3": (16, MOE, {}, {"expert": 4, "expert_tensor": 2, "zero": 3}),
    "latent": (
        8,
        {"norm": "rmsnorm", "latent": LATENT, "mtp_depth": 1},
        {},
        {"zero": 1, "tensor": 2, "pipeline": 2},
    ),
}


def made(model, train, parallel):
    return RunConfig(
        model={"layers": 8, "hidden": 256, "heads": 8, "vocab": 4096, **model},
        train={"seq": 256, "global_batch": 32, "microbatch": 1, **train},
        parallel={"node_size": 8, **parallel},
    )


@pytest.mark.parametrize("name", CASES)
def test_the_plan_is_what_a_rank_counts_within_one_percent(name):
    world, *sections = CASES[name]
    config = made(*sections)
    layout = Layout.from_parallel(config.parallel, world)
    schedule = step_schedule(config, 32 // config.train.microbatch // layout.data)
    plans, lowered = stage_plans(config), lower(schedule)
    for rank in {0, world - 1}:
        found = rehearse(config, layout, rank)
        plan = rank_memory(config, layout, plans, lowered, layout.coordinate(rank)["pipeline"])
        buffers = plan.weights + plan.values + plan.gradients
        assert found.buffers == pytest.approx(buffers, rel=0.01)
        assert found.optimizer == pytest.approx(plan.optimizer, rel=0.01)
        kept = plan.activations + plan.messages
        # Experts also keep the numbers of their routes.
        assert found.kept == pytest.approx(kept, rel=0.02 if "moe" in sections[0] else 0.01)
        total = found.buffers + found.optimizer + found.kept
        assert total == pytest.approx(buffers + plan.optimizer + kept, rel=0.01)


def by_specs(config, layout, plans):
    """(vectors, tables, matrices that are split, whole, shared and of experts) by what layers say
    of themselves."""
    stages = build_stages(config, plans, ALONE)
    found = {"vector": 0, "table": 0, "split": 0, "whole": 0, "shared": 0, "experts": 0}
    for parameter in {p: None for stage in stages.values() for p in stage.parameters()}:
        spec = parameter.spec
        size = spec.local(layout.place(0), layout.sizes).size
        if spec.role in ("gain", "bias"):
            found["vector"] += size
        elif spec.role in ("embedding", "head"):
            found["table"] += size
        elif spec.role == "matrix" and EXPERT_AXES[0] in spec.axes.values():
            found["experts"] += size
        elif spec.role == "matrix":
            dims = [dim for dim, axis in spec.axes.items() if axis == "tensor"]
            copies = [copies_of(spec.shape[dim], layout.tensor) for dim in dims]
            found["whole" if not dims else "shared" if copies[0] > 1 else "split"] += size
    return tuple(found.values())


MODELS = st.fixed_dictionaries(
    {
        "heads": st.sampled_from([4, 8]),
        "norm": st.sampled_from(["layernorm", "rmsnorm"]),
        "activation": st.sampled_from(["gelu", "swiglu"]),
        "position": st.sampled_from(["learned", "rotary"]),
        "tie_embeddings": st.booleans(),
        "bias": st.booleans(),
        "qk_norm": st.booleans(),
        "mtp_depth": st.integers(0, 2),
        "vocab": st.integers(97, 103),
        "ffn": st.integers(60, 70),
    },
    optional={
        "kv_heads": st.sampled_from([1, 2, 4]),
        "moe": st.fixed_dictionaries(
            {
                "experts": st.integers(4, 9),
                "ffn": st.integers(20, 30),
                "shared": st.integers(0, 2),
                "first": st.integers(0, 2),
            }
        ),
    },
)


@settings(deadline=None, max_examples=40)
@given(model=MODELS, tensor=st.sampled_from([1, 2, 4]), pipeline=st.integers(1, 3))
def test_what_is_held_is_what_layers_declare(model, tensor, pipeline):
    moe = "moe" in model
    config = RunConfig(
        model={"layers": 4, "hidden": 32, **model},
        train={"seq": 16, "precision": "bf16"},
        parallel={"tensor": tensor, "pipeline": pipeline, "expert": tensor if moe else 1},
    )
    layout = Layout.from_parallel(config.parallel, 4 * tensor * pipeline)
    for plan in stage_plans(config):
        held = held_of(config, layout, [plan])
        parts = (held.tables, held.blocks, held.whole, held.shared, held.experts)
        assert (held.vectors, *map(sum, parts)) == by_specs(config, layout, [plan])
