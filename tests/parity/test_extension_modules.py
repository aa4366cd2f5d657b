"""Plain torch modules from outside: the same under every layout to 1e-10 in fp64, like our own
layers."""

from functools import cache

import pytest
from parity_runs import FEW, assert_same, run, run_with_extensions
from repo_copy import ROOT
from slow_cases import mark_slow

pytestmark = pytest.mark.numeric

FILES = {
    "convolution": "examples/torch_module.py",
    "gpt-oss": "examples/transformers_layer.py",
    "every role": "tests/support/torch_module_parts.py",
    "token-wise": "tests/support/torch_module_parts.py",
}
MODEL = {"norm": "rmsnorm", "position": "none"}
MODELS = {
    "convolution": {**MODEL, "blocks": [{"mixer": "short_convolution"}]},
    "gpt-oss": {
        **MODEL,
        "kv_heads": 2,
        "blocks": [
            {"mixer": {"kind": "gpt_oss_attention", "window": 4}},
            {"mixer": "gpt_oss_attention", "parallel": "one_norm"},
        ],
    },
    "every role": {
        "norm": "torch_layer_norm",
        "mtp_depth": 1,
        "blocks": [{"feed_forward": "torch_mlp"}, {"mixer": "running_mean", "norms": "both"}],
    },
    "token-wise": {"blocks": [{"mixer": "token_wise", "parallel": "two_norms"}, {}]},
}
PACKED = ("convolution", "gpt-oss")
"""Those that keep documents apart."""
LAYOUTS = {
    "tensor": (2, {"tensor": 2}, {}),
    "tensor, selective": (2, {"tensor": 2}, {"recompute": "selective"}),
    "pipeline": (2, {"pipeline": 2}, {}),
    "zero-bubble": (2, {"pipeline": 2, "schedule": "zb-h1"}, {}),
    "recompute": (1, {}, {"recompute": "full"}),
    **{f"zero {stage}": (2, {"zero": stage}, {}) for stage in range(4)},
    "zero 3, recompute": (2, {"zero": 3}, {"recompute": "full"}),
    "tensor, pipeline": (4, {"tensor": 2, "pipeline": 2, "zero": 2}, {"recompute": "full"}),
    "tensor, zero 3": (4, {"tensor": 2, "zero": 3}, {"recompute": "selective"}),
    "context": (2, {"context": 2}, {"recompute": "selective"}),
}
"""By name: ranks, and keys of `parallel` and of `train`."""
QUICK = [
    ("convolution", "tensor, selective"),
    ("every role", "tensor"),
    ("every role", "zero 3"),
    ("token-wise", "context"),
]
CASES = [
    # Every layout with two of them in turn; context ranks divide only what does not mix tokens.
    (name, layout)
    for number, name in enumerate(MODELS)
    for place, layout in enumerate(LAYOUTS)
    if (number + place) % 2 == 0 or (name, layout) in QUICK
    if layout != "context" or name == "token-wise"
]


def run_with(name, train, parallel, packed):
    """Train two steps of a model with modules from outside."""
    files = [str(ROOT / FILES[name])]
    train = {**FEW, **train}
    return run_with_extensions(files, run, MODELS[name], train, parallel, False, False, packed)


@pytest.fixture(scope="module")
def get_expected(pool):
    """Return a function from a model, and whether samples are packed, to what one rank gets."""
    return cache(lambda name, packed: pool.run(1, run_with, name, {}, {}, packed)[0])


@pytest.mark.parametrize(("name", "layout"), mark_slow(CASES, except_for=QUICK))
def test_layouts_do_not_change_the_answer(name, layout, pool, get_expected):
    if name == "gpt-oss":
        pytest.importorskip("transformers")
    ranks, parallel, train = LAYOUTS[layout]
    packed = name in PACKED and bool((list(LAYOUTS).index(layout) + 1) // 2 % 2)
    results = pool.run(ranks, run_with, name, train, parallel, packed)
    assert_same(results, get_expected(name, packed))
