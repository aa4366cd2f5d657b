"""Blocks that do not describe the layers of a model are refused; what a refusal suggests passes."""

import pytest
from config_refusals import list_refusals_of_ranks

from megaframe.config import ModelConfig
from megaframe.validate.blocks import find_block_mistakes

MOE = {"experts": 4, "ffn": 8}
LATENT = {"kv_rank": 8, "head_dim": 4, "rotary_dim": 2, "value_dim": 4}
OF_EXPERTS = {"feed_forward": {"kind": "moe"}}


OWN_NORMS = {"experts": 4, "own_norms": True}
COMPRESSED = {
    **{"kind": "compressed_attention", "heads": 4, "head_dim": 4, "query_rank": 5},
    **{"window": 3, "output_rank": 2},
}


def make_indexer(width):
    indexer = {"heads": 2, "head_dim": width, "top_k": 3}
    return {"compression": {"tokens": 2, "indexer": indexer}}


@pytest.mark.parametrize(
    ("model", "message", "suggested"),
    [
        ({"blocks": []}, "model.blocks=[] has 0 blocks to repeat", {"blocks": [{}]}),
        (
            {"blocks": [{"repeat": 2}, {"repeat": 3}]},
            "model.blocks describes 5 layers and model.layers=4; use 1 to 4",
            {"blocks": [{"repeat": 2}, {"repeat": 2}]},
        ),
        (
            {"blocks": [{}], "emulate": {}},
            "no effect with model.emulate, whose blocks only wait; leave it out",
            {"emulate": {}},
        ),
        (
            {"blocks": [{}], "window": 4},
            "model.window has no effect with model.blocks; say window in the mixer",
            {"blocks": [{"mixer": {"window": 4}}]},
        ),
        (
            {"blocks": [OF_EXPERTS], "moe": {**MOE, "every": 2}},
            "model.moe.first=0 and model.moe.every=2 have no effect with model.blocks",
            {"blocks": [OF_EXPERTS], "moe": MOE},
        ),
        (
            {"blocks": [{}, OF_EXPERTS]},
            "model.blocks.1 has kind: moe, and model.moe is missing; set its keys",
            {"blocks": [{}, OF_EXPERTS], "moe": MOE},
        ),
        (
            {"blocks": [{"mixer": {"kind": "latent"}}]},
            "model.blocks.0 has kind: latent, and model.latent is missing; set its keys",
            {"blocks": [{"mixer": {"kind": "latent"}}], "latent": LATENT},
        ),
        (
            {"blocks": [{}], "latent": LATENT},
            "model.latent has no effect, because no block of model.blocks has kind: latent",
            {"blocks": [{}]},
        ),
        (
            {"blocks": [{"mixer": {**COMPRESSED, "output_groups": 3}}]},
            "model.blocks.0.mixer.output_groups=3 does not divide heads=4; use 2 or 4",
            {"blocks": [{"mixer": {**COMPRESSED, "output_groups": 2}}]},
        ),
        (
            {"blocks": [{"mixer": {**COMPRESSED, **make_indexer(3)}}]},
            "mixer.compression.indexer.head_dim=3 is less than the 4 dims that are rotated; use 4",
            {"blocks": [{"mixer": {**COMPRESSED, **make_indexer(4)}}]},
        ),
        (
            {"blocks": [{}, {"parallel": "one_norm", "norms": "after"}]},
            "model.blocks.1.parallel=one_norm has no norm to share with norms=after",
            {"blocks": [{}, {"parallel": "two_norms", "norms": "after"}]},
        ),
        (
            {"blocks": [{"mixer": {"alibi": 8, "softcap": 2.0}}]},
            "model.blocks.0.mixer.softcap would change the place of a key that alibi=8 adds to",
            {"blocks": [{"mixer": {"alibi": 8}}]},
        ),
        (
            {"blocks": [{"mixer": {"attention_chunk": 4, "window": 3}}]},
            "model.blocks.0.mixer.attention_chunk=4 and window=3 both say what a token sees; leave",
            {"blocks": [{"mixer": {"attention_chunk": 4}}]},
        ),
        (
            {"blocks": [{}, {"mixer": {"norm_after_rotation": True}}]},
            "model.blocks.1.mixer.norm_after_rotation=true has no effect with qk_norm=False and",
            {"blocks": [{}, {"mixer": {"norm_after_rotation": True, "qk_norm": "head"}}]},
        ),
        (
            {"blocks": [{}, {"mixer": "none", "feed_forward": "none"}]},
            "model.blocks.1.mixer=none and model.blocks.1.feed_forward=none leave nothing in",
            {"blocks": [{}, {"mixer": "none"}]},
        ),
        (
            {"blocks": [{"mixer": "none", "second_mixer": "mamba2"}]},
            "model.blocks.0.second_mixer=mamba2 has no first one beside it; say it in",
            {"blocks": [{"mixer": "mamba2"}]},
        ),
        (
            {"blocks": [{"feed_forward": "moe", "norms": "after"}], "moe": OWN_NORMS},
            "puts norms before experts, and model.blocks.0 has norms=after and parallel=none",
            {"blocks": [{"feed_forward": "moe", "norms": "both"}], "moe": OWN_NORMS},
        ),
        (
            {"blocks": [{"feed_forward": "none", "parallel": "two_norms"}]},
            "model.blocks.0.parallel=two_norms has no effect with model.blocks.0.feed_forward=none",
            {"blocks": [{"feed_forward": "none"}]},
        ),
    ],
)
def test_a_refusal_names_the_key_and_suggests_what_passes(model, message, suggested):
    (mistake,) = find_block_mistakes(ModelConfig(layers=4, **model))
    assert message in mistake
    assert list(find_block_mistakes(ModelConfig(layers=4, **suggested))) == []


