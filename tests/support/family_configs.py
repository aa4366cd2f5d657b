"""Configs of transformers for a tiny model of each family, as keys of its class."""

import json

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
    "hunyuan_v1_dense": {
        **HEADS,
        "rope_parameters": {
            "rope_type": "dynamic",
            "rope_theta": 1e4,
            "alpha": 50.0,
            "factor": 1.0,
        },
    },
    "ministral3": {
        **{**HEADS, "sliding_window": None},
        "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.4, "mscale": 1.0},
    },
    "gemma4_text": {
        **{**HEADS, **LOCAL, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True},
        **{"global_head_dim": 12, "num_global_key_value_heads": 1, "sliding_window": 5},
        **{"final_logit_softcapping": 3.0},
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gemma3n_text": {
        **{**HEADS, **LOCAL, "hidden_size": 64, "head_dim": 16, "num_hidden_layers": 4},
        **{"hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 49, "laurel_rank": 5},
        **{"altup_num_inputs": 3, "num_kv_shared_layers": 2, "final_logit_softcapping": 3.0},
        "activation_sparsity_pattern": [0.75, 0.0, 0.5, 0.0],
        "intermediate_size": [24, 24, 20, 20],
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "deepseek_v4": {
        **{**SHAPE, "num_hidden_layers": 4, "head_dim": 8, "q_lora_rank": 12, "o_groups": 2},
        **{"o_lora_rank": 6, "moe_intermediate_size": 10, "n_routed_experts": 6, "hc_mult": 2},
        **{"num_experts_per_tok": 2, "index_n_heads": 8, "index_head_dim": 6, "index_topk": 2},
        **{"sliding_window": 5, "swiglu_limit": 1.0, "hc_sinkhorn_iters": 4},
        **{"partial_rotary_factor": 0.5, "rope_parameters": {**YARN, "rope_theta": 2e4}},
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 3},
        "layer_types": [
            *("sliding_attention", "compressed_sparse_attention"),
            *("heavily_compressed_attention", "compressed_sparse_attention"),
        ],
        "mlp_layer_types": ["hash_moe", "moe", "hash_moe", "moe"],
    },
    "apertus": {**GROUPED, "attention_bias": True},
    "internlm3": {**HEADS, "attention_bias": True, "mlp_bias": True},
    "iquestcoder": {**HEADS},
    "lfm2": {
        **{**WIDE_HEADS, "num_hidden_layers": 4, "full_attn_idxs": [1], "conv_bias": True},
        "block_multiple_of": 12,
    },
    "lfm3": {
        **{**WIDE_HEADS, "num_hidden_layers": 4, "sliding_window": 5, "conv_L_cache": 5},
        **{"conv_bias": True, "bos_token_id": 1, "eos_token_id": 2},
        "layer_types": ["conv", "full_attention", "conv", "sliding_attention"],
    },
    "qwen3_5_text": {
        **{**HEADS, "num_hidden_layers": 4, "linear_num_key_heads": 2},
        **{"linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 5},
        "linear_conv_kernel_dim": 3,
        "rope_parameters": {
            **{"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
            **{"mrope_section": [1, 1, 0], "mrope_interleaved": True},
        },
    },
    "olmo_hybrid": {
        **{**GROUPED, "num_hidden_layers": 4, "linear_conv_kernel_dim": 3, "eos_token_id": 2},
        **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 10},
        "linear_value_head_dim": 5,  # code saves the convolution in thirds
        "rope_parameters": {"rope_type": "default", "rope_theta": None},
    },
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
    "stablelm": {**GROUPED, "use_qkv_bias": True, "qk_layernorm": True},
    "nemotron": {**WIDE_HEADS},
    "jais2": {**HEADS},
    "cohere": {**GROUPED, "attention_bias": True, "logit_scale": 0.25, "use_qk_norm": True},
    "cohere2": {**GROUPED, **LOCAL, "logit_scale": 0.25},
    "olmo": {**GROUPED},
    "phi": {**GROUPED, "qk_layernorm": True},
    "mpt": {
        **{"d_model": 36, "n_heads": 6, "n_layers": 2, "vocab_size": 61, "max_seq_len": 20},
        "initializer_range": 0.3,
    },
    "bloom": {
        **{"hidden_size": 36, "n_layer": 2, "n_head": 6, "vocab_size": 61},
        "initializer_range": 0.3,
    },
    "codegen": {**FUSED, "n_head": 8, "rotary_dim": 2, "initializer_range": 0.3},
    "gptj": {**FUSED, "rotary_dim": 4, "initializer_range": 0.3},
    "opt": {
        **{name: SHAPE[name] for name in SHAPE if name.startswith(("num", "hidden", "vocab"))},
        **{"ffn_dim": 24, "max_position_embeddings": 20, "init_std": 0.3, "pad_token_id": 0},
    },
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
INDEXED = {
    **{**SHAPE, **LATENT, **GLM_ROUTED, "index_n_heads": 8, "index_head_dim": 10},
    **{"index_topk": 6, "first_k_dense_replace": 1},
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
    "deepseek_v32": {
        **INDEXED,
        "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
    "glm_moe_dsa": {
        **{**INDEXED, "n_group": 1, "topk_group": 1, "num_hidden_layers": 4},
        "indexer_types": ["full", "shared", "full", "shared"],
        "pad_token_id": None,  # whose row is zero, and so are all scores of its keys
    },
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
    "gpt_oss": {**HEADS, **LOCAL, "num_local_experts": 8, "num_experts_per_tok": 3},
    "mistral4": {
        **{**SHAPE, **LATENT, **GLM_ROUTED, "first_k_dense_replace": 1, "n_group": 1},
        **{"topk_group": 1, "v_head_dim": 10},
        "rope_parameters": {
            **{**YARN, "original_max_position_embeddings": 5, "llama_4_scaling_beta": 0.4},
            **{"mscale": 1.0, "mscale_all_dim": 1.0, "partial_rotary_factor": 0.4},
        },
    },
    "llama4_text": {
        **{**HEADS, "num_hidden_layers": 4, "intermediate_size_mlp": 40, "num_local_experts": 4},
        **{"interleave_moe_layer_step": 2, "no_rope_layer_interval": 3, "floor_scale": 4},
        **{"attention_chunk_size": 5, "attn_scale": 0.4, "num_experts_per_tok": 2},
        "rope_parameters": {
            **{"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0},
            **{"high_freq_factor": 1.0, "original_max_position_embeddings": 16},
        },
    },
    "hunyuan_v1_moe": {**HEADS, "num_experts": 8, "moe_topk": 2},
    "qwen2_moe": {**GROUPED, **NARROW, "shared_expert_intermediate_size": 24},
    "qwen3_next": {
        **{**HEADS, **NARROW, "num_hidden_layers": 4, "shared_expert_intermediate_size": 24},
        **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6},
        **{"linear_value_head_dim": 5, "linear_conv_kernel_dim": 3, "mlp_only_layers": [1]},
        **{"partial_rotary_factor": 0.5, "initializer_range": 0.2},
    },
    "qwen3_5_moe_text": {
        **{name: value for name, value in DENSE["qwen3_5_text"].items() if name[0] != "i"},
        **{**NARROW, "shared_expert_intermediate_size": 24, "initializer_range": 0.2},
    },
    "kimi_linear": {
        **{**SHAPE, **LATENT, **NARROW, "q_lora_rank": None, "num_hidden_layers": 3},
        **{"linear_head_dim": 6, "linear_num_heads": 3, "linear_conv_kernel_dim": 3},
        **{"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
        **{"num_shared_experts": 2, "num_expert_group": 4, "topk_group": 2, "bos_token_id": 1},
        **{"eos_token_id": 2, "initializer_range": 0.2},
    },
    "mimo_v2_flash": {
        **{**WIDE_HEADS, **LOCAL, **{k: v for k, v in GLM_ROUTED.items() if "shared" not in k}},
        **{"v_head_dim": 10, "attention_bias": True, "attention_value_scale": 0.5},
        "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1e5, "factor": 2.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "lfm2_moe": {
        **{**GROUPED, **NARROW, "num_hidden_layers": 3, "num_dense_layers": 1, "conv_L_cache": 4},
        "layer_types": ["conv", "full_attention", "conv"],
    },
    "qwen3_moe": {**HEADS, **NARROW, "num_hidden_layers": 4, "mlp_only_layers": [2]},
}
MAMBA = {
    **{"mamba_n_heads": 6, "mamba_n_groups": 2, "mamba_d_state": 5, "mamba_d_conv": 3},
    **{"mamba_expand": 3, "mamba_proj_bias": True},
}
FALCON_MULTIPLIERS = {  # by which fp32 divides exactly
    **{"attention_in_multiplier": 0.5, "attention_out_multiplier": 2.0, "key_multiplier": 4.0},
    **{"ssm_in_multiplier": 0.25, "ssm_out_multiplier": 4.0, "lm_head_multiplier": 0.125},
    **{"ssm_multipliers": [0.5, 2.0, 4.0, 8.0, 0.125], "mlp_multipliers": [2.0, 0.25]},
}
HYBRID = {
    "bamba": {
        **{**GROUPED, **MAMBA, "num_hidden_layers": 3, "attn_layer_indices": [1]},
        **{"mamba_conv_bias": False, "attention_bias": True, "mlp_bias": True},
    },
    "falcon_h1": {
        **{**GROUPED, **MAMBA, "mamba_proj_bias": False, "mamba_d_ssm": 18, "head_dim": 10},
        **{"mamba_rms_norm": True, "embedding_multiplier": 0.3, **FALCON_MULTIPLIERS},
    },
    "granitemoehybrid": {
        **{**GROUPED, **MAMBA, **GRANITE_ROUTED, "shared_intermediate_size": 48},
        **{"layer_types": ["mamba", "attention"], "mamba_proj_bias": False},
    },
    "mamba2": {
        **{"num_hidden_layers": 2, "hidden_size": 32, "vocab_size": 61, "num_heads": 6},
        **{"head_dim": 16, "expand": 3, "n_groups": 3, "state_size": 5, "conv_kernel": 3},
        **{"use_bias": True, "initializer_range": 0.3, "pad_token_id": 0},
    },
    "nemotron_h": {
        **{**HEADS, **GLM_ROUTED, "moe_shared_expert_intermediate_size": 24},
        **{"hybrid_override_pattern": "ME*-M", "mamba_num_heads": 6, "mamba_head_dim": 5},
        **{"n_groups": 2, "ssm_state_size": 5, "conv_kernel": 3, "n_shared_experts": 1},
        **{"use_bias": True, "use_conv_bias": False},
    },
}
del HYBRID["nemotron_h"]["num_hidden_layers"]
MODELS = {**DENSE, **UNGATED, **SPARSE, **HYBRID}
"""Keys of a tiny config of each family."""
OTHERS = {
    "gpt2": {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 20, "vocab_size": 61},
    "llama": {**HEADS},
    "mistral": {**HEADS, "sliding_window": 5},
    "ministral": {**HEADS, **LOCAL},
    "qwen2": {**HEADS},
    "qwen3": {**HEADS},
    "mixtral": {**HEADS, "num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v2": {
        **{**SHAPE, **LATENT, "n_routed_experts": 8, "num_experts_per_tok": 2, "q_lora_rank": None},
        **{"moe_intermediate_size": 8, "n_group": 1, "topk_group": 1, "topk_method": "greedy"},
    },
    "deepseek_v3": {**SHAPE, **LATENT, **GLM_ROUTED, "first_k_dense_replace": 1},
}
"""The same of families that `test_huggingface.py` compares."""


def make_tiny_config(family):
    """Return the config of a tiny model, as transformers would save it."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(family, **{**MODELS, **OTHERS}[family]).to_dict()
    return {**json.loads(json.dumps(config, default=str)), "model_type": family}
