"""Descriptions tell the truth: parameters, bytes kept for backward, FLOPs and traffic of every kind
of layer are exactly those of the torch layer, on one rank and on tensor, context and expert
ranks.

Tests `megaframe.architecture.sparse_attention`, among others.
"""

from dataclasses import replace
from itertools import product
from math import lcm

import pytest
from check_description import check_descriptions
from slow_cases import mark_slow

from megaframe.architecture.attention import AttentionDescription, SoftmaxAttention
from megaframe.architecture.embedding import EmbeddingDescription, HeadDescription
from megaframe.architecture.layer import SavedActivations
from megaframe.architecture.linear import LinearSpec, TensorTraffic
from megaframe.architecture.mlp import MLPDescription
from megaframe.architecture.model_blocks import describe_norm
from megaframe.architecture.moe import MoEDescription
from megaframe.architecture.predictor import PredictorDescription
from megaframe.architecture.traffic import AxisTraffic
from megaframe.config import RunConfig
from megaframe.layout import Layout
from megaframe.training.layer_check import find_lies, measure_layers
from megaframe.training.layer_check.compare import can_load_evenly
from megaframe.training.layer_check.measure import list_expert_sets, measure_layers_of
from megaframe.training.rank_pool import RankFailure

LATENT = {"kv_rank": 10, "head_dim": 6, "rotary_dim": 4, "value_dim": 5}
DELTA = {"kind": "gated_delta_net", "key_heads": 2, "key_dim": 5, "convolution": 3, "chunk": 3}
MAMBA = {"kind": "mamba2", "groups": 2, "state_dim": 5, "convolution": 3, "chunk": 3}
KIMI = {"kind": "gated_delta_net", "decay_rank": 3, "gate_rank": 4, "gate": "sigmoid"}
ROTATED_FIRST = {"norm_after_rotation": True}
V4 = {
    **{"kind": "compressed_attention", "query_rank": 12, "window": 8},
    **{"output_groups": 2, "output_rank": 5},
}
HASHED = {"kind": "moe", "router": "hash"}
MODELS = {
    "plain": {"position": "learned", "bias": True},
    "plain mlp": {},
    "rotated": {"norm": "rmsnorm"},
    "groups": {"kv_heads": 2, "norm": "rmsnorm", "position": "none"},
    "rotated groups": {"kv_heads": 2, "norm": "rmsnorm", "window": 5},
    "one group": {"kv_heads": 1, "qkv_bias": True, "rotary_fraction": 0.5},
    "one group, not rotated": {"kv_heads": 1, "position": "none", "window": (3, None)},
    "query and key norms": {"kv_heads": 2, "qk_norm": True, "head_dim": 6},
    "norms without rotation": {"qk_norm": True, "position": "none", "window": 6},
    "whole norms": {"kv_heads": 2, "qk_norm": "whole", "head_dim": 6, "norm": "rmsnorm"},
    "whole norms of one group": {"kv_heads": 1, "qk_norm": "whole", "position": "none"},
    "gates": {"norm": "rmsnorm", "blocks": [{"mixer": {"output_gate": "head", "kv_heads": 2}}]},
    "gates without norms": {"blocks": [{"norms": "after", "mixer": {"output_gate": "element"}}]},
    "gates in parallel": {
        "blocks": [{"parallel": "one_norm", "mixer": {"output_gate": "element"}}]
    },
    "softcap": {"norm": "rmsnorm", "kv_heads": 2, "blocks": [{"mixer": {"softcap": 3.0}}]},
    "sinks": {"norm": "rmsnorm", "blocks": [{"mixer": {"sinks": True, "window": 4}}]},
    "sinks and softcap": {
        **{"kv_heads": 2, "position": "none"},
        "blocks": [{"mixer": {"sinks": True, "softcap": 2.0}}],
    },
    "latent": {"latent": {**LATENT, "query_rank": 12}, "norm": "rmsnorm"},
    "latent of keys": {"latent": {**LATENT, "value_dim": 14}, "bias": True},
    "latent window": {"latent": {**LATENT, "value_dim": 10}, "window": 4, "norm": "rmsnorm"},
    "trained indexer": {
        **{"latent": {**LATENT, "query_rank": 12}, "norm": "rmsnorm"},
        "indexer": {"heads": 3, "head_dim": 8, "top_k": 5, "loss": 0.5},
    },
    "indexer of dense attention": {
        "latent": {**LATENT, "query_rank": 12},
        "indexer": {"heads": 2, "head_dim": 6, "top_k": 5, "loss": 0.5, "dense": True},
    },
    "frozen indexer": {
        **{"latent": {**LATENT, "query_rank": 12}, "norm": "rmsnorm", "layers": 2},
        "indexer": {"heads": 3, "head_dim": 6, "top_k": 4},
        "blocks": [
            {"mixer": {"kind": "latent", "window": 7}},
            {"mixer": {"kind": "latent", "window": 7, "shared_indexer": True}},
        ],
    },
    "gelu": {"activation": "gelu", "ffn": 30},
    "relu2": {"activation": "relu2", "norm": "rmsnorm"},
    "swiglu": {"activation": "swiglu", "norm": "rmsnorm", "bias": True},
    "geglu": {"activation": "geglu", "norm": "rmsnorm", "ffn": 30},
    "clamped": {"activation": "swiglu_clamped", "norm": "rmsnorm", "bias": True},
    "bias of the first product": {
        "activation": "geglu",
        "blocks": [{"feed_forward": {"up_bias": True}, "mixer": {"bias": True}}],
    },
    "bias of the second product": {
        "bias": True,
        "blocks": [{"feed_forward": {"up_bias": False}, "mixer": {"qkv_bias": False}}],
    },
    "experts": {"norm": "rmsnorm", "activation": "swiglu", "moe": {"experts": 4, "ffn": 10}},
    "balanced experts": {
        "activation": "geglu",
        "moe": {
            **{"experts": 6, "ffn": 10, "shared": 2, "top_k": 3, "z_loss": 0.1},
            **{"score": "softmax", "balance": "sequence", "balance_loss": 0.1},
        },
    },
    "global balance": {"moe": {"experts": 4, "balance": "global", "balance_loss": 0.1}},
    "penalised logits": {
        "moe": {"experts": 4, "balance": "bias", "z_loss": 0.1, "balance_loss": 0.0}
    },
    "global balance, penalised logits": {
        "moe": {"experts": 4, "balance": "global", "z_loss": 0.1, "score": "softmax"}
    },
    "unbalanced experts": {
        "norm": "rmsnorm",
        "moe": {"experts": 4, "balance": "none", "normalise": False, "groups": 2, "top_groups": 1},
    },
    "jittered experts": {"moe": {"experts": 4, "jitter": 0.1, "shared": 1}, "dropout": 0.1},
    "predictors": {"mtp_depth": 2, "norm": "rmsnorm", "tie_embeddings": True},
    "predictors of experts": {"mtp_depth": 1, "position": "learned", "moe": {"experts": 4}},
    "biased shared expert": {
        "norm": "rmsnorm",
        "bias": True,
        "moe": {"experts": 4, "top_k": 1, "ffn": 10, "shared": 1, "normalise": False},
    },
    "hyper-connections": {
        **{"norm": "rmsnorm", "layers": 3, "streams": {"number": 3, "iterations": 4}},
        "blocks": [
            {"layer_scalar": True},
            {"feed_forward": "none", "norms": "both"},
            {"mixer": "none", "norms": "none"},
        ],
    },
    "alternating updates": {
        **{"norm": "rmsnorm", "layers": 3, "layer_embeddings": 6, "activation": "geglu"},
        "streams": {"kind": "altup", "number": 3},
        "blocks": [
            {"laurel_rank": 3, "norms": "both", "feed_forward": {"sparsity": 0.6}},
            {"laurel_rank": 3, "feed_forward": "none"},
            {"feed_forward": {"sparsity": 0.3, "activation": "relu2"}, "layer_scalar": True},
        ],
    },
    "absorbed indexer": {
        **{"latent": {**LATENT, "query_rank": 12}, "norm": "rmsnorm"},
        "indexer": {"heads": 3, "head_dim": 8, "top_k": 5, "loss": 0.5, "absorb": True},
    },
    "frozen absorbed indexer": {
        **{"latent": {**LATENT, "query_rank": 12}, "layers": 2, "position": "none"},
        "indexer": {"heads": 3, "head_dim": 6, "top_k": 4, "absorb": True},
        "blocks": [
            {"mixer": {"kind": "latent", "window": 7}},
            {"mixer": {"kind": "latent", "window": 7, "shared_indexer": True}},
        ],
    },
}
NORMS = {
    f"{norm} {norms}, parallel {parallel}": {
        "norm": norm,
        "blocks": [
            {"norms": norms, "parallel": parallel, "residual_scale": 0.5},
            {"norms": norms, "parallel": parallel, "feed_forward": {"kind": "moe"}},
            {"norms": norms, "parallel": parallel, "mixer": {"kind": "latent", "window": 3}},
        ],
        "moe": {"experts": 4, "ffn": 10, "shared": 1},
        "latent": LATENT,
        "layers": 3,
    }
    for norm in ("layernorm", "rmsnorm")
    for norms in ("before", "after", "both", "none")
    for parallel in ("none", "one_norm", "two_norms")
    if parallel != "one_norm" or norms in ("before", "both")
}
SLOW_NORMS = [
    name
    for name, model in NORMS.items()
    if model["norm"] == "rmsnorm" and model["blocks"][0]["norms"] != "both"
]
"""A norm does not know where it stands: every place has LayerNorm, the place with most RMSNorm."""
MODELS |= NORMS
MODELS |= {
    "delta net": {
        "norm": "rmsnorm",
        "blocks": [{"mixer": {**DELTA, "value_heads": 4, "value_dim": 6}}],
    },
    "gated shared expert": {
        "norm": "rmsnorm",
        "moe": {"experts": 4, "ffn": 10, "shared": 2, "shared_gate": True, "jitter": 0.1},
    },
    "gated shared expert in parallel": {
        "activation": "swiglu",
        "blocks": [{"parallel": "two_norms", "feed_forward": "moe"}],
        "moe": {"experts": 4, "ffn": 10, "shared": 1, "shared_gate": True},
    },
    "decays of channels": {
        "norm": "rmsnorm",
        "blocks": [{"mixer": {**KIMI, "chunk": 3, "key_dim": 6, "value_dim": 5}}],
    },
    "decays of channels in parallel": {
        "blocks": [{"mixer": {**KIMI, "value_heads": 8}, "parallel": "one_norm"}],
    },
    "latent, not rotated": {"latent": LATENT, "position": "none"},
    "delta net of one chunk": {"blocks": [{"mixer": "gated_delta_net", "parallel": "one_norm"}]},
    "mamba2": {"norm": "rmsnorm", "blocks": [{"mixer": {**MAMBA, "head_dim": 6}}]},
    "mamba2 of one chunk": {
        "bias": True,
        "blocks": [
            {"mixer": {**MAMBA, "groups": 4, "chunk": 64, "norm": "none"}, "parallel": "one_norm"}
        ],
    },
    "mamba2 of one group": {"norm": "rmsnorm", "blocks": [{"mixer": {**MAMBA, "groups": 1}}]},
    "blocks of one half": {
        **{"layers": 4, "norm": "rmsnorm", "position": "none"},
        "blocks": [
            {"mixer": MAMBA, "feed_forward": "none"},
            {"mixer": "none", "feed_forward": "moe"},
            {"feed_forward": "none", "norms": "both"},
            {"mixer": "none", "norms": "after", "residual_scale": 0.5},
        ],
        "moe": {"experts": 4, "ffn": 10, "shared": 1},
    },
    "LayerNorm of blocks of one half": {
        **{"layers": 2, "bias": True, "dropout": 0.1},
        "blocks": [{"feed_forward": "none"}, {"mixer": "none"}],
    },
    "compressed keys": {
        "norm": "rmsnorm",
        "blocks": [
            {
                "mixer": {
                    **{**V4, "window": 3, "rotary_fraction": 0.5},
                    "compression": {
                        **{"tokens": 2, "overlap": True},
                        "indexer": {"heads": 3, "head_dim": 6, "top_k": 2},
                    },
                },
            },
        ],
    },
    "compressed keys in parallel": {
        "blocks": [
            {"mixer": {**V4, "compression": {"tokens": 2}}, "parallel": "one_norm"},
        ],
    },
    "one key, not rotated": {
        **{"position": "none", "bias": True},
        "blocks": [{"mixer": {**V4, "head_dim": 6}, "feed_forward": HASHED}],
        "moe": {"experts": 4, "ffn": 10, "score": "sqrtsoftplus", "shared": 1},
    },
    "sqrtsoftplus": {
        **{"norm": "rmsnorm", "activation": "swiglu", "activation_limit": 1.0},
        "moe": {"experts": 4, "ffn": 10, "score": "sqrtsoftplus", "z_loss": 0.1},
    },
    "two mixers": {
        **{"norm": "rmsnorm", "layers": 3},
        "blocks": [
            {"second_mixer": MAMBA, "residual_scale": 0.5},
            {"mixer": {"output_gate": "element"}, "second_mixer": MAMBA, "parallel": "one_norm"},
            {"mixer": MAMBA, "second_mixer": {"kv_heads": 2}, "norms": "after"},
        ],
    },
    "two mixers of biases": {
        **{"bias": True, "dropout": 0.1},
        "blocks": [{"second_mixer": MAMBA, "norms": "none"}],
    },
    "two mixers in parallel": {
        "blocks": [{"second_mixer": MAMBA, "norms": "none", "parallel": "two_norms"}],
    },
    "short convolution": {
        **{"norm": "rmsnorm", "bias": True},
        "blocks": [{"mixer": "gated_short_convolution"}],
    },
    "short convolution in parallel": {
        "blocks": [
            {
                "mixer": {"kind": "gated_short_convolution", "convolution": 6},
                "parallel": "one_norm",
            }
        ],
    },
    "adapters": {
        **{"norm": "rmsnorm", "activation": "swiglu", "kv_heads": 2},
        "adapters": {"rank": 3, "alpha": 6.0},
    },
    "adapters of few": {
        **{"bias": True, "dropout": 0.1},
        "adapters": {"rank": 2, "dropout": 0.2, "targets": ("value", "down")},
    },
    "magnitudes": {
        **{"norm": "rmsnorm", "activation": "swiglu", "kv_heads": 2, "bias": True},
        "adapters": {"rank": 3, "alpha": 6.0, "dora": True},
    },
    "adapters of latents": {"latent": LATENT, "adapters": {"rank": 3}},
    "adapters of other mixers": {
        "blocks": [
            {"mixer": KIMI},
            {"mixer": MAMBA},
            {"mixer": "gated_short_convolution", "second_mixer": {"keys_as_values": True}},
        ],
        "layers": 3,
        "adapters": {"rank": 3},
    },
    "adapters of experts": {
        **{
            "norm": "rmsnorm",
            "activation": "swiglu",
            "moe": {"experts": 4, "ffn": 10, "shared": 1},
        },
        "adapters": {"rank": 3, "alpha": 6.0},
    },
    "value norms": {
        "kv_heads": 2,
        "blocks": [
            {"mixer": {"value_norm": True, "qk_norm": True}, "layer_scalar": True},
            {"mixer": {"value_norm": True, "keys_as_values": True, "head_dim": 6}},
        ],
    },
    "keys as values": {
        **{"kv_heads": 2, "bias": True, "norm": "rmsnorm", "layers": 3},
        "blocks": [
            {"mixer": {"keys_as_values": True}, "layer_scalar": True, "norms": "both"},
            {"mixer": {"keys_as_values": True, "rotary": False, "qk_norm": "whole"}},
            {"mixer": {"value_norm": True, "rotary": False}},
        ],
    },
    "norms after rotation": {
        "kv_heads": 2,
        "blocks": [{"mixer": {**ROTATED_FIRST, "qk_norm": norm}} for norm in ("head", "whole")],
    },
    "relu": {"activation": "relu", "head_bias": True, "tie_embeddings": True},
    "alibi": {"position": "none", "blocks": [{"mixer": {"alibi": 8, "alibi_form": "falcon"}}]},
    "alibi of groups": {
        **{"position": "none", "kv_heads": 2},
        "blocks": [{"mixer": {"alibi": 8, "window": 5, "qk_norm": True}}],
    },
    "scaled queries": {
        "kv_heads": 2,
        "blocks": [{"mixer": {"query_scale": {"rate": 0.1, "length": 3}}}],
    },
    "scaled queries, not rotated": {
        "position": "none",
        "blocks": [{"mixer": {"query_scale": {"rate": 0.1, "length": 3}}}],
    },
    "scaled latent queries": {
        "latent": LATENT,
        "blocks": [{"mixer": {"kind": "latent", "query_scale": {"rate": 0.1, "length": 3}}}],
    },
    "norm of embeddings": {"embedding_norm": True, "embedding_scale": 2.0, "norm": "rmsnorm"},
    "LayerNorm of embeddings": {"embedding_norm": True, "position": "learned", "bias": True},
    "narrow values": {
        "kv_heads": 2,
        "blocks": [{"mixer": {"v_head_dim": 3, "window": 5, "output_gate": "element"}}],
    },
    "wide values": {
        **{"position": "none", "qk_norm": True, "bias": True},
        "blocks": [{"mixer": {"v_head_dim": 6}}],
    },
    "wide values of a group": {
        "kv_heads": 1,
        "blocks": [{"mixer": {"v_head_dim": 6, "sinks": True, "norm_after_rotation": True}}],
        "qk_norm": True,
    },
    "chunks": {
        "kv_heads": 2,
        "blocks": [{"mixer": {**ROTATED_FIRST, "qk_norm": "l2", "attention_chunk": 3}}],
    },
    "norms without gains": {"kv_heads": 1, "qk_norm": "l2", "position": "none"},
    "scaled inputs of experts": {"moe": {"experts": 4, "ffn": 10, "scale_inputs": True}},
    "layer inputs": {
        **{"norm": "rmsnorm", "layer_embeddings": 6, "layers": 2},
        "blocks": [{"layer_scalar": True}, {"feed_forward": "none", "norms": "both"}],
    },
    "layer inputs in parallel": {
        "layer_embeddings": 6,
        "blocks": [{"norms": "after", "parallel": "two_norms"}],
    },
    "shared keys": {
        **{"norm": "rmsnorm", "kv_heads": 2, "layers": 3},
        "blocks": [
            {"mixer": {"value_norm": True, "window": 5}},
            {"mixer": {"shared_keys": True, "window": 5, "qk_norm": True, "sinks": True}},
            {"mixer": {"shared_keys": True, "window": 5, "output_gate": "element"}},
        ],
    },
    "shared keys without rotation": {
        **{"kv_heads": 1, "position": "none", "layers": 3},
        "blocks": [
            {"mixer": {"keys_as_values": True}},
            {"mixer": {"shared_keys": True}, "norms": "both"},
            {"mixer": {"shared_keys": True, "qkv_bias": True}, "parallel": "one_norm"},
        ],
    },
    "norms of experts": {
        **{"norm": "rmsnorm", "activation": "swiglu"},
        "moe": {"experts": 4, "ffn": 10, "shared": 1, "expert_gain": True, "own_norms": True},
    },
    "norms of experts alone": {"moe": {"experts": 4, "own_norms": True, "jitter": 0.1}},
    "trained slopes": {"activation": "xielu", "norm": "rmsnorm"},
    "layer norms of queries": {"kv_heads": 2, "qk_norm": "layernorm", "head_bias": True},
    "layer norms of heads": {
        **{"kv_heads": 2, "qk_norm": "layernorm_per_head", "mtp_depth": 1, "head_bias": True},
    },
    "layer norms of heads, not rotated": {
        **{"kv_heads": 1, "qk_norm": "layernorm_per_head", "position": "none"},
    },
    "layer norms after rotation": {
        "kv_heads": 2,
        "blocks": [{"mixer": {**ROTATED_FIRST, "qk_norm": "layernorm_per_head"}}],
    },
}


