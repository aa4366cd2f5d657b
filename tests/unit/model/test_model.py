"""The model's loss and gradients, compared with a plain autograd GPT in fp64.

Tests `megaframe.model.alibi`, `megaframe.model.embedding`, `megaframe.model.index_scores`,
`megaframe.model.indexer`, `megaframe.model.indexer_loss`, `megaframe.model.mlp`,
`megaframe.model.output_head`, `megaframe.model.query_key_norm`, `megaframe.model.query_scale` and
`megaframe.model.sparse_attention`.
"""

import math

import pytest
import torch
from autograd_comparison import (
    TERMS,
    TRAIN,
    compare_with_autograd,
    compute_gradients,
)
from slow_cases import mark_slow
from tolerances import assert_near

from megaframe.data.microbatch import IGNORE, look_ahead
from megaframe.model import attention
from megaframe.model.rotary import Rotary
from megaframe.ops.operator_mode import OperatorMode
from megaframe.pipeline_parallel.stage_pass import StagePass

pytestmark = pytest.mark.numeric

L2 = {"qk_norm": "l2", "norm_after_rotation": True}
V4 = {
    **{"kind": "compressed_attention", "query_rank": 7, "window": 4},
    **{"output_groups": 2, "output_rank": 5},
}
HASHED = {"kind": "moe", "router": "hash"}
SPARSE_KEYS = {
    **{"tokens": 2, "overlap": True},
    "indexer": {"heads": 3, "head_dim": 6, "top_k": 2},
}
MODELS = {
    "gpt2": {"position": "learned", "bias": True, "tie_embeddings": True, "activation": "gelu"},
    "gelu_tanh_untied": {"position": "none"},
    "llama": {"norm": "rmsnorm", "activation": "swiglu", "kv_heads": 2},
    "mqa_relu2": {"activation": "relu2", "kv_heads": 1, "qkv_bias": True, "position": "learned"},
    "gqa_learned": {"kv_heads": 2, "position": "learned"},
    "qwen": {"norm": "rmsnorm", "qk_norm": True, "head_dim": 6, "activation": "swiglu"},
    "window_softcap": {"window": 5, "logit_softcap": 2.0, "rotary_fraction": 0.5},
    "windows": {"window": (2, None, 5), "layers": 4, "kv_heads": 2},
    "llama3_scaling": {
        "rotary_scaling": {"kind": "llama3", "factor": 8, "original_length": 8},
    },
    "yarn_scaling": {
        "head_dim": 16,
        "rotary_scaling": {
            "kind": "yarn",
            "factor": 4,
            "original_length": 64,
            "low_frequency": 1,
            "high_frequency": 32,
        },
    },
}
MODELS |= {
    "mixtral": {
        "norm": "rmsnorm",
        "activation": "swiglu",
        "moe": {"experts": 4, "ffn": 10, "score": "softmax", "balance": "sequence"},
    },
    "switch": {
        "moe": {
            **{"experts": 3, "ffn": 8, "top_k": 1, "every": 2, "score": "softmax"},
            **{"balance": "global", "balance_loss": 0.2, "z_loss": 0.05},
        }
    },
}
YARN = {"kind": "yarn", "factor": 40, "original_length": 64, "high_frequency": 32}
DELTA = {"kind": "gated_delta_net", "key_heads": 2, "key_dim": 5, "convolution": 3, "chunk": 4}
KIMI = {**DELTA, "decay_rank": 3, "gate_rank": 4, "gate": "sigmoid"}
MAMBA = {"kind": "mamba2", "groups": 2, "state_dim": 5, "convolution": 3, "chunk": 4}
LONG = {"kind": "longrope", "factor": 4, "original_length": 8}
LONG |= {"short_factors": [1.0, 1.5], "long_factors": [2.0, 7.0]}
LATENT = {"kv_rank": 10, "head_dim": 6, "rotary_dim": 4, "value_dim": 5}
MODELS |= {
    "deepseek_v3": {
        "norm": "rmsnorm",
        "activation": "swiglu",
        "latent": {**LATENT, "query_rank": 12},
        "rotary_scaling": {**YARN, "mscale": 0.5, "mscale_all_dim": 0.8},
        "layers": 3,
        "mtp_depth": 1,
        "moe": {
            **{"experts": 8, "ffn": 6, "top_k": 3, "shared": 2, "first": 1, "scale": 2.5},
            **{"groups": 4, "top_groups": 2, "group_best": 2, "balance_loss": 0.3},
        },
    },
    "deepseek_lite_windows": {
        "bias": True,
        "qkv_bias": False,
        "latent": {**LATENT, "value_dim": 14},
        "window": (None, 3),
    },
    "one_further": {"mtp_depth": 1, "norm": "rmsnorm", "tie_embeddings": True},
    "three_further": {"mtp_depth": 3, "position": "learned", "bias": True, "window": (5, 2)},
    "latent_of_one_width": {"latent": {**LATENT, "query_rank": 12, "value_dim": 10}},
}
SHARED = {"shared_keys": True}
ROUTED_BIASES = {"expert_bias": True, "router_bias": True}
MODELS |= {
    "gemma_like": {
        "layers": 4,
        "norm": "rmsnorm",
        "embedding_scale": 4.0,
        "blocks": [
            {"norms": "both", "mixer": {"window": 4, "rotary_base": 500.0}, "repeat": 2},
            {"norms": "both", "mixer": {"kv_heads": 1, "score_scale": 0.3, "qk_norm": True}},
        ],
    },
    "geglu": {
        "norm": "rmsnorm",
        "activation": "geglu",
        "moe": {"experts": 4, "ffn": 10, "shared": 1, "every": 2},
    },
    "gpt_oss": {
        "norm": "rmsnorm",
        "activation": "swiglu_clamped",
        "bias": True,
        "init_std": 1.0,  # every twelfth gate is clamped
        "moe": {**ROUTED_BIASES, "experts": 4, "ffn": 10, "shared": 1},
        "blocks": [
            {"mixer": {"score_scale": 0.02}, "feed_forward": {"kind": "moe"}},
            {"mixer": {"score_scale": 0.02}},
            {"feed_forward": {"activation": "geglu", "bias": False}, "norms": "both"},
        ],
        "layers": 3,
    },
    "scaling_of_blocks": {
        "layers": 4,
        "rotary_scaling": {**YARN, "original_length": 8},
        "blocks": [
            {"mixer": {"rotary_scaling": {"kind": "linear", "factor": 8.0}}},
            {"mixer": {"rotary_scaling": {"kind": "dynamic", "factor": 2, "original_length": 8}}},
            {"mixer": {"rotary_scaling": LONG, "qk_norm": True, "norm_after_rotation": True}},
            {},
        ],
    },
    "olmo_2": {"norm": "rmsnorm", "blocks": [{"norms": "after", "mixer": {"qk_norm": "whole"}}]},
    "whole_norms": {
        "qk_norm": "whole",
        "kv_heads": 2,
        "layers": 3,
        "blocks": [
            {"mixer": {"head_dim": 6, "window": 4}},
            {"mixer": {"kv_heads": 1, "rotary": False}, "norms": "none"},
            {"mixer": {"qk_norm": "head"}, "feed_forward": {"up_bias": True}},
        ],
    },
    "phi": {
        **{"bias": True, "head_bias": True, "activation": "relu", "qk_norm": "layernorm"},
        "blocks": [{"parallel": "one_norm", "mixer": {"rotary_fraction": 0.5, "kv_heads": 2}}],
    },
    "command_r_plus": {
        **{"tie_embeddings": True, "head_bias": True, "mtp_depth": 1, "logit_softcap": 3.0},
        **{"qk_norm": "layernorm_per_head", "kv_heads": 2, "layers": 3},
        "blocks": [{}, {"mixer": {"rotary": False}}, {"mixer": {"norm_after_rotation": True}}],
    },
    "bloom": {
        **{"embedding_norm": True, "bias": True, "position": "none", "tie_embeddings": True},
        **{"embedding_scale": 3.0, "mtp_depth": 1, "blocks": [{"mixer": {"alibi": 8}}]},
    },
    "mpt": {
        **{"position": "none", "heads": 6, "head_dim": 4, "layers": 3},
        "blocks": [
            {"mixer": {"alibi": 5, "alibi_form": "falcon"}},  # slopes that are no powers of 2
            {"mixer": {"alibi": 4, "kv_heads": 2, "window": 5}},
            {"mixer": {"alibi": 8, "kv_heads": 1, "qk_norm": True, "score_scale": 0.3}},
        ],
    },
    "mistral_4": {
        **{"norm": "rmsnorm", "latent": {**LATENT, "query_rank": 12}, "layers": 3},
        "blocks": [
            {"mixer": {"kind": "latent", "query_scale": {"rate": 0.3, "length": 4}}},
            {"mixer": {"query_scale": {"rate": 0.5, "length": 3, "first": 1}, "rotary": False}},
            {"mixer": {"query_scale": {"rate": 0.3, "length": 4}, "kv_heads": 2}},
        ],
    },
    "deepseek_v32": {
        **{"norm": "rmsnorm", "latent": {**LATENT, "query_rank": 12}, "mtp_depth": 1},
        "indexer": {"heads": 3, "head_dim": 6, "top_k": 4, "loss": 0.7},
        "blocks": [
            {"mixer": {"kind": "latent", "query_scale": {"rate": 0.3, "length": 4}}},
            {"mixer": {"kind": "latent", "window": 6}},
        ],
    },
    "glm_5.2": {
        **{"norm": "rmsnorm", "latent": {**LATENT, "query_rank": 12}, "layers": 4},
        "indexer": {"heads": 3, "head_dim": 6, "top_k": 4, "loss": 0.7},
        "blocks": [
            {"mixer": "latent"},
            {"mixer": {"kind": "latent", "window": 6}},
            {"mixer": {"kind": "latent", "shared_indexer": True}},
            {"mixer": {"kind": "latent", "shared_indexer": True, "window": 6}},
        ],
    },
    "indexer_of_dense_attention": {
        **{"latent": {**LATENT, "query_rank": 12}, "position": "none"},
        "indexer": {"heads": 2, "head_dim": 5, "top_k": 4, "loss": 2.0, "dense": True},
        "blocks": [{"mixer": "latent"}, {"mixer": {"kind": "latent", "shared_indexer": True}}],
    },
    "frozen_indexer": {
        "latent": {**LATENT, "query_rank": 12},
        "indexer": {"heads": 2, "head_dim": 5, "top_k": 3},
    },
    "apertus": {"norm": "rmsnorm", "activation": "xielu", "qk_norm": True, "init_std": 0.5},
    "parallel": {
        "bias": True,
        "blocks": [
            {"parallel": "one_norm", "residual_scale": 0.5, "mixer": {"rotary_fraction": 0.5}},
            {"parallel": "two_norms", "feed_forward": {"ffn": 10, "activation": "swiglu"}},
        ],
    },
    "no_rotation_in_some": {
        "layers": 3,
        "blocks": [
            {"mixer": {"window": 5}, "norms": "none", "residual_scale": 0.7},
            {"mixer": {"rotary": False, "heads": 2, "kv_heads": 2, "head_dim": 6, "bias": True}},
        ],
    },
    "gemma_2_scores": {
        "layers": 2,
        "norm": "rmsnorm",
        "init_std": 0.5,  # scores reach the bound
        "blocks": [
            {"mixer": {"softcap": 1.5, "window": 4, "kv_heads": 2}, "norms": "both"},
            {"mixer": {"softcap": 2.0}, "norms": "both"},
        ],
    },
    "sinks": {
        "layers": 3,
        "init_std": 0.5,
        "blocks": [
            {"mixer": {"sinks": True, "window": 4, "kv_heads": 2}},
            {"mixer": {"sinks": True}},
            {"mixer": {"sinks": True, "softcap": 3.0, "kv_heads": 1}},
        ],
    },
    "gated_output": {
        "layers": 3,
        "norm": "rmsnorm",
        "init_std": 0.5,
        "blocks": [
            {"mixer": {"output_gate": "head", "kv_heads": 2, "head_dim": 6}},
            {"mixer": {"output_gate": "element"}, "norms": "after"},
            {"mixer": {"output_gate": "element", "sinks": True}, "parallel": "one_norm"},
        ],
    },
    "mimo_v2": {
        "layers": 3,
        "norm": "rmsnorm",
        "init_std": 0.5,
        "rotary_fraction": 0.5,
        "blocks": [
            {"mixer": {"kv_heads": 2, "v_head_dim": 6, "sinks": True, "window": 4}},
            {"mixer": {"kv_heads": 1, "v_head_dim": 3, "qkv_bias": True, "qk_norm": "whole"}},
            {"mixer": {"v_head_dim": 2, "output_gate": "element", "rotary": False}},
        ],
    },
    "qwen3_next": {
        "layers": 3,
        "norm": "rmsnorm",
        "init_std": 0.3,
        "blocks": [
            {"mixer": {**DELTA, "value_heads": 4, "value_dim": 6}},
            {
                "mixer": {
                    **{"kind": "gated_delta_net", "chunk": 6, "negative_eigenvalues": True},
                    "norm_eps": 0.1,
                },
            },
            {
                "mixer": {"output_gate": "element", "qk_norm": True, "rotary_fraction": 0.5},
                "feed_forward": "moe",
            },
        ],
        "moe": {"experts": 4, "ffn": 10, "shared": 1, "shared_gate": True},
    },
    "kimi_linear": {
        "layers": 3,
        "norm": "rmsnorm",
        "init_std": 0.3,
        "position": "none",
        "blocks": [
            {"mixer": {**KIMI, "value_heads": 4, "value_dim": 6}},
            {"mixer": {"kind": "gated_delta_net", "decay_rank": 2, "chunk": 2}},
            {"mixer": "latent"},
        ],
        "latent": {"kv_rank": 6, "head_dim": 3, "rotary_dim": 5, "value_dim": 4},
    },
    "lfm2_moe": {
        "layers": 3,
        "norm": "rmsnorm",
        "init_std": 0.3,
        "blocks": [
            {"mixer": {"kind": "gated_short_convolution", "bias": True}},
            {"mixer": {"kind": "gated_short_convolution", "convolution": 5}},
            {"mixer": {"qk_norm": True, "kv_heads": 2}, "feed_forward": "moe"},
        ],
        "moe": {"experts": 4, "ffn": 10, "normalise_eps": 0.1},
    },
    "mamba2": {
        "layers": 3,
        "norm": "rmsnorm",
        "init_std": 0.3,
        "blocks": [
            {"mixer": {**MAMBA, "head_dim": 3, "step_min": 0.02, "step_max": 0.04}},
            {"mixer": {**MAMBA, "norm": "before_gate", "bias": True, "convolution_bias": False}},
            {"mixer": {**MAMBA, "norm": "none", "groups": 1, "chunk": 6, "input_bias": True}},
        ],
    },
    "nemotron_h": {
        **{"layers": 5, "norm": "rmsnorm", "init_std": 0.3, "position": "none"},
        "activation": "relu2",
        "blocks": [
            {"mixer": MAMBA, "feed_forward": "none"},
            {"mixer": "none", "feed_forward": "moe"},
            {"mixer": {"kv_heads": 2}, "feed_forward": "none", "norms": "both"},
            {"mixer": "none", "norms": "after", "residual_scale": 0.5},
            {},
        ],
        "moe": {"experts": 4, "ffn": 10, "shared": 1},
    },
    "falcon_h1": {
        **{"layers": 3, "norm": "rmsnorm", "init_std": 0.3, "kv_heads": 2},
        "blocks": [
            {"second_mixer": {**MAMBA, "norm": "none"}},
            {"mixer": MAMBA, "second_mixer": {"qk_norm": True}, "parallel": "one_norm"},
            {"second_mixer": MAMBA, "norms": "after", "feed_forward": "none"},
        ],
    },
    "gemma_4": {
        **{"layers": 3, "norm": "rmsnorm", "init_std": 0.3, "kv_heads": 2},
        "blocks": [
            {"mixer": {"qk_norm": True, "value_norm": True}, "norms": "both", "layer_scalar": True},
            {"mixer": {"keys_as_values": True, "kv_heads": 1}, "layer_scalar": True},
            {
                "mixer": {
                    **{"qk_norm": True, "value_norm": True, "keys_as_values": True},
                    **{"head_dim": 6, "qkv_bias": True, "score_scale": 1.0},
                },
                "norms": "both",
            },
        ],
    },
    "layer_embeddings": {
        **{"layers": 3, "norm": "rmsnorm", "init_std": 0.3, "layer_embeddings": 6, "norm_eps": 0.1},
        **{"embedding_scale": 2.0, "tie_embeddings": True},
        "blocks": [{"layer_scalar": True}, {"feed_forward": "none"}, {"residual_scale": 0.5}],
    },
    "shared_keys": {
        **{"layers": 5, "norm": "rmsnorm", "init_std": 0.3, "kv_heads": 2},
        "blocks": [
            {"mixer": {"qk_norm": True, "value_norm": True, "window": 4}},
            {"mixer": {"kv_heads": 1, "keys_as_values": True}},
            {"mixer": {"qk_norm": True, "shared_keys": True, "window": 4}, "norms": "both"},
            {"mixer": {**SHARED, "kv_heads": 1, "sinks": True, "output_gate": "head"}},
            {"mixer": {**SHARED, "kv_heads": 1, "rotary": False, "qkv_bias": True}},
        ],
    },
    "gemma_4_experts": {
        **{"layers": 2, "norm": "rmsnorm", "init_std": 0.3, "kv_heads": 2, "norm_eps": 0.1},
        "blocks": [{"feed_forward": "moe", "norms": "both"}, {"feed_forward": "moe"}],
        "moe": {"experts": 4, "ffn": 10, "shared": 2, "expert_gain": True, "own_norms": True},
    },
    "llama_4": {
        **{"layers": 3, "norm": "rmsnorm", "init_std": 0.3, "kv_heads": 2},
        "blocks": [
            {"mixer": {**L2, "attention_chunk": 5}, "feed_forward": "moe"},
            {"mixer": {"qk_norm": "l2", "attention_chunk": 1, "heads": 2}},
            {"mixer": {"rotary": False, "query_scale": {"rate": 0.5, "length": 3, "first": 1}}},
        ],
        "moe": {"experts": 4, "top_k": 1, "ffn": 10, "shared": 1, "scale_inputs": True},
    },
    "scaled_inputs_with_biases": {
        **{"layers": 1, "bias": True},
        "moe": {**ROUTED_BIASES, "experts": 4, "ffn": 10, "scale_inputs": True},
    },
    "mup": {
        **{"parametrisation": "mup", "mup_base_hidden": 5, "mup_base_head_dim": 1, "layers": 3},
        **{"head_bias": True, "tie_embeddings": True, "mtp_depth": 1, "logit_softcap": 3.0},
        "blocks": [{"mixer": {"kv_heads": 2}}, {"mixer": {"score_scale": 0.3}}],
    },
    "mup_latent": {
        **{"parametrisation": "mup", "mup_base_hidden": 8, "mup_base_head_dim": 5},
        **{"latent": {**LATENT, "query_rank": 12}, "moe": {"experts": 4, "ffn": 10}},
    },
    "mixed": {
        "layers": 4,
        "norm": "rmsnorm",
        "latent": {**LATENT, "query_rank": 12},
        "moe": {"experts": 4, "ffn": 10},
        "blocks": [
            {"mixer": {"kind": "latent"}, "feed_forward": {"kind": "moe"}, "norms": "both"},
            {"feed_forward": {"activation": "relu2", "bias": True}},
            {"parallel": "one_norm", "feed_forward": {"kind": "moe", "shared": 2}},
            {"parallel": "one_norm", "norms": "both", "mixer": {"kind": "latent", "window": 3}},
        ],
    },
    "hyper_connections": {
        **{"layers": 5, "norm": "rmsnorm", "init_std": 0.3, "streams": {"number": 3}},
        "blocks": [
            {"norms": "both", "layer_scalar": True},
            {"feed_forward": "none", "residual_scale": 0.5},
            {"mixer": "none", "norms": "after"},
            {"second_mixer": MAMBA, "feed_forward": "moe"},
            {"mixer": {"window": 4}, "norms": "none"},
        ],
        "moe": {"experts": 4, "ffn": 10, "shared": 1},
    },
    "deepseek_v4": {
        **{"layers": 4, "norm": "rmsnorm", "init_std": 0.3, "streams": {"number": 2}},
        **{"activation": "swiglu", "activation_limit": 0.5, "rotary_fraction": 0.5},
        "blocks": [
            {"mixer": {**V4, "compression": SPARSE_KEYS}, "feed_forward": HASHED},
            {"mixer": {**V4, "compression": {"tokens": 3}}, "feed_forward": "moe"},
            {"mixer": {**V4, "head_dim": 6, "rotary_fraction": 1.0}},
            {"mixer": {**V4, "compression": {"tokens": 2, "overlap": True}}},
        ],
        "moe": {"experts": 6, "ffn": 10, "shared": 1, "score": "sqrtsoftplus", "z_loss": 0.1},
    },
    "gemma_3n": {
        **{"layers": 3, "norm": "rmsnorm", "init_std": 0.3, "layer_embeddings": 6, "norm_eps": 0.1},
        **{"streams": {"kind": "altup", "number": 3}, "layer_vocab": 9, "activation": "geglu"},
        "blocks": [
            {"laurel_rank": 3, "norms": "both", "feed_forward": {"sparsity": 0.6}},
            {"laurel_rank": 3, "feed_forward": "none", "layer_scalar": True},
            {"feed_forward": {"sparsity": 0.3, "activation": "relu2"}, "residual_scale": 0.5},
        ],
    },
}
MODELS |= {
    "absorbed": {
        **{"norm": "rmsnorm", "latent": {**LATENT, "query_rank": 12}, "layers": 4},
        "indexer": {"heads": 3, "head_dim": 6, "top_k": 4, "loss": 0.7, "absorb": True},
        "blocks": [
            {"mixer": {"kind": "latent", "query_scale": {"rate": 0.3, "length": 4}}},
            {"mixer": {"kind": "latent", "window": 3}},
            {"mixer": {"kind": "latent", "shared_indexer": True}},
            {"mixer": {"kind": "latent", "shared_indexer": True, "window": 3}},
        ],
    },
    "absorbed_without_rotation": {
        **{"latent": {**LATENT, "query_rank": 12}, "position": "none"},
        "indexer": {"heads": 2, "head_dim": 5, "top_k": 3, "absorb": True},
    },
}


