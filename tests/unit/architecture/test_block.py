"""Blocks: the keys of the model are a shorthand of `model.blocks`, and what a block keeps is what
its parts say."""

import pytest

from megaframe.architecture.block import describe_block
from megaframe.config import ModelConfig

LATENT = {"kv_rank": 10, "head_dim": 6, "rotary_dim": 4, "value_dim": 5}
SHORTHAND = {
    "windows": (
        {"window": [16, None], "kv_heads": 2},
        [{"mixer": {"window": 16}}, {"mixer": {"window": None}}],
    ),
    "experts in every second layer": (
        {"moe": {"experts": 4, "every": 2}},
        [{}, {"feed_forward": {"kind": "moe"}}],
    ),
    "latent": (
        {"latent": LATENT, "norm": "rmsnorm"},
        [{"mixer": {"kind": "latent"}}],
    ),
    "one width for all": (
        {"ffn": 100, "activation": "swiglu", "bias": True, "qk_norm": True},
        [
            {
                "mixer": {"qk_norm": True, "bias": True, "heads": 12},
                "feed_forward": {"ffn": 100, "activation": "swiglu", "bias": True},
                "repeat": 3,
            }
        ],
    ),
}


@pytest.mark.parametrize("name", SHORTHAND)
def test_keys_of_the_model_are_a_shorthand_of_blocks(name):
    keys, blocks = SHORTHAND[name]
    plain = ModelConfig(layers=6, **keys)
    keys = {key: value for key, value in keys.items() if key != "window"}
    if "moe" in keys:
        keys["moe"] = {"experts": 4}
    written = ModelConfig(layers=6, **keys, blocks=blocks)
    for layer in range(6):
        short, long = describe_block(plain, layer), describe_block(written, layer)
        assert list(short.declare_parameters("b")) == list(long.declare_parameters("b"))
        if "moe" not in keys:
            assert short == long


def test_a_pattern_repeats_over_layers_and_predictors():
    model = ModelConfig(
        layers=5, mtp_depth=2, blocks=[{"mixer": {"window": 8}, "repeat": 2}, {"norms": "after"}]
    )
    windows = [describe_block(model, layer).mixer.window for layer in range(7)]
    assert windows == [8, 8, None, 8, 8, None, 8]


def test_blocks_of_a_kind_are_equal():
    model = ModelConfig(layers=4, window=[16, None])
    kinds = [describe_block(model, layer) for layer in range(4)]
    assert kinds[0] == kinds[2] != kinds[1] == kinds[3] and len(set(kinds)) == 2
