"""Latent attention of the published models: parameters of a layer, and factors of YaRN."""

import math

import pytest
from tolerances import near

from megaframe.architecture.model_blocks import describe_block
from megaframe.architecture.rotary import compute_scores_factor
from megaframe.config import ModelConfig
from megaframe.model.layer_inputs import LayerSetup
from megaframe.model.mla import LatentAttention
from megaframe.model.rotary import compute_frequencies

DEEPSEEK = {"kv_rank": 512, "head_dim": 128, "rotary_dim": 64, "value_dim": 128}
PUBLISHED = {
    "deepseek-v2": ({"hidden": 5120, "heads": 128}, 1536, 149_227_520),
    "deepseek-v2-lite": ({"hidden": 2048, "heads": 16}, None, 13_763_072),
    "deepseek-v3": ({"hidden": 7168, "heads": 128}, 1536, 187_107_328),
}


def frequencies_of(model):
    return compute_frequencies(describe_block(model, 0).mixer.rotary)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_of_the_released_layers(name):
    """Published: the elements of the attention's tensors in one layer of the released weights."""
    shape, rank, published = PUBLISHED[name]
    model = ModelConfig(**shape, latent={**DEEPSEEK, "query_rank": rank})
    description = describe_block(model, 0).mixer
    layer = LatentAttention("a", description, LayerSetup())
    specs = [p.spec for p in layer.parameters()]
    assert sum(spec.size for spec in specs) == published
    assert description.matrix_elements == sum(s.size for s in specs if s.role == "matrix")


def make_yarn_config(**changes):
    scaling = {"kind": "yarn", "factor": 40, "original_length": 4096, "high_frequency": 32}
    latent = {**DEEPSEEK, "query_rank": 1536}
    return ModelConfig(hidden=5120, heads=128, latent=latent, rotary_scaling={**scaling, **changes})


@pytest.mark.parametrize("mscale", [0.707, 1.0])
def test_equal_strengths_scale_scores_and_not_the_rotated_part(mscale):
    """In the released configs both are equal: 0.707 in V2, 1.0 in V3."""
    rate, factor = compute_frequencies(
        describe_block(make_yarn_config(mscale=mscale, mscale_all_dim=mscale), 0).mixer.rotary
    )
    assert factor == 1.0 and len(rate) == 32
    found = compute_scores_factor(make_yarn_config(mscale=mscale, mscale_all_dim=mscale))
    assert found == near((1 + 0.1 * mscale * math.log(40)) ** 2, 8)


def test_different_strengths_are_divided():
    _, factor = compute_frequencies(
        describe_block(make_yarn_config(mscale=0.5, mscale_all_dim=0.8), 0).mixer.rotary
    )
    assert factor == near((0.05 * math.log(40) + 1) / (0.08 * math.log(40) + 1), 8)
    assert compute_scores_factor(make_yarn_config()) == 1.0
    assert frequencies_of(make_yarn_config())[1] == near(0.1 * math.log(40) + 1, 4)