LAYOUTS = {
    "one rank": {},
    "tensor": {"tensor": 2},
    "ring": {"context": 2},
    "exchange": {"context": 2, "context_kind": "all_to_all"},
    "nested": {"context": 4, "context_kind": "nested", "context_heads": 2},
    "tensor and ring": {"tensor": 2, "context": 2},
    "tensor and exchange": {"tensor": 2, "context": 2, "context_kind": "all_to_all"},
}
WITH_EXPERTS = {
    "experts": {"data": 2, "expert": 2},
    "all gathered": {"data": 2, "expert": 2, "dispatch": "all_gather"},
    "by nodes": {"data": 4, "expert": 4, "dispatch": "hierarchical", "node_size": 2},
    "once a node": {"data": 4, "expert": 4, "dispatch": "deduplicated", "node_size": 2},
    "once a rank": {"data": 2, "expert": 2, "dispatch": "deduplicated", "node_size": 1},
    "divided experts": {"data": 2, "expert_tensor": 2},
    "both": {"data": 4, "expert": 2, "expert_tensor": 2},
    "both, all gathered": {"data": 4, "expert": 2, "expert_tensor": 2, "dispatch": "all_gather"},
    "both, once a rank": {
        **{"data": 4, "expert": 2, "expert_tensor": 2, "dispatch": "deduplicated"},
        "node_size": 2,
    },
    "tensor and experts": {"tensor": 2, "expert": 2},
}