def test_heads_of_a_delta_net_that_ranks_or_key_heads_cannot_share_are_named():
    mixer = "{kind: gated_delta_net, key_heads: 4, value_heads: 6}"
    keys = {"model.blocks": f"[{{mixer: {mixer}}}]", "parallel.tensor": 3}
    refusals = "\n".join(list_refusals_of_ranks(keys))
    assert "value_heads=6 is no multiple of key_heads=4; use 4 or 8" in refusals
    assert "parallel.tensor=3 does not divide key_heads=4; use 2 or 4" in refusals


def test_rounded_biases_need_a_key_head_for_each_query_head():
    keys = {"model.blocks": "[{mixer: {alibi: 8, alibi_form: falcon, heads: 6, kv_heads: 2}}]"}
    refusals = "\n".join(list_refusals_of_ranks(keys))
    assert "kv_heads=2 is not heads=6; use kv_heads=6, or alibi_form=exact" in refusals


def test_heads_of_mamba2_that_ranks_or_groups_cannot_share_are_named():
    mixer = "{kind: mamba2, heads: 6, groups: 4}"
    keys = {"model.blocks": f"[{{mixer: {mixer}}}]", "parallel.tensor": 3}
    refusals = "\n".join(list_refusals_of_ranks(keys))
    assert "heads=6 is no multiple of groups=4; use 4 or 8" in refusals
    keys |= {"model.blocks": "[{mixer: {kind: mamba2, heads: 6, groups: 2}}]", "parallel.tensor": 4}
    refusals = "\n".join(list_refusals_of_ranks(keys))
    assert "parallel.tensor=4 can neither divide groups=2 of Mamba-2 heads nor share" in refusals
    assert "them evenly among heads=6; use 2 or 6" in refusals


@pytest.mark.parametrize(("smallest", "refused"), [(0.2, True), (0.1, False)])
def test_steps_have_a_range(smallest, refused):
    mixer = {"kind": "mamba2", "step_min": smallest, "step_max": 0.1}
    mistakes = find_block_mistakes(ModelConfig(layers=4, blocks=[{"mixer": mixer}]))
    message = (
        "model.blocks.0.mixer.step_min=0.2 is more than step_max=0.1; use step_min=0.1 or less"
    )
    assert [*mistakes] == [message] * refused


def test_two_mixers_have_names_of_their_own():
    keys = {"model.blocks": "[{second_mixer: {kind: attention, window: 4}}]"}
    (refusal,) = list_refusals_of_ranks(keys)
    assert "model.blocks.0.second_mixer has parameters of the same names as the mixer" in refusal
