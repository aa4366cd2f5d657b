"""Keys of a foreign config: each is read, changes nothing in transformers either, or is refused.

Tests `megaframe.checkpoint.convert.huggingface.family` and
`megaframe.checkpoint.convert.huggingface.key_pairs`.
"""

import dataclasses
import json
import shutil
from collections import Counter

import pytest
import torch
from family_configs import FALCON_MULTIPLIERS, MODELS, OTHERS, make_tiny_config
from slow_cases import slow
from small_model_folders import CONFIGS, write_small_folder
from transformers_models import assert_same_logits, compute_logits, load_whole, save_random_model

from megaframe.checkpoint.convert.huggingface import model_folder as folders
from megaframe.checkpoint.convert.huggingface.families import FAMILIES, get_family
from megaframe.checkpoint.convert.huggingface.model_facts import (
    describe_model,
    find_differences,
    start_facts,
)
from megaframe.errors import UserError

pytestmark = pytest.mark.numeric

YARN = {
    **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32, "beta_slow": 1},
    **{"original_max_position_embeddings": 16, "mscale": 0.9, "mscale_all_dim": 0.7},
}
SMALL = {
    "llama": {"rope_parameters": YARN},
    "ministral": {"layer_types": ["full_attention", "sliding_attention"], "num_hidden_layers": 2},
    "qwen2": {"sliding_window": 5, "use_sliding_window": True},
    "qwen3": {"sliding_window": 5, "max_window_layers": 1},
    "qwen3_moe": {"num_hidden_layers": 2, "mlp_only_layers": []},
    "gpt_oss": {"num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v2": {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    "deepseek_v3": {"rope_parameters": YARN},
}
"""What is changed in the tiny config of a family, so that more of its keys act."""
ROUNDING_ONLY = {"dtype", "torch_dtype", "chunk_size", "mamba_chunk_size"}
"""Keys that choose the type of the numbers, or in which order they are added, not what is
computed."""
_OF_PRODUCTS = {key for key, value in FALCON_MULTIPLIERS.items() if isinstance(value, float)}
FOLDED = {"logit_scale", "logits_scaling", "attention_value_scale", *_OF_PRODUCTS}
"""Keys whose factor is a part of our weights, which fp32 rounds unless it is a power of 2."""
MORE = {
    **{"is_causal": False, "partial_rotary_factor": 0.5, "original_max_position_embeddings": 8},
    **{"rope_theta": 100.0, "sliding_window": 3, "layer_types": ["full_attention"] * 2},
    **{"head_dim": 16, "qk_head_dim": 12, "logit_scale": 2.0, "num_experts": 2, "hidden_size": 64},
    **{"num_local_experts": 2, "attention_bias": True, "mlp_bias": True},
    "rope_scaling": {**YARN, "factor": 16.0},
}
"""Keys that a config may have beside those of its class."""


def read_model(config):
    return get_family(config["model_type"]).read_model(config)


def list_values(value):
    """Return other values for a key."""
    if isinstance(value, bool):
        return [not value, None]
    if isinstance(value, int):
        return [value + 1, 2 * value, None]
    if isinstance(value, float):
        return [2 * value + 0.1, value / 2, None]
    if isinstance(value, str):
        return ["x", None]
    if isinstance(value, list):
        return [None, [], value[::-1]]
    if isinstance(value, dict):
        changed = [{**value, key: v} for key in value for v in list_values(value[key])]
        return [None, *changed, *({k: v for k, v in value.items() if k != key} for key in value)]
    return [1, True, "x"]


def list_changed_configs(config, defaults):
    """Yield (key, change, config) for each key that is changed, added or left out.

    Args:
        config: The config.
        defaults: Values of keys that it may have.
    """
    values = {key: list_values(value) for key, value in {**defaults, **config}.items()}
    for key in FOLDED & values.keys():
        if config.get(key) is not None:
            values[key] = [4 * config[key], config[key] / 2, None]
    for key, value in MORE.items():
        values[key] = [*values.get(key, []), value]
    for key in sorted(values.keys() - {"model_type", *ROUNDING_ONLY}):
        for value in values[key]:
            if value != config.get(key):
                yield key, f"{key}={value}", {**config, key: value}
        yield key, f"without {key}", {k: v for k, v in config.items() if k != key}


def read_infinite(value):
    """Return a value of config.json with what transformers writes for numbers that JSON lacks."""
    if isinstance(value, list):
        return [read_infinite(each) for each in value]
    if not isinstance(value, dict):
        return value
    if [*value] == ["__float__"]:
        return float(value["__float__"])
    return {key: read_infinite(each) for key, each in value.items()}


@torch.no_grad()
def compute_their_logits(config, weights):
    """Return the logits that transformers computes; None if it cannot run such a model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        theirs = AutoConfig.for_model(**read_infinite(config))
        model = AutoModelForCausalLM.from_config(theirs, dtype=torch.float32).eval()
    except Exception:
        return None
    model.load_state_dict(weights)
    try:
        return compute_logits(model)
    except Exception:
        return None


def read_meaning(row, config):
    """Return what a row reads from a config."""
    model = row.read_model(config)
    return model.positions, row.read_scales(config), describe_model(model)


def is_same_meaning(meaning, other):
    return meaning[:2] == other[:2] and not find_differences(meaning[2], other[2])


def check_key(row, meaning, changed, weights, expected, folder):
    """Assert that a changed config is refused, or changes here what it changes in transformers,
    whose logits of the unchanged one, with this meaning, are `expected`. Returns which of them."""
    try:
        if is_same_meaning(meaning, read_meaning(row, changed)):
            logits = compute_their_logits(changed, weights)
            assert logits is None or torch.equal(logits, expected)
            return "without effect"
        (folder / "config.json").write_text(json.dumps(changed))
        imported = folders.import_model(folder, folder / "own")
    except UserError:
        return "refused"
    try:
        assert_same_logits(imported.checkpoint, folder)
    except Exception:
        if compute_their_logits(changed, weights) is None:
            return "not run"
        raise
    finally:
        shutil.rmtree(folder / "own")
    return "read"


SAMPLED = ("gpt2", "qwen3", "gemma3_text", "minimax_m2")
"""Families of which a few keys are tried in `make test`."""
SHARED = frozenset.intersection(*(row.without_influence for row in FAMILIES.values()))
"""Keys of which one list says for all families that they change no logit."""


def choose_changes(changes, number, step):
    """Return every `step`th change, of which a key has several, and of `SHARED` keys a quarter of
    these: rows share most of their keys, and what is left out of one is tried of the next.

    Args:
        changes: (key, change, config) of all.
        number: The row's place in the table.
    """
    own, shared = ([c for c in changes if (c[0] in SHARED) == is_shared] for is_shared in (0, 1))
    return [*own[number % step :: step], *shared[number % (4 * step) :: 4 * step]]


@pytest.mark.parametrize(
    ("family", "number", "step"),
    [
        *((family, 0, 12) for family in SAMPLED),
        *(slow(family, number, 2) for number, family in enumerate(FAMILIES)),
    ],
)
def test_every_key_is_read_or_changes_nothing_or_is_refused(family, number, step, tmp_path):
    import transformers

    transformers.logging.set_verbosity_error()
    keys = {**MODELS, **OTHERS}[family] | SMALL.get(family, {})
    start, row = transformers.AutoConfig.for_model(family, **keys), FAMILIES[family]
    save_random_model(start, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    weights = load_whole(tmp_path).state_dict()
    defaults = dict.fromkeys((*start.attribute_map, *row.types))
    for field in dataclasses.fields(start):
        defaults[field.name] = None if field.default is dataclasses.MISSING else field.default
    outcomes, expected = Counter(), compute_their_logits(config, weights)
    meaning = read_meaning(row, config)
    changes = [*list_changed_configs(config, defaults)]
    for _, change, changed in choose_changes(changes, number, step):
        try:
            outcomes[check_key(row, meaning, changed, weights, expected, tmp_path)] += 1
        except Exception as error:
            raise AssertionError(change) from error
    assert step > 2 or all(outcomes[kind] for kind in ("refused", "without effect", "read"))


BFLOAT16 = {"torch_dtype": "bfloat16", "transformers_version": "4.43.0", "use_cache": True}
LIKE_LLAMA = {
    **{**BFLOAT16, "attention_dropout": 0.0, "hidden_act": "silu", "initializer_range": 0.02},
    **{"bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False, "rope_theta": 1e6},
}
QWEN = {**LIKE_LLAMA, "rms_norm_eps": 1e-6, "use_sliding_window": False, "vocab_size": 151936}
PUBLISHED_DEEPSEEK = {
    **{**LIKE_LLAMA, "attention_bias": False, "rms_norm_eps": 1e-6, "rope_theta": 10000},
    **{"aux_loss_alpha": 0.001, "ep_size": 1, "moe_layer_freq": 1, "seq_aux": True},
    **{"pretraining_tp": 1, "max_position_embeddings": 163840, "kv_lora_rank": 512},
    **{"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "q_lora_rank": 1536},
    **{"num_attention_heads": 128, "num_key_value_heads": 128, "n_group": 8},
}
PUBLISHED_YARN = {
    **{"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0},
    **{"original_max_position_embeddings": 4096, "type": "yarn"},
}
PUBLISHED = {
    "gpt2": {
        **{"activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"]},
        **{"attn_pdrop": 0.1, "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256},
        **{"initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "model_type": "gpt2"},
        **{"n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024},
        **{"resid_pdrop": 0.1, "summary_activation": None, "summary_first_dropout": 0.1},
        **{"summary_proj_to_labels": True, "summary_type": "cls_index", "summary_use_proj": True},
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
        "vocab_size": 50257,
    },
    "Llama 3.1": {
        **{**LIKE_LLAMA, "architectures": ["LlamaForCausalLM"], "model_type": "llama"},
        **{"attention_bias": False, "mlp_bias": False, "pretraining_tp": 1, "hidden_size": 4096},
        **{"intermediate_size": 14336, "max_position_embeddings": 131072, "rope_theta": 5e5},
        **{"num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8},
        **{"rms_norm_eps": 1e-05, "vocab_size": 128256},
        "rope_scaling": {
            **{"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
            **{"original_max_position_embeddings": 8192, "rope_type": "llama3"},
        },
    },
    "Mistral": {
        **{**LIKE_LLAMA, "architectures": ["MistralForCausalLM"], "model_type": "mistral"},
        **{"hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768},
        **{"num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8},
        **{"rms_norm_eps": 1e-05, "sliding_window": 4096, "vocab_size": 32000},
    },
    "Ministral": {
        **{**LIKE_LLAMA, "architectures": ["MinistralForCausalLM"], "model_type": "ministral"},
        **{"hidden_size": 4096, "intermediate_size": 12288, "max_position_embeddings": 32768},
        **{"num_attention_heads": 32, "num_hidden_layers": 4, "num_key_value_heads": 8},
        **{"rms_norm_eps": 1e-05, "sliding_window": 32768, "vocab_size": 131072, "head_dim": 128},
        "layer_types": ["full_attention", *["sliding_attention"] * 3],
    },
    "Mixtral": {
        **{**LIKE_LLAMA, "architectures": ["MixtralForCausalLM"], "model_type": "mixtral"},
        **{"hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768},
        **{"num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8},
        **{"num_experts_per_tok": 2, "num_local_experts": 8, "output_router_logits": False},
        **{"rms_norm_eps": 1e-05, "router_aux_loss_coef": 0.02, "sliding_window": None},
        "vocab_size": 32000,
    },
    "Qwen2.5": {
        **{**QWEN, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
        **{"hidden_size": 3584, "intermediate_size": 18944, "max_position_embeddings": 131072},
        **{"max_window_layers": 28, "num_attention_heads": 28, "num_hidden_layers": 28},
        **{"num_key_value_heads": 4, "sliding_window": 131072, "use_mrope": False},
    },
    "Qwen3": {
        **{**QWEN, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
        **{"attention_bias": False, "head_dim": 128, "hidden_size": 4096, "rope_scaling": None},
        **{"intermediate_size": 12288, "max_position_embeddings": 40960, "sliding_window": None},
        **{"max_window_layers": 36, "num_attention_heads": 32, "num_hidden_layers": 36},
        "num_key_value_heads": 8,
    },
    "Qwen3 MoE": {
        **{**QWEN, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"},
        **{"attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128, "hidden_size": 2048},
        **{"intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48},
        **{"mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": True},
        **{"num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8},
        **{"num_hidden_layers": 48, "num_key_value_heads": 4, "output_router_logits": False},
        **{"rope_scaling": None, "router_aux_loss_coef": 0.001, "sliding_window": None},
    },
    "DeepSeek V2": {
        **{**PUBLISHED_DEEPSEEK, "architectures": ["DeepseekV2ForCausalLM"]},
        **{"model_type": "deepseek_v2", "first_k_dense_replace": 1, "hidden_size": 5120},
        **{"intermediate_size": 12288, "moe_intermediate_size": 1536, "n_routed_experts": 160},
        **{"n_shared_experts": 2, "norm_topk_prob": False, "num_experts_per_tok": 6},
        **{"num_hidden_layers": 60, "routed_scaling_factor": 16.0, "scoring_func": "softmax"},
        **{"topk_group": 3, "topk_method": "group_limited_greedy", "vocab_size": 102400},
        "rope_scaling": {**PUBLISHED_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        "auto_map": {
            "AutoConfig": "configuration_deepseek.DeepseekV2Config",
            "AutoModel": "modeling_deepseek.DeepseekV2Model",
            "AutoModelForCausalLM": "modeling_deepseek.DeepseekV2ForCausalLM",
        },
    },
    "DeepSeek V3": {
        **{**PUBLISHED_DEEPSEEK, "architectures": ["DeepseekV3ForCausalLM"]},
        **{"model_type": "deepseek_v3", "first_k_dense_replace": 3, "hidden_size": 7168},
        **{"intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256},
        **{"n_shared_experts": 1, "norm_topk_prob": True, "num_experts_per_tok": 8},
        **{"num_hidden_layers": 61, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid"},
        **{"topk_group": 4, "topk_method": "noaux_tc", "vocab_size": 129280},
        **{"rope_scaling": PUBLISHED_YARN, "num_nextn_predict_layers": 1},
    },
    "gpt-oss": {
        **{"architectures": ["GptOssForCausalLM"], "attention_bias": True, "head_dim": 64},
        **{"attention_dropout": 0.0, "eos_token_id": 200002, "experts_per_token": 4},
        **{"hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096},
        **{"initializer_range": 0.02, "intermediate_size": 2880, "model_type": "gpt_oss"},
        **{"layer_types": ["sliding_attention", "full_attention"] * 12, "num_hidden_layers": 24},
        **{"max_position_embeddings": 131072, "num_attention_heads": 64, "rms_norm_eps": 1e-05},
        **{"num_experts_per_tok": 4, "num_key_value_heads": 8, "num_local_experts": 32},
        **{"output_router_logits": False, "pad_token_id": 199999, "rope_theta": 150000},
        **{"router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0},
        **{"tie_word_embeddings": False, "use_cache": True, "vocab_size": 201088},
        "rope_scaling": {
            **{"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn"},
            **{"original_max_position_embeddings": 4096, "truncate": False},
        },
        "quantization_config": {
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
            "quant_method": "mxfp4",
        },
    },
    "Llama 4 Scout": {
        **{**LIKE_LLAMA, "attention_bias": False, "attention_chunk_size": 8192, "rope_theta": 5e5},
        **{"attn_scale": 0.1, "attn_temperature_tuning": 4, "cache_implementation": "hybrid"},
        **{"floor_scale": 8192, "for_llm_compressor": False, "head_dim": 128, "hidden_size": 5120},
        **{"interleave_moe_layer_step": 1, "intermediate_size": 8192, "num_key_value_heads": 8},
        **{"intermediate_size_mlp": 16384, "max_position_embeddings": 10485760},
        **{"model_type": "llama4_text", "no_rope_layers": [1, 1, 1, 0] * 12, "vocab_size": 202048},
        **{"num_attention_heads": 40, "num_experts_per_tok": 1, "num_hidden_layers": 48},
        **{"num_local_experts": 16, "output_router_logits": False, "pad_token_id": 200018},
        **{"rms_norm_eps": 1e-05, "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0},
        **{"moe_layers": [*range(48)], "use_qk_norm": True},
        "rope_scaling": {
            **{"factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0},
            **{"original_max_position_embeddings": 8192, "rope_type": "llama3"},
        },
    },
}
"""Keys and values of `config.json` as their publishers wrote them."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_read(name):
    model = read_model(PUBLISHED[name])
    assert model.layers == PUBLISHED[name].get("num_hidden_layers", 12)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"resid_scale": 2}, "llama: resid_scale=2: not known here, so the model may compute"),
        ({"a": [1], "b\x1b": None}, r"llama: a=[1], 'b\x1b'=None: not known here"),
        ({"is_causal": False}, "llama: is_causal=False is not supported, only True"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported, only 1.0"),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            "quantization_config={'quant_method': 'fp8'}: the weights are quantised, and only",
        ),
        (
            {"auto_map": {"AutoModelForCausalLM": "modeling_own.Own"}},
            "auto_map={'AutoModelForCausalLM': 'modeling_own.Own'} asks for code of the folder",
        ),
        (
            {"rope_scaling": {"rope_type": "default", "mscale": 2.0}},
            "rope_scaling.mscale=2.0 does not belong to rope_type='default'",
        ),
    ],
)
def test_nothing_in_a_config_is_ignored(keys, message):
    with pytest.raises(UserError) as error:
        read_model({**CONFIGS["llama"], **keys})
    assert message in str(error.value)