def make_config(name, recompute, precision, layout):
    model = {"layers": 1, "hidden": 16, "heads": 4, "vocab": 37, **MODELS[name]}
    if isinstance(model.get("window"), tuple):
        model["layers"] = 2
    parallel = {**LAYOUTS, **WITH_EXPERTS}[layout]
    # Pieces of compressed samples have whole windows.
    seq, moe = 16 if name.startswith("compressed") else 8, model.get("moe")
    if layout in WITH_EXPERTS:  # so that all sets of experts are chosen equally often
        seq = lcm(4, len(list_expert_sets(moe["experts"], moe.get("top_k", 2))))
    return RunConfig(
        model=model,
        train={
            **{"seq": seq, "microbatch": 2, "global_batch": 2 * parallel.get("data", 1)},
            **{"precision": precision, "recompute": recompute},
        },
        parallel=parallel,
        kernels={"matmul": "torch"},
    )


def count_ranks(config):
    parallel = config.parallel
    return parallel.tensor * parallel.context * (parallel.data or 1)


ON_RANKS = {
    "tensor": (
        *(
            "alibi of groups",
            "narrow values",
            "layer norms of heads",
            "rotated groups",
            "gates",
            "latent",
            "balanced experts",
            "magnitudes",
            "mamba2 of one group",
            "compressed keys",
            "absorbed indexer",
        ),
    ),
    "ring": (
        *("alibi of groups", "rotated groups", "latent", "decays of channels", "mamba2"),
        "compressed keys",
    ),
    "exchange": ("one group", "predictors", "narrow values"),
    "nested": (
        "alibi of groups",
        "rotated groups",
    ),
}
"""Models measured on several ranks by `make test`; `make test-all` measures all."""
QUICK = [
    *((name, "selective", "bf16", "one rank") for name in MODELS if name not in SLOW_NORMS),
    *(("predictors", recompute, "bf16", "one rank") for recompute in ("none", "full")),
    *((name, "selective", "bf16", layout) for layout in ON_RANKS for name in ON_RANKS[layout]),
]
RECOMPUTE = ("none", "selective", "full")


