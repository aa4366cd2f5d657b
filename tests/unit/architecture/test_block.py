"""Blocks: the keys of the model are a shorthand of `model.blocks`, and what a block keeps is what
its parts say.

Tests `megaframe.architecture.block`, `megaframe.architecture.model_blocks` and
`megaframe.architecture.mixers`.
"""

import pytest

from megaframe.architecture.model_blocks import describe_block
from megaframe.config import ModelConfig
from megaframe.config.blocks import AttentionConfig, MLPConfig

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


SIZES = {"heads": 4, "kv_heads": 2, "head_dim": 8}
OF_ONE_KEY = {
    "heads": (SIZES, {**SIZES, "heads": 2}, {"heads": 4}, {}),
    "kv_heads": (SIZES, {**SIZES, "kv_heads": 4}, {"kv_heads": 2}, {}),
    "head_dim": (SIZES, {**SIZES, "head_dim": 6}, {"head_dim": 8}, {}),
    "window": ({"window": 16}, {}, {"window": 16}, {}),
    "rotary": ({"position": "none"}, {"position": "rotary"}, {"rotary": False}, {}),
    "rotary_base": ({"rotary_base": 500.0}, {}, {"rotary_base": 500.0}, {}),
    "rotary_fraction": ({"rotary_fraction": 0.5}, {}, {"rotary_fraction": 0.5}, {}),
    "rotary_scaling": (
        {"rotary_scaling": {"kind": "linear", "factor": 4.0}},
        {},
        {"rotary_scaling": {"kind": "linear", "factor": 4.0}},
        {},
    ),
    "qk_norm": ({"qk_norm": "whole"}, {"qk_norm": "head"}, {"qk_norm": "whole"}, {}),
    "qkv_bias": ({"qkv_bias": True}, {}, {"qkv_bias": True}, {}),
    "bias": (
        {"norm": "rmsnorm", "bias": True, "qkv_bias": False},
        {"norm": "rmsnorm"},
        {"bias": True},
        {"bias": True},
    ),
    "ffn": ({"ffn": 100}, {}, {}, {"ffn": 100}),
    "activation": ({"activation": "geglu"}, {}, {}, {"activation": "geglu"}),
}
"""For each key of a block that has one in the model: the model's, what the model says instead, and
the keys of the mixer and of the feed-forward."""
OF_BLOCKS_ONLY = {
    *("kind", "score_scale", "softcap", "sinks", "output_gate", "norm_after_rotation"),
    *("alibi", "query_scale", "up_bias", "down_bias", "attention_chunk", "v_head_dim"),
    *("value_norm", "keys_as_values", "shared_keys", "alibi_form", "sparsity"),
}
"""Keys of attention and of the MLP for which the model has no shorthand."""


@pytest.mark.parametrize("key", OF_ONE_KEY)
def test_a_block_s_key_means_what_the_model_s_key_does(key):
    keys, instead, mixer, feed_forward = OF_ONE_KEY[key]
    block = {"mixer": mixer, "feed_forward": feed_forward}
    short = ModelConfig(layers=2, hidden=48, **keys)
    long = ModelConfig(layers=2, hidden=48, **instead, blocks=[block])
    other = ModelConfig(layers=2, hidden=48, **instead)
    assert describe_block(short, 0) == describe_block(long, 0) != describe_block(other, 0)


def test_every_key_of_attention_and_of_the_mlp_is_compared():
    keys = {*AttentionConfig.model_fields, *MLPConfig.model_fields}
    assert keys == {*OF_ONE_KEY} | OF_BLOCKS_ONLY and not {*OF_ONE_KEY} & OF_BLOCKS_ONLY


def test_biases_are_given_by_part():
    feed_forward = {"up_bias": True}
    model = ModelConfig(
        bias=False, blocks=[{"mixer": {"qkv_bias": True}, "feed_forward": feed_forward}]
    )
    names = [spec.name for spec in describe_block(model, 0).declare_parameters("b")]
    biases = {name for name in names if name.endswith(".bias")}
    assert biases == {"b.attention.qkv.bias", "b.mlp.up.bias"}


def test_norms_of_heads_are_written_as_before():
    model = ModelConfig(qk_norm="head", blocks=[{"mixer": {"qk_norm": "head"}}])
    assert model.qk_norm is True and model.model_dump()["blocks"][0]["mixer"]["qk_norm"] is True
    assert model == ModelConfig(qk_norm=True, blocks=[{"mixer": {"qk_norm": True}}])
    whole = ModelConfig(qk_norm="whole")
    assert ModelConfig.model_validate(whole.model_dump(mode="json")).qk_norm == "whole"
    (query, key) = describe_block(whole, 0).mixer.qk_norms.values()
    assert query.width == 768 and next(key.declare_parameters("k")).shape == (12, 64)


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
