"""Families of Hugging Face models: the logits are the same after an import and after an export."""

import json

import pytest
from transformers_models import assert_same_logits, save_random_model

from megaframe.checkpoint import open_checkpoint
from megaframe.checkpoint.convert.huggingface import model_folder as folders
from megaframe.checkpoint.convert.huggingface.families import FAMILIES

pytestmark = pytest.mark.numeric

SHAPE = {
    **{"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 61},
    **{"intermediate_size": 24, "max_position_embeddings": 64, "initializer_range": 0.3},
    "pad_token_id": 0,
}
GROUPED = {**SHAPE, "num_key_value_heads": 2}
HEADS = {**GROUPED, "head_dim": 8}
WIDE_HEADS = {**GROUPED, "head_dim": 12}
LOCAL = {"sliding_window": 5, "num_hidden_layers": 4}
GEMMA2 = {**WIDE_HEADS, **LOCAL, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 2.0}
MULTIPLIERS = {
    **{"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.4},
    "logits_scaling": 4.0,  # which fp32 divides by exactly
}
YARN = {
    **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "beta_fast": 32, "beta_slow": 1},
    "original_max_position_embeddings": 16,
}
DENSE = {
    "internlm3": {**HEADS, "attention_bias": True, "mlp_bias": True},
    "iquestcoder": {**HEADS},
    "arcee": {**HEADS, "mlp_bias": True, "rope_parameters": YARN},
    "helium": {**HEADS, "attention_bias": True},
    "seed_oss": {**HEADS, "attention_out_bias": True},
    "ernie4_5": {**WIDE_HEADS},
    "cwm": {**HEADS, **LOCAL},
    "phi3": {**GROUPED, "sliding_window": 5, "partial_rotary_factor": 0.5},
    "glm": {**WIDE_HEADS},
    "glm4": {**WIDE_HEADS, "attention_bias": False},
    "smollm3": {**GROUPED, **LOCAL, "use_sliding_window": True},
    "gemma": {**WIDE_HEADS},
    "vaultgemma": {**GEMMA2},
    "gemma2": {**GEMMA2},
    "gemma3_text": {**GEMMA2, "sliding_window_pattern": 3, "attn_logit_softcapping": None},
    "olmo2": {**GROUPED, "attention_bias": True},
    "olmo3": {**GROUPED, **LOCAL},
    "exaone4": {**GROUPED, **LOCAL},
    "granite": {**GROUPED, **MULTIPLIERS, "attention_bias": True, "tie_word_embeddings": True},
    "granite_swa": {**GROUPED, **LOCAL, **MULTIPLIERS},
    "hyperclovax": {**HEADS, **MULTIPLIERS},
}
MODELS = {**DENSE}
"""Keys of a tiny config of each family."""
FIRST = ("gemma2", "glm4")
"""Families in `make test`; all others repeat what these do."""


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.quick(when=lambda name: name in FIRST)
def test_logits_are_the_same_both_ways(name, tmp_path):
    from transformers import AutoConfig

    save_random_model(AutoConfig.for_model(name, **MODELS[name]), tmp_path / "theirs")
    checkpoint = folders.import_model(tmp_path / "theirs", tmp_path / "own").checkpoint
    assert_same_logits(checkpoint, tmp_path / "theirs")
    with open_checkpoint(checkpoint) as opened:
        folders.export_model(opened, tmp_path / "again", "fp32")
    assert_same_logits(checkpoint, tmp_path / "again")
    config = json.loads((tmp_path / "again/config.json").read_text())
    assert (config["model_type"], config["architectures"]) == (name, [FAMILIES[name].architecture])
