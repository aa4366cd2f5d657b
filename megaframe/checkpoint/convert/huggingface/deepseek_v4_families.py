"""DeepSeek-V4 (2026): compressed keys, routers by hashes of tokens, hyper-connections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megaframe.checkpoint.convert.huggingface.dense_families import LLAMA
from megaframe.checkpoint.convert.huggingface.key_pairs import (
    SLIDING,
    Key,
    Keys,
    Pair,
    check_layer_types,
    choose,
    find_window,
)
from megaframe.checkpoint.convert.huggingface.key_types import (
    Count,
    Counts,
    Positive,
    RopeKeys,
    Share,
    Size,
    Texts,
)
from megaframe.checkpoint.convert.huggingface.model_facts import COMPRESSED, Facts
from megaframe.checkpoint.convert.huggingface.moe_families import TOP_K, WIDTH
from megaframe.checkpoint.convert.huggingface.rotary_keys import (
    read_rope_kind,
    read_scaling,
    round_share,
    write_scaling,
)
from megaframe.errors import UserError

_SPARSE, _HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"
_RATES = {_SPARSE: 4, _HEAVY: 128}
"""Tokens of a key of each type of layers, of a config without them."""
_OF_RATES = {0: SLIDING, **{tokens: kind for kind, tokens in _RATES.items()}}
"""Types of layers by the numbers that published configs have in place of them."""
_OLDER_RATES = {_SPARSE: "compress_rate_csa", _HEAVY: "compress_rate_hca"}
_INDEXER = {
    **{"index_n_heads": ("heads", 64), "index_head_dim": ("head_dim", 128)},
    "index_topk": ("top_k", 512),
}
"""Keys of indexers, what they say, and what a config without them means."""
_HASH, _SCORES = "hash_moe", "moe"
_HASH_LAYERS = 3
_COMPRESSION = "mixer.compression"


@dataclass(frozen=True)
class CompressedLayers(Key):
    """Which layers have compressed keys, of how many tokens, and what chooses among them."""

    @property
    def types(self) -> Mapping[str, Any]:
        """The types of layers, in both forms, the rates, the window and the indexer."""
        older = {"compress_ratios": Counts, **dict.fromkeys(_OLDER_RATES.values(), Size)}
        rates = dict[str, int] | None
        sizes = {"sliding_window": Size, **dict.fromkeys(_INDEXER, Size)}
        return {"layer_types": Texts, "compress_rates": rates, **older, **sizes}

    @property
    def required(self) -> Sequence[str]:
        """The window."""
        return ("sliding_window",)

    def read(self, config: Mapping[str, Any], facts: Facts) -> None:
        """Set the window of all layers, and the compression of each."""
        facts.set("mixer.window", config["sliding_window"])
        layers, rates = len(facts.layers), _read_rates(config)
        kinds = config.get("layer_types")
        if kinds is None:
            kinds = _read_ratios(config, layers)
        check_layer_types("layer_types", kinds, layers, (SLIDING, _SPARSE, _HEAVY))
        for layer, kind in zip(facts.layers, kinds, strict=True):
            if kind == SLIDING:
                continue
            layer |= {f"{_COMPRESSION}.tokens": rates[kind]}
            layer |= {f"{_COMPRESSION}.overlap": kind == _SPARSE}
            if kind == _SPARSE:
                for key, (name, default) in _INDEXER.items():
                    value = config.get(key)
                    value = default if value is None else value
                    layer[f"{_COMPRESSION}.indexer.{name}"] = value

    def write(self, facts: Facts) -> Keys:
        """Return the types of layers, the rates, the window and the indexer."""
        kinds = [_find_kind(layer) for layer in facts.layers]
        rates = {**_RATES}
        for layer, kind in reversed([*zip(facts.layers, kinds, strict=True)]):
            if kind != SLIDING:
                rates[kind] = layer[f"{_COMPRESSION}.tokens"]
        values = {key: facts.get(f"{_COMPRESSION}.indexer.{n}") for key, (n, _) in _INDEXER.items()}
        return {
            "layer_types": kinds,
            "compress_rates": rates,
            "sliding_window": find_window(facts),
            **{k: _INDEXER[k][1] if value is None else value for k, value in values.items()},
        }


def _find_kind(layer: Mapping[str, Any]) -> str:
    if f"{_COMPRESSION}.tokens" not in layer:
        return SLIDING
    return _SPARSE if layer[f"{_COMPRESSION}.overlap"] else _HEAVY


def _read_rates(config: Mapping[str, Any]) -> dict[str, int]:
    rates = config.get("compress_rates")
    rates = {**_RATES} if rates is None else {**rates}
    for kind, older in _OLDER_RATES.items():
        if config.get(older) is not None:
            rates[kind] = config[older]
        if rates.get(kind, 0) < 1:
            raise UserError(f"compress_rates has no number of tokens for {kind}")
    if unknown := rates.keys() - _RATES.keys():
        raise UserError(f"compress_rates: {min(unknown)!r} is no type of layers")
    return rates


def _read_ratios(config: Mapping[str, Any], layers: int) -> list[str]:
    """Return the types of layers of a config that does not list them."""
    ratios = config.get("compress_ratios")
    if ratios is None:
        later = [_SPARSE if n % 2 else _HEAVY for n in range(max(layers - 2, 0))]
        return [_HEAVY] * min(layers, 2) + later
    if unknown := sorted({*ratios} - {*_OF_RATES}):
        known = ", ".join(map(str, _OF_RATES))
        raise UserError(f"compress_ratios: {unknown[0]} is none of {known}")
    return [_OF_RATES[ratio] for ratio in ratios[:layers]]


@dataclass(frozen=True)
class RouterKinds(Key):
    """Which layers choose experts by hashes of tokens."""

    @property
    def types(self) -> Mapping[str, Any]:
        """The kinds of routers, and how many first layers have hashes."""
        return {"mlp_layer_types": Texts, "num_hash_layers": Count}

    def read(self, config: Mapping[str, Any], facts: Facts) -> None:
        """Set the router of each layer."""
        layers, kinds = len(facts.layers), config.get("mlp_layer_types")
        if kinds is None:
            first = config.get("num_hash_layers")
            first = _HASH_LAYERS if first is None else first
            kinds = [_HASH if layer < first else _SCORES for layer in range(layers)]
        check_layer_types("mlp_layer_types", kinds, layers, (_HASH, _SCORES))
        routers = ["hash" if kind == _HASH else "scores" for kind in kinds]
        facts.set_layers("feed_forward.router", routers)

    def write(self, facts: Facts) -> Keys:
        """Return the kinds."""
        routers = facts.list_values("feed_forward.router")
        return {"mlp_layer_types": [_HASH if r == "hash" else _SCORES for r in routers]}


class CompressedRopeKeys(RopeKeys):
    """Sections of layers without and with compressed keys, or the scaling of the latter."""

    main: RopeKeys | None = None
    compress: RopeKeys | None = None


@dataclass(frozen=True)
class CompressedRotaryKeys(Key):
    """Rotary positions of layers without compressed keys, and of those with some, which alone are
    scaled."""

    @property
    def types(self) -> Mapping[str, Any]:
        """The sections, and what older configs have outside."""
        rope = CompressedRopeKeys | None
        bases = dict.fromkeys(("rope_theta", "compress_rope_theta"), Positive)
        shares = {"partial_rotary_factor": Share, "qk_rope_head_dim": Size}
        return {"rope_parameters": rope, "rope_scaling": rope, **bases, **shares}

    def read(self, config: Mapping[str, Any], facts: Facts) -> None:
        """Set what is rotated in each layer, and how."""
        sections = _read_sections(config)
        facts.set("mixer.rotary", True)
        for layer in facts.layers:
            name = "main" if _find_kind(layer) == SLIDING else "compress"
            rope = sections[name]
            kind = read_rope_kind(f"rope_parameters.{name}", rope)
            if kind not in ("default", "linear", "llama3", "yarn"):
                raise UserError(f"rope_parameters.{name}.rope_type={kind!r} is not supported")
            layer["mixer.rotary_base"] = rope.get("rope_theta") or _BASES[name]
            share = rope.get("partial_rotary_factor") or 1.0
            layer["mixer.rotary_fraction"] = round_share(facts, share)
            for key, value in read_scaling(kind, rope).items():
                layer[f"mixer.rotary_scaling.{key}"] = value

    def write(self, facts: Facts) -> Keys:
        """Return both sections, and outside of them what older code looks for."""
        share = facts.get("mixer.rotary_fraction")
        sections: dict[str, Keys] = {
            name: {"rope_type": "default", "rope_theta": base} for name, base in _BASES.items()
        }
        for layer in reversed(facts.layers):
            name = "main" if _find_kind(layer) == SLIDING else "compress"
            base = layer.get("mixer.rotary_base", _BASES[name])
            sections[name] = {**write_scaling(layer), "rope_theta": base}
        for section in sections.values():
            section["partial_rotary_factor"] = share
        bases = {f"{n}rope_theta": sections[s]["rope_theta"] for n, s in _OUTSIDE.items()}
        return {"rope_parameters": sections, **bases, "partial_rotary_factor": share}


_BASES = {"main": 1e4, "compress": 1.6e5}
_OUTSIDE = {"": "main", "compress_": "compress"}
_ROTATED = 64 / 512
"""Share of heads that are rotated, of a config without it."""


def _read_sections(config: Mapping[str, Any]) -> dict[str, Keys]:
    """Return the sections of layers without and with compressed keys, as code makes them."""
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    both = {name: given.get(name) or {} for name in _BASES}
    if all(both.values()):
        main, compress = (section.get("partial_rotary_factor") for section in both.values())
        if main is None or main != compress:
            raise UserError(
                f"rope_parameters: partial_rotary_factor is {main} in main and {compress} in "
                "compress; all layers rotate the same share of a head, so give both the same"
            )
        return {name: _drop_nulls(section) for name, section in both.items()}
    share, rotated = config.get("partial_rotary_factor"), config.get("qk_rope_head_dim")
    if share is None:
        share = _ROTATED if rotated is None else rotated / config["head_dim"]
    scaling = _drop_nulls({k: v for k, v in given.items() if k not in _BASES})
    if scaling.get("rope_type", scaling.get("type")) == "yarn":
        scaling.setdefault("attention_factor", 1.0)
    ropes = {"main": {}, "compress": scaling}
    for outside, name in _OUTSIDE.items():
        base = config.get(f"{outside}rope_theta") or _BASES[name]
        ropes[name] |= {"rope_theta": base, "partial_rotary_factor": share}
    return ropes


def _drop_nulls(section: Mapping[str, Any]) -> Keys:
    return {key: value for key, value in section.items() if value is not None}


_PARTS = {"wkv": "key", "wgate": "weights", "ape": "places", "norm": "norm"}
"""Parts of what compresses keys."""
_BLOCK = {
    "attn_norm": "attention_norm",
    "ffn_norm": "mlp_norm",
    "attn.wq_a": "compressed.query_down",
    "attn.q_norm": "compressed.query_norm",
    "attn.wq_b": "compressed.query",
    "attn.wkv": "compressed.key",
    "attn.norm": "compressed.key_norm",
    "attn.attn_sink": "compressed.sinks",
    "attn.wo_a": "compressed.groups",
    "attn.wo_b": "compressed.output",
    **{f"attn.compressor.{part}": f"compressed.compressor.{own}" for part, own in _PARTS.items()},
    **{
        f"attn.indexer.compressor.{part}": f"compressed.indexer.{own}"
        for part, own in _PARTS.items()
    },
    "attn.indexer.wq_b": "compressed.indexer.query",
    "attn.indexer.weights_proj": "compressed.indexer.head_weights",
    **{
        f"hc_{half}_{part}": f"{own}_streams.{of_own}"
        for half, own in (("attn", "attention"), ("ffn", "mlp"))
        for part, of_own in (("fn", "matrix"), ("base", "base"), ("scale", "scale"))
    },
    "ffn.gate": "moe.router",
    "ffn.gate.bias": "moe.balance",
    "ffn.gate.tid2eid": "moe.table",
    **{
        f"ffn.{module}.{part}": f"moe.{own}.{matrix}"
        for module, own in (("experts.{expert}", "experts"), ("shared_experts", "shared"))
        for part, matrix in (("w1", "gate"), ("w3", "up"), ("w2", "down"))
    },
}
_HEAD_STREAMS = {
    **{"fn": "head_streams.matrix", "base": "head_streams.base"},
    "scale": "head_streams.scale",
}
_ENDS = {
    **{"model.embed_tokens": "embedding.tokens", "model.norm": "head.norm", "head": "head"},
    **{f"model.hc_head.hc_{part}": own for part, own in _HEAD_STREAMS.items()},
}
"""As transformers saves them."""
_PUBLISHED = {
    "ends": {
        **{**dict.fromkeys(_ENDS), "embed": "embedding.tokens", "norm": "head.norm"},
        **{f"hc_head_{part}": own for part, own in _HEAD_STREAMS.items()},
        "head": "head",
    },
    "block": {"attn.norm": None, "attn.kv_norm": "compressed.key_norm"},
    "layer": "layers.{}.",
}
"""What differs in published folders."""
DEEPSEEK_V4 = LLAMA.derive(
    "deepseek_v4",
    "DeepseekV4ForCausalLM",
    Pair("head_dim", "mixer.head_dim", "value"),
    Pair("q_lora_rank", "mixer.query_rank", "value", type=Size),
    Pair("o_groups", "mixer.output_groups", "value", type=Size),
    Pair("o_lora_rank", "mixer.output_rank", "value", type=Size),
    Pair("n_routed_experts", "moe.experts", "value"),
    TOP_K,
    WIDTH,
    choose(
        "scoring_func",
        "moe.score",
        {name: name for name in ("sqrtsoftplus", "sigmoid", "softmax")},
        default="sqrtsoftplus",
    ),
    Pair("routed_scaling_factor", "moe.scale", default=1.5),
    Pair("swiglu_limit", "activation_limit", "value", type=Positive),
    Pair("hc_mult", "streams.number", default=4, type=Size),
    Pair("hc_sinkhorn_iters", "streams.iterations", default=20, type=Size),
    Pair("hc_eps", "streams.eps", default=1e-6, type=Positive),
    CompressedLayers(),
    RouterKinds(),
    CompressedRotaryKeys(),
    without=("intermediate_size", "attention_bias", "mlp_bias", "num_key_value_heads"),
    own={
        **{"mixer.kind": COMPRESSED, "streams.kind": "hyper_connections"},
        **{"feed_forward.kind": "moe", "moe.balance": "bias", "moe.normalise": True},
        "moe.shared": 1,
    },
    fixed={
        **{"attention_bias": False, "mlp_bias": False, "num_key_value_heads": 1},
        "n_shared_experts": 1,
    },
    training=("router_aux_loss_coef", "router_jitter_noise"),
    neutral=("norm_topk_prob", "topk_method", "expert_dtype"),
    aliases={"num_local_experts": "n_routed_experts", "intermediate_size": "moe_intermediate_size"},
    ends={**dict.fromkeys(LLAMA.ends), **_ENDS},
    block={**dict.fromkeys(LLAMA.block), **_BLOCK},
    other_names=(_PUBLISHED,),
    predictors="num_nextn_predict_layers",
    other_models=("mtp.", "model.mtp."),
)
DEEPSEEK_V4_FAMILIES = (DEEPSEEK_V4,)
