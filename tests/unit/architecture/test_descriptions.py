"""Descriptions tell the truth: parameters, bytes kept for backward, FLOPs and traffic of every kind
of layer are exactly those of the torch layer, on one rank and on two tensor ranks."""

import pytest
from check_description import check_descriptions, find_lies, measure_blocks

from megaframe.architecture.layer import SavedActivations
from megaframe.architecture.linear import LinearSpec, TensorTraffic
from megaframe.architecture.mlp import MLPDescription
from megaframe.config import RunConfig

pytestmark = pytest.mark.numeric

LATENT = {"kv_rank": 10, "head_dim": 6, "rotary_dim": 4, "value_dim": 5}
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
    "biased shared expert": {
        "norm": "rmsnorm",
        "bias": True,
        "moe": {"experts": 4, "top_k": 1, "ffn": 10, "shared": 1, "normalise": False},
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
MODELS |= NORMS


def make_config(name, recompute, precision, tensor):
    model = {"layers": 1, "hidden": 16, "heads": 4, "vocab": 37, **MODELS[name]}
    if isinstance(model.get("window"), tuple):
        model["layers"] = 2
    return RunConfig(
        model=model,
        train={
            **{"seq": 8, "microbatch": 2, "global_batch": 2},
            **{"precision": precision, "recompute": recompute},
        },
        parallel={"tensor": tensor},
        kernels={"matmul": "torch"},
    )


QUICK = (
    "rotated groups",
    "whole norms",
    "gates",
    "one group",
    "latent",
    "clamped",
    "balanced experts",
)
"""Measured on two ranks, as are all others in the long tests."""


@pytest.mark.quick(
    when=lambda name, recompute, precision, tensor: (
        (precision == "bf16" and tensor == 1)
        or ((precision, recompute) == ("fp64", "selective") and tensor == 2 and name in QUICK)
    )
)
@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("precision", ["fp64", "bf16"])
@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize("name", MODELS)
def test_descriptions_are_exact(name, recompute, precision, tensor, pool):
    config = make_config(name, recompute, precision, tensor)
    measured = pool.run(tensor, measure_blocks, config)
    lies = find_lies(config, measured)
    assert not lies, "\n" + "\n".join(map(str, lies))


def add_saved(self, parallel, recompute):
    return SavedActivations(self.up.results + self.width + 3)


def add_traffic(self):
    return TensorTraffic(2 * self.hidden, 3 * self.hidden + 1, self.hidden)


def add_product(self):
    return [self.up, self.down, LinearSpec((2,), (3,), 0.1)]


def add_part(self):
    return {"up": self.up, "down": self.down, "gate": LinearSpec((2,), (3,), 0.1, bias=True)}


LIES = {
    "count_saved": (
        add_saved,
        "kept for backward with recompute=none, bf16: described 4192, measured 4096",
    ),
    "linears": (property(add_product), "FLOPs of a forward pass: described 65728, measured 65536"),
    "parts": (property(add_part), "names of parameters: described ['blocks.0.mlp.up.weight', "),
}


@pytest.mark.parametrize("member", LIES)
def test_a_lie_is_told_with_layer_numbers_and_line(member, monkeypatch):
    lie, numbers = LIES[member]
    config = make_config("plain mlp", "none", "bf16", 1)
    measured = [measure_blocks(config)]
    monkeypatch.setattr(MLPDescription, member, lie)
    messages = [str(found) for found in find_lies(config, measured)]
    line = (lie if member == "count_saved" else lie.fget).__code__.co_firstlineno
    (message,) = [text for text in messages if numbers in text and "blocks.0.mlp (MLP" in text]
    assert (
        f"tests/unit/architecture/test_descriptions.py:{line} (MLPDescription.{member})" in message
    )


def test_a_lie_about_traffic_is_told(monkeypatch, pool):
    config = make_config("plain mlp", "none", "bf16", 2)
    measured = pool.run(2, measure_blocks, config)
    monkeypatch.setattr(MLPDescription, "tensor_traffic", property(add_traffic))
    messages = [str(found) for found in find_lies(config, measured) if "mlp" in found.layer]
    assert len(messages) == 2 and all(
        "over the tensor axis in the backward" in text for text in messages
    )


def test_one_call_checks_a_config_on_this_rank(monkeypatch):
    config = make_config("plain mlp", "none", "bf16", 1)
    check_descriptions(config)
    monkeypatch.setattr(MLPDescription, "count_saved", add_saved)
    with pytest.raises(AssertionError, match=r"MLPDescription.*described 4192, measured 4096"):
        check_descriptions(config)