RECOMPUTE = ["none", "selective", "full"]
CASES = [
    # Every model with every setting, and with documents in turn.
    (name, setting, bool((number + place) % 2))
    for number, name in enumerate(MODELS)
    for place, setting in enumerate(RECOMPUTE)
]
# Each model, with one setting of recompute after the other.
QUICK = [CASES[3 * number + number % 3] for number in range(len(MODELS))]


@pytest.mark.parametrize(("name", "recompute", "documents"), mark_slow(CASES, except_for=QUICK))
def test_loss_and_gradients_equal_autograd(name, recompute, documents, build, make_microbatch):
    built = build(MODELS[name], train={**TRAIN, "recompute": recompute})
    generator = torch.Generator().manual_seed(0)
    for p in built.stage.parameters():
        if p.spec.role == "bias":  # they begin at 0, with which some gradients are 0
            p.value.normal_(0.0, 0.3, generator=generator)
    compare_with_autograd(built, documents, make_microbatch)


@pytest.mark.parametrize("name", ["gpt2", "mixtral", "switch", "deepseek_v3"])
def test_weights_of_labels_are_factors_of_their_losses(name, build, make_microbatch):
    built = build(MODELS[name], train=TRAIN)
    compare_with_autograd(built, True, make_microbatch, weighted=True)


