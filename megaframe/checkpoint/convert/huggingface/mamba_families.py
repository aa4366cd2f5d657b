"""Families with Mamba-2: in some layers or beside attention in each, in blocks with one half, or
alone."""

from __future__ import annotations

from megaframe.checkpoint.convert.huggingface.dense_families import LLAMA, NO_BIASES
from megaframe.checkpoint.convert.huggingface.key_pairs import Pair, choose
from megaframe.checkpoint.convert.huggingface.key_types import Factor, Heads, Size
from megaframe.checkpoint.convert.huggingface.mamba_keys import (
    MAMBA_FACTS,
    MULTIPLIED,
    AttentionIndices,
    HalfLayers,
    HybridExperts,
    IfExperts,
    InnerWidth,
    MambaLayers,
    Multipliers,
    NormPlace,
    StepRange,
    make_mamba_keys,
    name_mamba,
)
from megaframe.checkpoint.convert.huggingface.model_facts import MAMBA2
from megaframe.checkpoint.convert.huggingface.moe_families import (
    GRANITE_MOE,
    SIGMOID,
    TOP_K,
    WIDTH,
    Groups,
    SharedWidth,
)
from megaframe.checkpoint.convert.huggingface.rotary_keys import RotaryKeys

_HYBRID = (
    *make_mamba_keys(
        *("mamba_n_groups", "mamba_d_state", "mamba_d_conv", "mamba_conv_bias", "mamba_proj_bias")
    ),
    InnerWidth(),
    StepRange(),
)
_OWN = {f"{MAMBA_FACTS}.norm": "after_gate"}
_ATTENTION = (
    Pair("num_attention_heads", "mixer.heads", "value", absent=1),
    Pair("num_key_value_heads", "mixer.kv_heads", "value", absent=1),
)
"""Keys that must have a value even if no layer has attention."""
_BAMBA_ENDS = {"model.norm": None, "model.final_layernorm": "head.norm"}
_BAMBA_BLOCK = {
    **{"post_attention_layernorm": None, "pre_ff_layernorm": "mlp_norm"},
    **{f"mlp.{name}_proj": None for name in ("gate", "up", "down")},
    **{f"feed_forward.{name}_proj": f"mlp.{name}" for name in ("gate", "up", "down")},
    **name_mamba("mamba"),
}
BAMBA = LLAMA.derive(
    "bamba",
    "BambaForCausalLM",
    *_HYBRID,
    *_ATTENTION,
    AttentionIndices(),
    RotaryKeys(share=0.5),
    own=_OWN,
    training=("z_loss_coefficient",),
    neutral=("mamba_chunk_size", "num_logits_to_keep"),
    ends=_BAMBA_ENDS,
    block=_BAMBA_BLOCK,
)
FALCON_H1 = LLAMA.derive(
    "falcon_h1",
    "FalconH1ForCausalLM",
    Pair("rms_norm_eps", "norm_eps", default=1e-5),
    *make_mamba_keys("mamba_n_groups", "mamba_d_state", "mamba_d_conv", "mamba_conv_bias"),
    InnerWidth(inner="mamba_d_ssm"),
    StepRange(),
    NormPlace(),
    Pair("num_key_value_heads", "mixer.kv_heads", "present"),
    Pair("embedding_multiplier", "embedding_scale", default=1.0, type=Factor),
    Pair("lm_head_multiplier", "head_scale", default=1.0, type=Factor, absent=1.0),
    Multipliers(),
    own={
        **{"mixer.kind": "attention", "second_mixer.kind": MAMBA2, "feed_forward.kind": "mlp"},
        **{f"{MAMBA_FACTS}.input_bias": False, f"{MAMBA_FACTS}.bias": False},
    },
    fixed={
        **{**NO_BIASES, "mamba_proj_bias": False, "projectors_bias": False},
        **{"mamba_use_mlp": True, "attn_layer_indices": None},
    },
    neutral=("mamba_chunk_size", "num_logits_to_keep", "mlp_expansion_factor"),
    ends=_BAMBA_ENDS,
    block=_BAMBA_BLOCK,
    scales={**MULTIPLIED, "head.norm": "head_scale"},
)
GRANITE_MOE_HYBRID = GRANITE_MOE.derive(
    "granitemoehybrid",
    "GraniteMoeHybridForCausalLM",
    *_HYBRID,
    *_ATTENTION,
    HybridExperts(),
    MambaLayers(),
    RotaryKeys(),
    choose(
        "position_embedding_type",
        "mixer.rotary",
        {"rope": True, "nope": False},
        default="nope",
        absent="nope",
    ),
    own=_OWN,
    neutral=("mamba_chunk_size",),
    block={
        **{f"mlp.{name}_proj": None for name in ("gate", "up", "down")},
        "shared_mlp.input_linear": "mlp.gate mlp.up or moe.shared.gate moe.shared.up",
        "shared_mlp.output_linear": "mlp.down or moe.shared.down",
        **name_mamba("mamba"),
    },
)
_TRAINING_STEPS = ("time_step_floor", "time_step_max", "rescale_prenorm_residual")
"""What initial values were drawn by."""
_ENDS = {
    **{"model.embed_tokens": None, "model.norm": None},
    **{"backbone.embeddings": "embedding.tokens", "backbone.norm_f": "head.norm"},
}
MAMBA2_ALONE = LLAMA.derive(
    "mamba2",
    "Mamba2ForCausalLM",
    Pair("layer_norm_epsilon", "norm_eps", default=1e-5),
    *make_mamba_keys("n_groups", "state_size", "conv_kernel", "use_conv_bias", "use_bias"),
    InnerWidth("num_heads", "head_dim", "expand"),
    StepRange(),
    without=(
        *("num_attention_heads", "intermediate_size", "rms_norm_eps", "num_key_value_heads"),
        *("attention_bias", "mlp_bias", "rope_theta"),
    ),
    own={
        **{**_OWN, "mixer.kind": MAMBA2, "feed_forward.kind": "none"},
        **{"mixer.heads": lambda facts: facts.get(f"{MAMBA_FACTS}.heads")},
        **{"mixer.head_dim": lambda facts: facts.get(f"{MAMBA_FACTS}.head_dim")},
    },
    neutral=(*_TRAINING_STEPS, "time_step_min", "time_step_rank", "residual_in_fp32", "chunk_size"),
    ends=_ENDS,
    block={**dict.fromkeys(LLAMA.block), "norm": "attention_norm", **name_mamba("mixer")},
    layer="backbone.layers.{}.",
)
NEMOTRON_H = LLAMA.derive(
    "nemotron_h",
    "NemotronHForCausalLM",
    Pair("layer_norm_epsilon", "norm_eps", default=1e-5),
    *_ATTENTION,
    Pair("head_dim", "mixer.head_dim", "value", absent=1),
    Pair("intermediate_size", "feed_forward.ffn", "value", otherwise="moe.ffn", absent=1),
    *make_mamba_keys("n_groups", "ssm_state_size", "conv_kernel", "use_conv_bias", "use_bias"),
    Pair("mamba_num_heads", f"{MAMBA_FACTS}.heads", "value", type=Heads),
    Pair("mamba_head_dim", f"{MAMBA_FACTS}.head_dim", "value", type=Size),
    Pair("time_step_min", f"{MAMBA_FACTS}.step_min", default=0.001, type=float | None),
    HalfLayers(),
    IfExperts(
        (
            Pair("n_routed_experts", "moe.experts", "value"),
            *(TOP_K, WIDTH),
            Pair("routed_scaling_factor", "moe.scale", default=1.0),
            Pair("norm_topk_prob", "moe.normalise", default=True),
            Groups(best=2),
            SharedWidth("moe_shared_expert_intermediate_size", "moe_intermediate_size", True),
        )
    ),
    without=("rms_norm_eps", "attention_bias", "mlp_bias", "rope_theta", "tie_word_embeddings"),
    own={
        **{**SIGMOID, **_OWN, "feed_forward.kind": None, "feed_forward.activation": "relu2"},
        **{"tie_embeddings": False},
    },
    fixed={
        **{**NO_BIASES, "mamba_proj_bias": False, "mlp_hidden_act": "relu2"},
        **{"mamba_hidden_act": "silu", "sliding_window": None, "moe_latent_size": None},
        **{"n_shared_experts": 1, "tie_word_embeddings": False},
    },
    training=("hidden_dropout",),
    # Its code clamps steps from below only, by the number that their initial values had.
    neutral=(
        *(*_TRAINING_STEPS, "time_step_limit", "expand", "residual_in_fp32", "chunk_size"),
        *("use_mamba_kernels", "mamba_ssm_cache_dtype", "moe_shared_expert_overlap"),
        *("num_logits_to_keep", "num_nextn_predict_layers", "mtp_layers_block_type"),
        "mtp_hybrid_override_pattern",
    ),
    ends=_ENDS,
    block={
        **dict.fromkeys(LLAMA.block),
        "norm": "attention_norm or mlp_norm",
        **name_mamba("mixer"),
        **{f"mixer.{name[0]}_proj": f"attention.{name}" for name in ("query", "key", "value")},
        "mixer.o_proj": "attention.output",
        "mixer.up_proj": "mlp.up",
        "mixer.down_proj": "mlp.down",
        "mixer.gate": "moe.router",
        "mixer.gate.e_score_correction_bias": "moe.balance",
        "mixer.experts.{expert}.up_proj": "moe.experts.up",
        "mixer.experts.{expert}.down_proj": "moe.experts.down",
        "mixer.shared_experts.up_proj": "moe.shared.up",
        "mixer.shared_experts.down_proj": "moe.shared.down",
    },
    layer="backbone.layers.{}.",
    other_models=("mtp.",),
    layer_lists=("layers_block_type", "hybrid_override_pattern"),
)
MAMBA_FAMILIES = (BAMBA, FALCON_H1, GRANITE_MOE_HYBRID, MAMBA2_ALONE, NEMOTRON_H)
