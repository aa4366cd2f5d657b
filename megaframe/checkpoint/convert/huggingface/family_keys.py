"""Which keys of `config.json` each family knows: those that are read, those that have only one
supported value, and those that change no logit. Any other key is refused, because a key that is not
read here may well change what transformers computes.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from megaframe.checkpoint.convert.huggingface.read_files import make_printable
from megaframe.errors import UserError

_MAX_NAMED_KEYS = 5
"""Number of keys that an error names."""
_COMMON_READ = frozenset(
    {
        *("model_type", "dtype", "torch_dtype", "vocab_size", "initializer_range"),
        "tie_word_embeddings",
    }
)
_COMMON_FIXED: dict[str, Any] = {
    **{"is_causal": True, "is_encoder_decoder": False, "add_cross_attention": False},
    **{"cross_attention_hidden_size": None, "pruned_heads": {}, "per_layer_config": None},
    **{"attention_bias": False, "mlp_bias": False, "partial_rotary_factor": 1.0},
}
_NEUTRAL = frozenset(
    {
        # Where the folder comes from, and what other programs make of it.
        *("architectures", "transformers_version", "_name_or_path", "name_or_path"),
        *("tokenizer_class", "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id"),
        *("decoder_start_token_id", "unk_token_id", "_attn_implementation_autoset"),
        *("attn_implementation", "experts_implementation", "unsloth_version", "unsloth_fixed"),
        # What else a call returns, and heads for other tasks.
        *("use_cache", "output_attentions", "output_hidden_states", "output_router_logits"),
        *("return_dict", "torchscript", "chunk_size_feed_forward", "tie_last_hidden_states"),
        *("id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "is_decoder"),
        *("tie_encoder_decoder", "use_bfloat16", "tf_legacy_loss", "pretraining_tp"),
        # Settings of generation, which older versions kept here.
        *("task_specific_params", "prefix", "max_length", "max_new_tokens", "min_length"),
        *("do_sample", "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty"),
        *("temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty"),
        *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids"),
        *("num_return_sequences", "output_scores", "return_dict_in_generate", "suppress_tokens"),
        *("forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values"),
        *("exponential_decay_length_penalty", "begin_suppress_tokens"),
    }
)
"""Keys without influence on the logits of any family, whatever their values."""


@dataclass(frozen=True)
class FamilyKeys:
    """The keys that a family knows.

    Attributes:
        required: Must have a value.
        present: Must be there and may be null, because transformers' own default is another.
        optional: Are read if they are there.
        fixed: Have the only supported value if they are there. An export writes them.
        training: Act in training alone, so that a value other than 0 is worth a note.
        neutral: Change no logit.
        aliases: Other names of keys.
    """

    required: tuple[str, ...]
    present: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)
    training: tuple[str, ...] = ()
    neutral: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)

    @property
    def read(self) -> frozenset[str]:
        """All keys that are read."""
        return _COMMON_READ | {*self.required, *self.present, *self.optional}

    @property
    def all_fixed(self) -> Mapping[str, Any]:
        """Keys that have one supported value, those of all families included."""
        return {**_COMMON_FIXED, **self.fixed}

    @property
    def without_influence(self) -> frozenset[str]:
        """Keys that change no logit, those of all families included."""
        return _NEUTRAL | {*self.training, *self.neutral}


_COMMON = (
    *("vocab_size", "num_hidden_layers", "hidden_size", "num_attention_heads"),
    *("intermediate_size", "rms_norm_eps"),
)
_ROTARY = ("max_position_embeddings", "rope_theta", "rope_parameters", "rope_scaling")
_LIKE_LLAMA: dict[str, Any] = {"hidden_act": "silu"}
_GROUPED = ("num_key_value_heads",)
_ROUTED = ("num_experts_per_tok", "moe_intermediate_size")
_DROPOUT = ("attention_dropout",)
_ROUTER_LOSS = ("router_aux_loss_coef",)
_QWEN = ("use_sliding_window", "sliding_window", "layer_types")
_DEEPSEEK = (
    *_COMMON,
    *_ROUTED,
    *("n_routed_experts", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
)
_DEEPSEEK_READ = (
    *_ROTARY,
    *("n_group", "topk_group", "first_k_dense_replace", "routed_scaling_factor"),
    *("norm_topk_prob", "head_dim", "qk_head_dim", "num_nextn_predict_layers"),
    "num_key_value_heads",
)
_DEEPSEEK_TRAINING = (*_DROPOUT, "aux_loss_alpha")
_DEEPSEEK_NEUTRAL = ("ep_size", "seq_aux")
_MTP_ALIAS = {"num_mtp_layers": "num_nextn_predict_layers"}
FAMILY_KEYS = {
    "gpt2": FamilyKeys(
        ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head"),
        optional=("n_inner", "layer_norm_epsilon"),
        fixed={
            "activation_function": "gelu_new",
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "reorder_and_upcast_attn": False,
        },
        training=("attn_pdrop", "embd_pdrop", "resid_pdrop"),
        neutral=(
            *("n_ctx", "summary_activation", "summary_first_dropout", "summary_proj_to_labels"),
            *("summary_type", "summary_use_proj"),
        ),
        aliases={
            **{"hidden_size": "n_embd", "num_hidden_layers": "n_layer"},
            **{"num_attention_heads": "n_head", "max_position_embeddings": "n_positions"},
        },
    ),
    "llama": FamilyKeys(_COMMON, (), (*_ROTARY, *_GROUPED, "head_dim"), _LIKE_LLAMA, _DROPOUT),
    "mistral": FamilyKeys(
        _COMMON,
        ("sliding_window", *_GROUPED),
        (*_ROTARY, "head_dim", "layer_types"),
        _LIKE_LLAMA,
        _DROPOUT,
    ),
    "ministral": FamilyKeys(
        _COMMON,
        ("sliding_window", *_GROUPED),
        (*_ROTARY, "head_dim", "layer_types"),
        _LIKE_LLAMA,
        _DROPOUT,
    ),
    "qwen2": FamilyKeys(
        _COMMON,
        _GROUPED,
        (*_ROTARY, *_QWEN, "max_window_layers", "head_dim"),
        {**_LIKE_LLAMA, "use_mrope": False},
        _DROPOUT,
    ),
    "qwen3": FamilyKeys(
        _COMMON,
        (*_GROUPED, "head_dim"),
        (*_ROTARY, *_QWEN, "max_window_layers"),
        _LIKE_LLAMA,
        _DROPOUT,
    ),
    "qwen3_moe": FamilyKeys(
        (*_COMMON, *_ROUTED, "num_experts"),
        _GROUPED,
        (*_ROTARY, *_QWEN, "head_dim", "norm_topk_prob"),
        {**_LIKE_LLAMA, "decoder_sparse_step": 1, "mlp_only_layers": []},
        (*_DROPOUT, *_ROUTER_LOSS),
        ("max_window_layers",),
        {"num_local_experts": "num_experts"},
    ),
    "mixtral": FamilyKeys(
        (*_COMMON, "num_local_experts", "num_experts_per_tok"),
        _GROUPED,
        (*_ROTARY, "head_dim", "layer_types", "sliding_window"),
        _LIKE_LLAMA,
        (*_DROPOUT, *_ROUTER_LOSS, "router_jitter_noise"),
        aliases={"num_experts": "num_local_experts"},
    ),
    "deepseek_v2": FamilyKeys(
        _DEEPSEEK,
        ("q_lora_rank", "n_shared_experts"),
        (*_DEEPSEEK_READ, "topk_method"),
        {**_LIKE_LLAMA, "scoring_func": "softmax", "moe_layer_freq": 1},
        _DEEPSEEK_TRAINING,
        _DEEPSEEK_NEUTRAL,
        {"num_experts": "n_routed_experts", **_MTP_ALIAS},
    ),
    "deepseek_v3": FamilyKeys(
        (
            *_DEEPSEEK,
            *("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"),
            *("norm_topk_prob", "routed_scaling_factor"),
        ),
        ("q_lora_rank", "num_key_value_heads"),
        _DEEPSEEK_READ,
        {
            **{**_LIKE_LLAMA, "scoring_func": "sigmoid", "moe_layer_freq": 1},
            **{"rope_interleave": True, "topk_method": "noaux_tc"},
        },
        _DEEPSEEK_TRAINING,
        _DEEPSEEK_NEUTRAL,
        {"num_local_experts": "n_routed_experts", **_MTP_ALIAS},
    ),
}
_PUBLISHED_CODE = {
    family: {
        f"Auto{kind}": f"{module}_deepseek.{name}{suffix}"
        for kind, module, suffix in (
            ("Config", "configuration", "Config"),
            ("Model", "modeling", "Model"),
            ("ModelForCausalLM", "modeling", "ForCausalLM"),
        )
    }
    for family, name in (("deepseek_v2", "DeepseekV2"), ("deepseek_v3", "DeepseekV3"))
}
"""`auto_map` of DeepSeek's own folders, whose code transformers has since taken over."""