def test_evaluation_is_the_plain_training_loss_without_dropout(build, make_microbatch):
    built = build()
    microbatch = make_microbatch(built.config)
    loss = built.stage.forward(StagePass(0), microbatch, torch.ones((), dtype=torch.float64))
    assert_near(built.stage.evaluate(microbatch), loss, TERMS)


def test_logits_give_the_loss(build, make_microbatch):
    built = build({"logit_softcap": 3.0})
    microbatch = make_microbatch(built.config)
    logits = built.stage.head.compute_logits(built.stage.compute_hidden(microbatch)).double()
    labels = microbatch.labels_BS.flatten()
    valid = labels != IGNORE
    loss = torch.nn.functional.cross_entropy(logits[valid], labels[valid], reduction="sum")
    # `logits` rounds them to fp32, so up to one unit roundoff of 3 for each token.
    assert_near(built.stage.evaluate(microbatch), loss, 1, dtype=torch.float32)


def test_initial_loss_is_that_of_a_uniform_guess(build, make_microbatch):
    built = build({"init_std": 1e-3})
    microbatch = make_microbatch(built.config)
    valid = int((microbatch.labels_BS != IGNORE).sum())
    loss = float(built.stage.evaluate(microbatch)) / valid
    assert loss == pytest.approx(math.log(37), rel=1e-3)