def test_two_names_of_one_key_agree():
    config = {**CONFIGS["mixtral"], "num_experts": CONFIGS["mixtral"]["num_local_experts"]}
    assert read_model(config).moe.experts == 4
    with pytest.raises(UserError, match="num_experts=3 and num_local_experts=4 name the same"):
        read_model({**config, "num_experts": 3})


WIDTHS = ("num_hidden_layers", "num_attention_heads", "qk_rope_head_dim", "qk_nope_head_dim")


class Recorded(dict):
    """Records which keys are read."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.keys_read = set()

    def get(self, key, default=None):
        self.keys_read.add(key)
        return super().get(key, default)

    def __getitem__(self, key):
        self.keys_read.add(key)
        return super().__getitem__(key)


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_is_read_is_in_the_list_of_keys(name):
    family = FAMILIES[PUBLISHED[name]["model_type"]]
    config = Recorded(family.check_keys(PUBLISHED[name]))
    facts = start_facts(2)
    facts.shared |= {"hidden": 8}
    facts.set("mixer.heads", 2)
    config |= {"num_hidden_layers": 2, "layer_types": None}  # not one fact for each real layer
    for key in family.keys:
        config.keys_read.clear()
        key.read(config, facts)
        assert config.keys_read <= {*key.types, *WIDTHS}


def test_what_acts_in_training_alone_is_noted(tmp_path):
    folder = write_small_folder(tmp_path / "theirs", "llama", attention_dropout=0.1)
    imported = folders.import_model(folder, tmp_path / "own")
    (note,) = imported.notes
    assert note == "attention_dropout=0.1 acts in training alone, and is not taken over"


@pytest.mark.parametrize("name", ["rope_parameters", "rope_scaling"])
def test_yarn_without_truncation_is_refused_where_transformers_does_not_read_it(name):
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    section = {**yarn, "truncate": False}
    section = {"full_attention": section} if name == "rope_parameters" else section
    config = {**make_tiny_config("olmo3"), "rope_parameters": None, name: section}
    with pytest.raises(UserError, match=r"full_attention\.truncate=False is not supported"):
        FAMILIES["olmo3"].read_model(config)