def is_in_turn(name, recompute, layout):
    """Return whether models and layouts, which have one setting after the other, have this one."""
    place = list(MODELS).index(name) + [*LAYOUTS, *WITH_EXPERTS].index(layout)
    return recompute == RECOMPUTE[place % len(RECOMPUTE)]


CASES = [
    (name, recompute, precision, layout)
    for name, recompute, precision, layout in product(MODELS, RECOMPUTE, ("bf16", "fp64"), LAYOUTS)
    # Every setting with every model on one rank, norms in turn, and with every layout. Bytes of a
    # value are multiplied in after all else, and context ranks do not see norms. Two axes at once
    # add nothing to what each of them does to what is computed again.
    if is_in_turn(name, recompute, layout)
    or (precision == "bf16" and layout == "one rank" and name not in NORMS)
    or (name, recompute, precision, layout) in QUICK
    if precision == "bf16" or layout == "one rank"
    if name not in NORMS or layout in ("one rank", "tensor")
    if recompute == "selective"
    or layout not in ("nested", "tensor and ring", "tensor and exchange")
]


@pytest.mark.parametrize(
    ("name", "recompute", "precision", "layout"), mark_slow(CASES, except_for=QUICK)
)
def test_descriptions_are_exact(name, recompute, precision, layout, measure):
    assert_exact((name, recompute, precision, layout), measure)