def check_family_keys(family: str, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config of a family with the names under which its keys are read.

    Raises:
        UserError: For keys that are missing, that have a value which is not supported, or that are
            not known; with their values.
    """
    keys = FAMILY_KEYS[family]
    _refuse_foreign_code(family, config)
    if "quantization_config" in config:
        value = reprlib.repr(config["quantization_config"])
        raise UserError(
            f"{family}: quantization_config={value}: the weights are quantised, and only "
            "floating-point weights are read; save the model dequantised, without this key"
        )
    renamed = _rename_aliases(config, keys.aliases)
    missing = [key for key in keys.required if renamed.get(key) is None]
    missing += [key for key in keys.present if key not in renamed]
    if missing:
        raise UserError(f"{family}: {missing[0]} is missing")
    for key, value in keys.all_fixed.items():
        if renamed.get(key, value) != value:
            text = reprlib.repr(renamed[key])
            raise UserError(f"{family}: {key}={text} is not supported, only {value!r}")
    known = {*keys.read, *keys.all_fixed, *keys.without_influence, "auto_map"}
    if unknown := [key for key in renamed if key not in known]:
        named = ", ".join(
            f"{make_printable(key)}={make_printable(reprlib.repr(renamed[key]))}"
            for key in unknown[:_MAX_NAMED_KEYS]
        )
        more = f" and {len(unknown) - _MAX_NAMED_KEYS} more" * (len(unknown) > _MAX_NAMED_KEYS)
        raise UserError(
            f"{family}: {named}{more}: not known here, so the model may compute something else; "
            "remove from config.json what changes nothing in it"
        )
    return renamed


def list_training_keys(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each key of a checked config that acts in training alone and has a value
    other than 0."""
    for key in FAMILY_KEYS[config["model_type"]].training:
        if config.get(key):
            text = make_printable(reprlib.repr(config[key]))
            yield f"{key}={text} acts in training alone, and is not taken over"


def _rename_aliases(config: Mapping[str, Any], aliases: Mapping[str, str]) -> dict[str, Any]:
    renamed: dict[str, Any] = {}
    for key, value in config.items():
        name = aliases.get(key, key)
        if name in config and name != key and config[name] != value:
            text, other = reprlib.repr(value), reprlib.repr(config[name])
            raise UserError(f"{key}={text} and {name}={other} name the same; remove one of them")
        renamed[name] = value
    return renamed


def _refuse_foreign_code(family: str, config: Mapping[str, Any]) -> None:
    """Raise `UserError` if the config asks for code of the folder that may compute something
    else."""
    code = config.get("auto_map")
    published = _PUBLISHED_CODE.get(family, {}).items()
    if code is None or (isinstance(code, dict) and code.items() <= published):
        return
    raise UserError(
        f"{family}: auto_map={make_printable(reprlib.repr(code))} asks for code of the folder, "
        f"which is never run; remove it from config.json if {family} of transformers computes the "
        "same"
    )
