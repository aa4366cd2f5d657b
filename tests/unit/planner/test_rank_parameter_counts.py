"""Parameters counted from the config, compared with the specs that layers declare."""

from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slow_cases import mark_slow

from megaframe.architecture.spec import EXPERT_AXES, count_copies
from megaframe.architecture.stages import plan_stages
from megaframe.config import RunConfig, load
from megaframe.layout import Layout
from megaframe.model.layer_inputs import LayerSetup
from megaframe.model.model_chunk import build_chunks
from megaframe.planner.parameter_counts import count_rank_parameters

CONFIGS = sorted((Path(__file__).parents[3] / "configs").glob("*.yaml"))
LAYOUTS = [
    {},
    {"tensor": 2, "pipeline": 2},
    {"tensor": 4, "data": 8, "expert": 4, "expert_tensor": 2},
]


def count_by_plan(config, layout, plan):
    """Return the same numbers as `by_specs`, from the plan."""
    counts = count_rank_parameters(config.model, config.train, layout, [plan])
    parts = (
        (*counts.tables, counts.positions),
        counts.split,
        counts.replicated,
        counts.shared,
        counts.experts,
    )
    return (counts.vectors, *map(sum, parts))


QUICK = [(path, LAYOUTS[place % 3]) for place, path in enumerate(CONFIGS)]


# Every config with one layout in turn, and in the whole suite with all.
@pytest.mark.parametrize(
    ("path", "sizes"),
    mark_slow(product(CONFIGS, LAYOUTS), except_for=QUICK),
    ids=lambda value: getattr(value, "stem", str(value)),
)
def test_every_config_holds_what_its_layers_declare(path, sizes):
    pipeline = sizes.get("pipeline", 1)
    config = load(str(path), [f"parallel.pipeline={pipeline}", "model.vocab=5003"])
    layout = Layout(**sizes)
    for plan in plan_stages(config):
        assert count_by_plan(config, layout, plan) == count_by_specs(config, layout, [plan])


def count_by_specs(config, layout, plans):
    """Return the elements of (vectors, tables, split matrices, whole matrices, shared matrices,
    experts' matrices) on the first rank, from the layers' specs."""
    chunks = build_chunks(config.model, config.train, plans, LayerSetup())
    counts = {"vector": 0, "table": 0, "split": 0, "replicated": 0, "shared": 0, "experts": 0}
    for parameter in {p: None for chunk in chunks.values() for p in chunk.parameters()}:
        spec = parameter.spec
        size = spec.find_local_box(layout.get_full_coordinate(0), layout.sizes).size
        if spec.role in ("gain", "bias"):
            counts["vector"] += size
        elif spec.role in ("embedding", "head"):
            counts["table"] += size
        elif spec.role == "matrix" and EXPERT_AXES[0] in spec.axes.values():
            counts["experts"] += size
        elif spec.role in ("matrix", "table"):
            dims = [dim for dim, axis in spec.axes.items() if axis == "tensor"]
            copies = [count_copies(spec.shape[dim], layout.tensor) for dim in dims]
            replicated = not dims and layout.tensor > 1
            shared = bool(dims) and copies[0] > 1
            counts["replicated" if replicated else "shared" if shared else "split"] += size
    return tuple(counts.values())


MODELS = st.fixed_dictionaries(
    {
        "heads": st.sampled_from([4, 8]),
        "norm": st.sampled_from(["layernorm", "rmsnorm"]),
        "activation": st.sampled_from(["gelu", "swiglu", "xielu"]),
        "position": st.sampled_from(["learned", "rotary"]),
        "tie_embeddings": st.booleans(),
        "bias": st.booleans(),
        "head_bias": st.booleans(),
        "embedding_norm": st.booleans(),
        "qk_norm": st.sampled_from([False, True, "whole", "layernorm", "layernorm_per_head", "l2"]),
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


@given(model=MODELS, tensor=st.sampled_from([1, 2, 4]), pipeline=st.integers(1, 3))
def test_what_is_held_is_what_layers_declare(model, tensor, pipeline):
    moe = "moe" in model
    config = RunConfig(
        model={"layers": 4, "hidden": 32, **model},
        train={"seq": 16, "precision": "bf16"},
        parallel={"tensor": tensor, "pipeline": pipeline, "expert": tensor if moe else 1},
    )
    layout = Layout.from_parallel(config.parallel, 4 * tensor * pipeline)
    for plan in plan_stages(config):
        assert count_by_plan(config, layout, plan) == count_by_specs(config, layout, [plan])