TOGETHER = 24
"""Cases that are measured in one call, which may not take for ever."""


@pytest.fixture(scope="module")
def measure(request, pool):
    """measure(case) -> what its ranks measure. Ranks meet once for many cases of their layout; if
    one of these fails, each is measured alone."""
    cases, known = {}, {}
    for item in request.session.items:
        of = item.callspec.params if hasattr(item, "callspec") else {}
        if item.path == request.path and "recompute" in of:
            case = of["name"], of["recompute"], of.get("precision", "bf16"), of["layout"]
            cases.setdefault(of["layout"], []).append(case)

    def measure_case(case):
        if case not in known:
            of_layout = cases[case[-1]]
            first = of_layout.index(case) // TOGETHER * TOGETHER
            batch = of_layout[first : first + TOGETHER]
            configs = [make_config(*each) for each in batch]
            try:
                by_rank = pool.run(count_ranks(configs[0]), measure_layers_of, configs)
            except RankFailure:
                batch, config = [case], make_config(*case)
                by_rank = pool.run(count_ranks(config), measure_layers_of, [config])
            known.update(zip(batch, zip(*by_rank, strict=True), strict=True))
        return known[case]

    return measure_case


def assert_exact(case, measure):
    lies = find_lies(make_config(*case), measure(case))
    assert not lies, "\n" + "\n".join(map(str, lies))