class Operators(OperatorMode):
    """Notes which operators are called."""

    def __init__(self):
        super().__init__()
        self.called = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.called.add(function.overloadpacket)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", list(MODELS))
def test_without_padding_no_gradient_is_copied_into_zeros(name, build, make_microbatch):
    """As the gradient of a slice is, although the slice is everything."""
    built = build(MODELS[name], train=TRAIN)
    microbatch = look_ahead(make_microbatch(built.config), built.config.model.mtp_depth)
    with Operators() as operators:
        compute_gradients(built, microbatch, TRAIN)
    assert torch.ops.aten.mm in operators.called
    assert torch.ops.aten.slice_backward not in operators.called


def test_the_joint_product_is_not_copied_before_its_rotation_nor_its_parts_after_it(
    build, make_microbatch, monkeypatch
):
    """The kernel reads queries, keys and values where the product has written them."""
    built = build({"kv_heads": 2, "heads": 8, "head_dim": 6, "position": "rotary"}, train=TRAIN)
    attend, divide, divided, attending = attention.attend_heads, Rotary.divide, [], []

    def look_at_rotation(rotary, qkv):
        divided.append((qkv, divide(rotary, qkv)))
        return divided[-1][1]

    def look_at_attention(*arguments, **options):
        attending.append(arguments[:3])
        return attend(*arguments, **options)

    monkeypatch.setattr(Rotary, "divide", look_at_rotation)
    monkeypatch.setattr(attention, "attend_heads", look_at_attention)
    built.stage.evaluate(make_microbatch(built.config))
    (product, parts), attended = divided[0], attending[0]
    assert product.is_contiguous() and product.shape[2:] == (2, 4 + 2, 6)
    assert [part.data_ptr() for part in attended] == [part.data_ptr() for part in parts]
