"""No layout changes what norms, activations and feed-forward layers of an extension do: 1e-10 in
fp64. Their blocks keep what is planned, to a byte."""

import pytest
from parity_runs import EXAMPLES, LAYOUTS, assert_same, run_with
from saved_bytes import measure_block
from slow_cases import mark_slow

from megaframe.config.registry import Registry, use_registry
from megaframe.extensions import load_extensions

EXAMPLE = str(EXAMPLES / "norm.py")
PARTS = {"norm": {"kind": "dynamic_tanh", "slope": 0.7}, "activation": "reglu"}
LOW_RANK = {"feed_forward": {"kind": "low_rank", "rank": 6}}
MODELS = {
    "low rank": {**PARTS, "kv_heads": 2, "bias": True, "blocks": [LOW_RANK, {"norms": "both"}]},
    "experts": {
        **PARTS,
        "mtp_depth": 1,
        "moe": {"experts": 4, "ffn": 10, "shared": 1, "balance_loss": 0.1},
        "blocks": [{"feed_forward": {"kind": "moe"}}, {**LOW_RANK, "parallel": "one_norm"}],
    },
}
OF_EXPERTS = {
    "expert": (2, {"expert": 2}, {"recompute": "selective"}),
    "expert_tensor": (2, {"expert_tensor": 2, "zero": 3}, {}),
    "tensor and expert": (4, {"tensor": 2, "expert": 2, "dispatch": "all_gather"}, {}),
}
IN_TURN = [(("low rank", "experts")[place % 2], layout) for place, layout in enumerate(LAYOUTS)]
IN_TURN += [("experts", layout) for layout in OF_EXPERTS]
QUICK = [("low rank", "all"), ("experts", "tensor"), ("experts", "expert_tensor")]
CASES = [*QUICK, *(case for case in IN_TURN if case not in QUICK)]


@pytest.fixture(scope="module")
def expected(pool):
    """Return the results of one process by model."""
    return {
        name: pool.run(1, run_with, EXAMPLE, model, {}, {}, {})[0] for name, model in MODELS.items()
    }


@pytest.mark.parametrize(("name", "layout"), mark_slow(CASES, except_for=QUICK))
def test_layouts_do_not_change_the_answer(name, layout, pool, expected):
    ranks, parallel, train = {**LAYOUTS, **OF_EXPERTS}[layout]
    results = pool.run(ranks, run_with, EXAMPLE, MODELS[name], train, parallel, {})
    assert_same(results, expected[name])
    slopes = [key for key in expected[name].weights if key.endswith("attention_norm.slope")]
    assert slopes and all(abs(float(expected[name].whole(key)) - 0.7) > 1e-4 for key in slopes[:2])


def measure_with(*arguments):
    """Return what `measure_block` does, with the example's parts."""
    with use_registry(Registry()):
        load_extensions(None, [f"run.extensions=[{EXAMPLE}]"])
        return measure_block(*arguments)


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_a_block_keeps_what_is_planned_to_a_byte(recompute, pool):
    model = {**PARTS, "blocks": [LOW_RANK]}
    for saved, planned, _ in pool.run(2, measure_with, model, recompute, 2, 1):
        assert saved == planned