QUICK_EXPERTS = [
    ("balanced experts", "full", layout) for layout in ("experts", "once a node", "both")
]
EXPERT_CASES = [
    (name, recompute, layout)
    for name, recompute, layout in product(MODELS, RECOMPUTE, WITH_EXPERTS)
    if "moe" in MODELS[name] and "blocks" not in MODELS[name]
    if is_in_turn(name, recompute, layout)
    # Dispatch does not see what is in an expert: every layout with a third of the models.
    if (len(name) + [*WITH_EXPERTS].index(layout)) % 3 == 0
    or (name, recompute, layout) in QUICK_EXPERTS
]


@pytest.mark.parametrize(
    ("name", "recompute", "layout"), mark_slow(EXPERT_CASES, except_for=QUICK_EXPERTS)
)
def test_descriptions_of_experts_are_exact(name, recompute, layout, measure):
    config = make_config(name, recompute, "bf16", layout)
    assert can_load_evenly(
        config.model, config.train, Layout.from_parallel(config.parallel, count_ranks(config))
    )
    assert_exact((name, recompute, "bf16", layout), measure)


def add_saved(self, parallel, recompute):
    return SavedActivations(self.up.results + self.width + 3)


def add_traffic(self):
    return TensorTraffic(2 * self.hidden, 3 * self.hidden + 1, self.hidden)


