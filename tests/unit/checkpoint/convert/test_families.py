"""Families of Hugging Face models: the logits are the same after an import and after an export.

Tests `megaframe.checkpoint.convert.huggingface.dense_families`,
`megaframe.checkpoint.convert.huggingface.gpt_families`,
`megaframe.checkpoint.convert.huggingface.layered_families`,
`megaframe.checkpoint.convert.huggingface.moe_families` and
`megaframe.checkpoint.convert.huggingface.moe_variants`.
"""

import json

import pytest
from slow_cases import mark_slow
from transformers_models import (
    assert_same_logits,
    make_random_checkpoint,
    save_random_model,
)

from megaframe.checkpoint import open_checkpoint
from megaframe.checkpoint.convert.huggingface import model_folder as folders
from megaframe.checkpoint.convert.huggingface.families import FAMILIES, get_family
from megaframe.checkpoint.convert.huggingface.rotary_keys import RotaryKeys
from megaframe.config.registry import Registry, use_registry
from megaframe.errors import UserError
from megaframe.extensions import load_named_extensions

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
    "seed_oss": {
        **{**HEADS, "attention_out_bias": True},
        "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    },
    "ernie4_5": {**WIDE_HEADS},
    "cwm": {**HEADS, **LOCAL},
    "phi3": {**GROUPED, "sliding_window": 5, "partial_rotary_factor": 0.5},
    "glm": {**WIDE_HEADS},
    "glm4": {**WIDE_HEADS, "attention_bias": False},
    "smollm3": {**GROUPED, **LOCAL, "use_sliding_window": True},
    "gemma": {**WIDE_HEADS},
    "vaultgemma": {**GEMMA2},
    "gemma2": {**GEMMA2},
    "gemma3_text": {
        **{**GEMMA2, "sliding_window_pattern": 3, "attn_logit_softcapping": None},
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "olmo2": {**GROUPED, "attention_bias": True},
    "olmo3": {
        **{**GROUPED, **LOCAL},
        "rope_parameters": {
            "full_attention": YARN,
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "exaone4": {**GROUPED, **LOCAL},
    "granite": {**GROUPED, **MULTIPLIERS, "attention_bias": True, "tie_word_embeddings": True},
    "granite_swa": {**GROUPED, **LOCAL, **MULTIPLIERS},
    "hyperclovax": {**HEADS, **MULTIPLIERS},
}
FUSED = {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 20, "vocab_size": 61}
UNGATED = {
    "gpt_bigcode": {**FUSED, "initializer_range": 0.3},
    "gpt_neo": {
        **{"num_layers": 4, "hidden_size": 32, "num_heads": 4, "vocab_size": 61, "window_size": 5},
        **{"attention_types": [[["global", "local"], 2]], "initializer_range": 0.3},
    },
    "gpt_neox": {**SHAPE},
    "falcon": {
        **{"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 61},
        "initializer_range": 0.3,
    },
    "starcoder2": {**GROUPED, "sliding_window": 5},
    "stablelm": {**GROUPED, "use_qkv_bias": True},
    "nemotron": {**WIDE_HEADS},
    "jais2": {**HEADS},
    "cohere": {**GROUPED, "attention_bias": True, "logit_scale": 0.25},
    "cohere2": {**GROUPED, **LOCAL, "logit_scale": 0.25},
    "olmo": {**GROUPED},
}
ROUTED = {"num_experts": 8, "num_experts_per_tok": 2}
NARROW = {**ROUTED, "moe_intermediate_size": 12}
GRANITE_ROUTED = {**MULTIPLIERS, "num_local_experts": 8, "num_experts_per_tok": 2}
GLM_ROUTED = {
    **{"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 12},
    **{"n_shared_experts": 2, "routed_scaling_factor": 1.5, "n_group": 4, "topk_group": 2},
    "norm_topk_prob": True,
}
LATENT = {
    **{"kv_lora_rank": 10, "q_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6},
    **{"v_head_dim": 5, "num_key_value_heads": 4},
}
SPARSE = {
    "olmoe": {**GROUPED, **ROUTED},
    "flex_olmo": {**GROUPED, **ROUTED, "norm_topk_prob": True},
    "granitemoe": {**GROUPED, **GRANITE_ROUTED},
    "granitemoeshared": {**GROUPED, **GRANITE_ROUTED, "shared_intermediate_size": 48},
    "granitemoe_swa": {**GROUPED, **LOCAL, **GRANITE_ROUTED},
    "glm4_moe": {**GROUPED, **GLM_ROUTED, "use_qk_norm": True, "attention_bias": True},
    "solar_open": {**HEADS, **GLM_ROUTED},
    "glm4_moe_lite": {**SHAPE, **LATENT, **GLM_ROUTED},
    "dots1": {**GROUPED, **GLM_ROUTED, "first_k_dense_replace": 1},
    "minimax_m2": {
        **{**WIDE_HEADS, "num_local_experts": 8, "num_experts_per_tok": 2},
        "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
    "ernie4_5_moe": {
        **{**GROUPED, "moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 12},
        "num_hidden_layers": 3,
    },
    "hy_v3": {**HEADS, **NARROW},
    "afmoe": {**HEADS, **LOCAL, **NARROW, "mup_enabled": True, "route_scale": 1.5},
    "exaone_moe": {**GROUPED, **LOCAL, **NARROW, "n_group": 4, "topk_group": 2},
    "mellum": {
        **{**HEADS, **LOCAL, **NARROW},
        "layer_types": ["full_attention", *["sliding_attention"] * 3],
    },
    "qwen3_moe": {**HEADS, **NARROW, "num_hidden_layers": 4, "mlp_only_layers": [2]},
}
MODELS = {**DENSE, **UNGATED, **SPARSE}
"""Keys of a tiny config of each family."""
OTHERS = (
    *("gpt2", "llama", "mistral", "ministral", "qwen2", "qwen3", "mixtral"),
    *("deepseek_v2", "deepseek_v3"),
)
"""Families that `test_huggingface.py` compares."""
FIRST = ("gemma2", "glm4", "cohere2", "granitemoeshared")
"""Families in `make test`; all others repeat what these do."""


def test_every_family_is_compared():
    assert FAMILIES.keys() <= {*MODELS, *OTHERS}


def test_another_name_of_a_family_is_read_as_it():
    assert get_family("kimi_k2") is FAMILIES["deepseek_v3"]


def test_a_family_with_weights_that_are_constant_exports_no_others(tmp_path):
    model = {"layers": 1, "hidden": 8, "heads": 2, "vocab": 11, "activation": "swiglu"}
    checkpoint = make_random_checkpoint(tmp_path / "own", **model)
    message = "blocks.0.attention_norm.gain is not 1 everywhere, and olmo has no weights there"
    with open_checkpoint(checkpoint) as opened, pytest.raises(UserError, match=message):
        folders.export_model(opened, tmp_path / "theirs", tokenizer="none", family="olmo")


FAMILY = """
from megaframe.checkpoint.convert.huggingface.dense_families import DENSE_FAMILIES

def register(registry):
    registry.register_family(DENSE_FAMILIES[0].derive("file_llama", "FileForCausalLM"))
"""


def test_the_file_of_an_extension_registers_a_row(tmp_path):
    (tmp_path / "family.py").write_text(FAMILY)
    with use_registry(Registry()):
        load_named_extensions([str(tmp_path / "family.py")])
        assert get_family("file_llama").name == "file_llama"


def test_an_extension_registers_a_row():
    row = FAMILIES["llama"].derive("own_llama", "OwnForCausalLM", RotaryKeys(base=5e4))
    with use_registry(Registry()) as registry:
        registry.register_family(row)
        assert get_family("own_llama") is row
        with pytest.raises(UserError, match="own_llama is registered twice"):
            registry.register_family(row)
        registry.register_family(FAMILIES["llama"])
        with pytest.raises(UserError, match="registers the family llama, which is a name of"):
            get_family("llama")
    with pytest.raises(UserError, match="'own_llama' is not a known family"):
        get_family("own_llama")


@pytest.mark.parametrize("name", mark_slow(MODELS, except_for=FIRST))
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


def test_what_is_missing_or_null_is_what_transformers_makes_of_it():
    rope = {"rope_theta": 1e4, "rms_norm_eps": 1e-6}
    grouped = {**GROUPED, **GLM_ROUTED, **rope, "first_k_dense_replace": 1}
    del grouped["topk_group"]
    model = FAMILIES["glm4_moe"].read_model({**grouped, "model_type": "glm4_moe"})
    assert (model.moe.groups, model.moe.top_groups) == (4, 1)
    null = {**GROUPED, **rope, "model_type": "granite", "attention_multiplier": None}
    with pytest.raises(UserError, match="granite: attention_multiplier=None: input should be"):
        FAMILIES["granite"].read_model(null)
