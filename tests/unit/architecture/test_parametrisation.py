"""muP against its definition: spectral norms of matrices and of updates, and the published table.

Tests `megaframe.architecture.parametrisation` and `megaframe.architecture.width_growth`.
"""

import math
from math import isclose

import pytest

from megaframe.architecture.parametrisation import (
    LEARNING_RATE_SCALES,
    compute_initial_scale,
    compute_learning_rate_scale,
    compute_output_multiplier,
    compute_score_multiplier,
)
from megaframe.architecture.spec import Growth
from megaframe.config import RunConfig
from megaframe.config.model import ModelConfig
from megaframe.model.model_chunk import list_model_specs

WIDTH = 8.0
SHAPES = [(1.0, 1.0), (1.0, WIDTH), (WIDTH, 1.0), (WIDTH, WIDTH), (WIDTH, 2 * WIDTH), (WIDTH, 2.0)]
UPDATES = {
    # What the spectral norm of one update grows as: of elements of one size and low rank, of the
    # gradient itself, and of a matrix whose singular values are all one.
    "adamw": lambda n_in, n_out: math.sqrt(n_in * n_out),
    "lion": lambda n_in, n_out: math.sqrt(n_in * n_out),
    # dL/dx is 1 / n_out for each of n_out outputs, and x is 1 for each of n_in inputs.
    "sgd": lambda n_in, n_out: math.sqrt(n_in) * math.sqrt(n_out) / n_out,
    "muon": lambda n_in, n_out: math.sqrt(max(n_in, n_out)),
}
MUP = {"parametrisation": "mup", "vocab": 11}


@pytest.mark.parametrize("multiplier", [1.0, 0.25])
@pytest.mark.parametrize(("n_in", "n_out"), SHAPES)
def test_updates_grow_as_the_spectral_condition_demands(n_in, n_out, multiplier):
    growth = Growth(n_in, n_out, multiplier)
    for rule, norm in UPDATES.items():
        gradient = multiplier if rule == "sgd" else 1.0
        scale = compute_learning_rate_scale(rule, growth)
        update = scale * gradient * norm(n_in, n_out) * multiplier
        assert isclose(update, math.sqrt(n_out / n_in)), rule
    assert UPDATES.keys() == LEARNING_RATE_SCALES.keys()


@pytest.mark.parametrize(("n_in", "n_out"), SHAPES)
def test_initial_norms_grow_as_the_spectral_condition_demands(n_in, n_out):
    norm = compute_initial_scale(Growth(n_in, n_out)) * max(math.sqrt(n_in), math.sqrt(n_out))
    assert isclose(norm, math.sqrt(n_out / n_in))
    assert isclose(compute_initial_scale(Growth(WIDTH, 1.0, 1 / WIDTH)), 1.0)


# Tensor Programs V, table 8: for widths n times the base, the factors of the standard deviation
# and of the learning rates of SGD and Adam, for inputs with all biases, outputs, and the rest.
TABLE_8 = {
    "embedding.tokens.weight": (1, "n", 1),
    "embedding.positions.weight": (1, "n", 1),
    "blocks.0.attention_norm.gain": (1, "n", 1),
    "blocks.0.attention.qkv.bias": (1, "n", 1),
    "blocks.0.attention.qkv.weight": ("n^-1/2", 1, "1/n"),
    "blocks.0.attention.output.weight": ("n^-1/2", 1, "1/n"),
    "blocks.0.mlp.up.weight": ("n^-1/2", 1, "1/n"),
    "blocks.0.mlp.down.weight": ("n^-1/2", 1, "1/n"),
    "head.weight": (1, "n", 1),
}
FACTORS = {1: 1.0, "n": 4.0, "1/n": 0.25, "n^-1/2": 0.5}


def test_the_published_table_follows():
    model = {**MUP, "layers": 1, "hidden": 32, "heads": 4, "mup_base_hidden": 8, "bias": True}
    specs = list_growths(**model, position="learned")
    for name, row in TABLE_8.items():
        growth = specs[name]
        scales = [compute_initial_scale(growth)]
        scales += [compute_learning_rate_scale(rule, growth) for rule in ("sgd", "adamw")]
        assert scales == [FACTORS[factor] for factor in row], name
    config = ModelConfig(**model)
    assert compute_output_multiplier(config) == 0.25
    assert compute_score_multiplier(config) == 1.0  # heads grow in number
    wider = ModelConfig(**{**model, "heads": 1, "mup_base_head_dim": 8})
    assert compute_score_multiplier(wider) / math.sqrt(32) == 8 / 32 / math.sqrt(8)


def list_growths(**model):
    config = RunConfig(model=model)
    return {spec.name: spec.growth for spec in list_model_specs(config.model, config.train)}


def test_what_does_not_grow_with_the_width_is_no_width():
    growths = list_growths(
        **{**MUP, "layers": 3, "hidden": 32, "heads": 4, "mup_base_hidden": 8, "mtp_depth": 1},
        latent={"kv_rank": 6, "head_dim": 4, "rotary_dim": 2, "value_dim": 4},
        moe={"experts": 4, "ffn": 10, "shared": 1, "shared_gate": True},
        blocks=[
            {"mixer": "latent", "feed_forward": "moe"},
            {"mixer": {"kind": "gated_delta_net", "key_heads": 3, "value_heads": 6}},
            {
                "mixer": {"kind": "gated_short_convolution"},
                "second_mixer": {"kind": "mamba2", "heads": 4},
                "feed_forward": {"ffn": 7},
            },
        ],
    )
    n = 4.0
    for name, growth in {
        "blocks.0.moe.router.weight": Growth(n, 1.0),
        "blocks.0.moe.shared_gate.weight": Growth(n, 1.0),
        "blocks.0.moe.router.balance": Growth(),
        "blocks.0.moe.experts.up.weight": Growth(n, n),
        "blocks.0.moe.experts.down.weight": Growth(n, n),
        "blocks.0.attention.down.weight": Growth(n, 1.0),
        "blocks.0.attention.kv_norm.gain": Growth(),
        "blocks.0.attention.kv.weight": Growth(1.0, n),
        "blocks.0.attention.query.weight": Growth(n, n),
        "blocks.1.delta_net.input.weight": Growth(n, n),
        "blocks.1.delta_net.convolution.gain": Growth(1.0, n),
        "blocks.1.delta_net.decay.rate": Growth(1.0, n),
        "blocks.1.delta_net.norm.gain": Growth(),
        "blocks.1.delta_net.output.weight": Growth(n, n),
        "blocks.2.gated_short_convolution.input.weight": Growth(n, n),
        "blocks.2.mamba2.output.weight": Growth(n, n),
        "blocks.2.mlp.down.weight": Growth(n, n),
        "predictors.0.join.weight": Growth(n, n),
        "head.weight": Growth(n, 1.0, 1 / n),
    }.items():
        assert growths[name] == growth, name


def test_only_mup_sets_growths():
    config = RunConfig(model={"layers": 1, "hidden": 32, "heads": 4, "vocab": 11})
    assert {spec.growth for spec in list_model_specs(config.model, config.train)} == {Growth()}
    assert {*list_growths(**MUP, hidden=32, heads=4, mup_base_hidden=32).values()} == {Growth()}