def add_product(self):
    return [self.up, self.down, LinearSpec((2,), (3,), 0.1)]


def add_part(self):
    return {"up": self.up, "down": self.down, "gate": LinearSpec((2,), (3,), 0.1, bias=True)}


def widen(self):
    return {"up": self.up, "down": LinearSpec((self.width + 1,), (self.hidden,), 0.1, split=1)}


def split_other_dim(self):
    return {"up": replace(self.up, split=1), "down": self.down}


LIES = {
    "count_saved": (
        add_saved,
        ["bytes kept for backward with recompute=none, bf16: described 4192, measured 4096"],
    ),
    "linears": (
        property(add_product),
        ["FLOPs of a forward pass: described 65728, measured 65536"],
    ),
    "parts": (
        property(add_part),
        ["names of parameters: described ['blocks.0.mlp.up.weight', "],
    ),
    "parts: shape": (
        property(widen),
        ["shape of blocks.0.mlp.down.weight: described (16, 65), measured (16, 64)"],
    ),
    "parts: axis": (
        property(split_other_dim),
        ["axes of blocks.0.mlp.up.weight: described {1: 'tensor'}, measured {0: 'tensor'}"],
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_told_with_layer_numbers_and_line(lie, monkeypatch):
    (function, texts), member = LIES[lie], lie.partition(":")[0]
    config = make_config("plain mlp", "none", "bf16", "one rank")
    measured = [measure_layers(config)]
    monkeypatch.setattr(MLPDescription, member, function)
    told = [str(found) for found in find_lies(config, measured) if "MLPDescr" in found.layer]
    line = (function if member == "count_saved" else function.fget).__code__.co_firstlineno
    for text in texts:
        (message,) = [each for each in told if text in each]
        assert message.startswith("blocks.0.mlp (MLPDescription)")
        place = f"tests/unit/architecture/test_descriptions.py:{line} (MLPDescription.{member})"
        assert place in message


def test_a_parameter_split_over_the_wrong_axis_is_told_on_every_rank(monkeypatch, pool):
    config = make_config("plain mlp", "none", "bf16", "tensor")
    measured = pool.run(2, measure_layers, config)
    monkeypatch.setattr(MLPDescription, "parts", property(split_other_dim))
    told = [str(lie) for lie in find_lies(config, measured) if "blocks.0.mlp" in lie.layer]
    for rank in range(2):
        shapes = "described (64, 8), measured (32, 16)"
        assert any(f"part of blocks.0.mlp.up.weight on rank {rank}: {shapes}" in t for t in told)
        axes = "described {1: 'tensor'}, measured {0: 'tensor'}"
        assert any(f"axes of blocks.0.mlp.up.weight on rank {rank}: {axes}" in t for t in told)


def send_less(self, parallel, seq, near=1):
    return {"context": AxisTraffic(7, 9)}


def send_nothing(self, parallel, seq, near=1):
    return {}


@pytest.mark.parametrize(
    ("layout", "name", "kind", "member", "lie", "texts"),
    [
        (
            *("tensor", "plain mlp", MLPDescription, "tensor_traffic", property(add_traffic)),
            [
                "over the tensor axis in the backward pass: described 1568, measured 1536",
                "over the tensor axis in the backward and weight pass: described 2080, measured 20",
            ],
        ),
        (
            *("ring", "rotated groups", SoftmaxAttention, "count_traffic", send_less),
            [
                "over the context axis in the forward pass: described 224, measured 384",
                "over the context axis in the backward pass: described 288, measured 1152",
            ],
        ),
        (
            *("experts", "experts", MoEDescription, "count_traffic", send_nothing),
            ["over the expert axis in the forward pass: described 0, measured "],
        ),
    ],
)
def test_a_lie_about_traffic_is_told(layout, name, kind, member, lie, texts, monkeypatch, pool):
    config = make_config(name, "none", "bf16", layout)
    measured = pool.run(2, measure_layers, config)
    monkeypatch.setattr(kind, member, lie)
    told = [str(found) for found in find_lies(config, measured) if found.layer.count(".") == 2]
    line = getattr(lie, "fget", lie).__code__.co_firstlineno
    for text in texts:
        (message,) = [each for each in told if text in each]
        assert f"test_descriptions.py:{line} ({kind.__name__}.{member})" in message


def keep_nothing(self, parallel, recompute):
    return SavedActivations()


def keep_more(self):
    return SavedActivations(values=5)


@pytest.mark.parametrize(
    ("kind", "member", "lie", "parts"),
    [
        (EmbeddingDescription, "count_saved", keep_nothing, ["embedding"]),
        (HeadDescription, "count_saved", keep_nothing, ["head"]),
        (PredictorDescription, "count_saved", keep_nothing, ["predictors.0"]),
        (
            *("norm", "saved_statistics", property(keep_more)),
            ["blocks.0.attention_norm", "blocks.0.mlp_norm", "head"],
        ),
        (AttentionDescription, "count_saved", keep_nothing, ["blocks.0.attention", "blocks.0"]),
    ],
)
def test_all_parts_of_a_model_are_compared(kind, member, lie, parts, monkeypatch):
    config = make_config("predictors of experts", "none", "bf16", "one rank")
    measured = [measure_layers(config)]
    kind = type(describe_norm(config.model)) if kind == "norm" else kind
    monkeypatch.setattr(kind, member, lie)
    told = [found.layer.partition(" ")[0] for found in find_lies(config, measured)]
    assert set(parts) <= set(told)


def test_one_call_checks_a_config_on_this_rank(monkeypatch):
    config = make_config("plain mlp", "none", "bf16", "one rank")
    check_descriptions(config)
    monkeypatch.setattr(MLPDescription, "count_saved", add_saved)
    with pytest.raises(AssertionError, match=r"MLPDescription.*described 4192, measured 4096"):
        check_descriptions(config)
