"""Hugging Face models: the logits are the same after an import and after an export."""

import json
import math
import re
from itertools import product
from pathlib import Path

import pytest
import torch
import yaml
from entry_runs import train
from slow_cases import mark_slow, slow
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tolerances import assert_near
from transformers_models import (
    assert_same_both_ways,
    assert_same_logits,
    compute_exact_logits,
    compute_logits,
    make_random_checkpoint,
    save_random_model,
)

from megaframe.architecture.window import list_windows
from megaframe.checkpoint import open_checkpoint
from megaframe.checkpoint.convert.huggingface import folder_export
from megaframe.checkpoint.convert.huggingface import model_folder as folders
from megaframe.checkpoint.convert.huggingface.families import FAMILIES, get_family
from megaframe.checkpoint.inspect import find_damage
from megaframe.config import ModelConfig
from megaframe.errors import UserError

pytestmark = pytest.mark.numeric

SHAPE = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "vocab_size": 61,
    "initializer_range": 0.3,
}
GROUPED = {**SHAPE, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}
LOCAL = {**GROUPED, "num_hidden_layers": 4, "sliding_window": 3}
SLIDES = {**LOCAL, "use_sliding_window": True}
FULL, LOCALLY = "full_attention", "sliding_attention"
EXPERTS = {"num_experts_per_tok": 2}
DEEPSEEK = {
    **{**SHAPE, **EXPERTS, "num_key_value_heads": 4, "moe_intermediate_size": 8},
    **{"n_routed_experts": 8, "n_shared_experts": 2, "first_k_dense_replace": 1},
    **{"kv_lora_rank": 10, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 5},
}
LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0},
    **{"high_freq_factor": 4.0, "original_max_position_embeddings": 16},
}
YARN = {
    **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32, "beta_slow": 1},
    **{"original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 1.0},
}
GROUPS = {**DEEPSEEK, "q_lora_rank": 12, "n_group": 4, "topk_group": 2}


def make_config(kind, **keys):
    """Return a function that makes a config of transformers, whose import takes seconds."""

    def config():
        import transformers

        return getattr(transformers, f"{kind}Config")(**keys)

    return config


MODELS = {
    "gpt2": make_config(
        "GPT2",
        **{"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 20, "vocab_size": 61},
        **{"initializer_range": 0.3, "bos_token_id": 0, "eos_token_id": 0},
    ),
    "llama": make_config("Llama", **GROUPED),
    "llama3": make_config("Llama", **GROUPED, rope_parameters=LLAMA3, tie_word_embeddings=True),
    "mistral": make_config("Mistral", **GROUPED, sliding_window=5),
    "ministral": make_config("Ministral", **LOCAL, layer_types=[FULL, LOCALLY, LOCALLY, FULL]),
    "qwen2": make_config("Qwen2", **GROUPED),
    "qwen2_last": make_config("Qwen2", **SLIDES, max_window_layers=3, tie_word_embeddings=True),
    "qwen3": make_config("Qwen3", **GROUPED),
    "qwen3_types": make_config("Qwen3", **SLIDES, layer_types=[LOCALLY, FULL, LOCALLY, FULL]),
    "qwen3_last": make_config("Qwen3", **SLIDES, max_window_layers=3),
    "qwen3_all": make_config("Qwen3", **SLIDES, max_window_layers=0),
    "qwen3_moe": make_config(
        "Qwen3Moe",
        **GROUPED,
        **EXPERTS,
        num_experts=6,
        moe_intermediate_size=12,
        norm_topk_prob=True,
    ),
    "qwen3_moe_all": make_config(
        "Qwen3Moe",
        **{**GROUPED, **EXPERTS, "num_experts": 6, "moe_intermediate_size": 12},
        **{"sliding_window": 3, "use_sliding_window": True},
    ),
    "gpt2_untied": make_config(
        "GPT2",
        **{"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 20, "vocab_size": 61},
        **{"initializer_range": 0.3, "tie_word_embeddings": False},
    ),
    "mixtral": make_config("Mixtral", **GROUPED, **EXPERTS, num_local_experts=4),
    "deepseek_v2": make_config(
        "DeepseekV2", **DEEPSEEK, q_lora_rank=None, n_group=1, topk_group=1, topk_method="greedy"
    ),
    "deepseek_v3": make_config("DeepseekV3", **GROUPS, rope_parameters=YARN),
    "deepseek_v3_eps": make_config("DeepseekV3", **GROUPS, rms_norm_eps=0.3),
    "deepseek_v3_shared": make_config("DeepseekV3", **{**GROUPS, "n_shared_experts": 0}),
}


def read_model(config):
    return get_family(config["model_type"]).read_model(config)


def save_model(name, path):
    """Save a random model of this kind to `path`, and return its logits."""
    return save_random_model(MODELS[name](), path)


QUICK = ("gpt2", "llama3", "ministral", "qwen2_last", "qwen3", "mixtral", "deepseek_v3")
"""Each kind of head, rotation, window, norm and feed-forward part."""


@pytest.mark.parametrize("name", mark_slow(MODELS, except_for=QUICK))
def test_logits_are_the_same_both_ways(name, tmp_path):
    expected_logits = save_model(name, tmp_path / "theirs")
    checkpoint = folders.import_model(tmp_path / "theirs", tmp_path / "checkpoints").checkpoint
    assert list(find_damage(checkpoint)) == []
    assert_same_logits(checkpoint, tmp_path / "theirs")
    with open_checkpoint(checkpoint) as opened:
        folders.export_model(opened, tmp_path / "again", "fp32")
    from transformers import AutoModelForCausalLM

    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert type(reloaded).__name__ == FAMILIES[reloaded.config.model_type].architecture
    assert torch.equal(compute_logits(reloaded.eval()), expected_logits)


SCALED = {**YARN, "mscale": None, "mscale_all_dim": None}
STRENGTHS = {
    "none": {},
    "mscale": {"mscale": 0.5},
    "all": {"mscale_all_dim": 0.7},
    "zero": {"mscale": 0.0, "mscale_all_dim": 0.7},
    "all_zero": {"mscale": 0.7, "mscale_all_dim": 0.0},
    "both": {"mscale": 2.0, "mscale_all_dim": 0.7},
    "factor": {"attention_factor": 1.3},
    "factor_first": {"attention_factor": 1.3, "mscale": 0.4, "mscale_all_dim": 0.7},
}
"""Keys on which YaRN's factors depend in transformers."""
YARN = {
    "Llama": GROUPED,
    "DeepseekV2": {**DEEPSEEK, "q_lora_rank": None},
    "DeepseekV3": GROUPS,
}
QUICK_YARN = [*product(["DeepseekV3"], ["zero", "both", "factor_first"]), ("Llama", "mscale")]


@pytest.mark.parametrize(
    ("kind", "strengths"), mark_slow(product(YARN, STRENGTHS), except_for=QUICK_YARN)
)
def test_yarn_has_the_same_factors_both_ways(kind, strengths, tmp_path):
    rope = {key: value for key, value in SCALED.items() if value is not None}
    config = make_config(kind, **YARN[kind], rope_parameters={**rope, **STRENGTHS[strengths]})()
    save_random_model(config, tmp_path / "theirs")
    assert_same_both_ways(tmp_path / "theirs", tmp_path)


def test_of_two_rotary_sections_the_one_that_transformers_takes_is_read(tmp_path):
    save_model("llama3", tmp_path / "theirs")
    scaling = {**LLAMA3, "factor": 2.0}
    del scaling["rope_theta"]
    change_config(tmp_path / "theirs", rope_scaling=scaling)
    checkpoint = folders.import_model(tmp_path / "theirs", tmp_path / "checkpoints").checkpoint
    assert_same_logits(checkpoint, tmp_path / "theirs")


OWN = {
    **{"layers": 2, "hidden": 32, "heads": 4, "vocab": 61, "ffn": 24},
    **{"norm": "rmsnorm", "activation": "swiglu", "norm_eps": 1e-6},
}
OWN_EXPERTS = {**OWN, "moe": {"experts": 4, "score": "softmax", "balance": "sequence"}}
LATENT = {"kv_rank": 10, "query_rank": 12, "head_dim": 6, "rotary_dim": 4, "value_dim": 5}
OWN_LATENT = {**OWN, "latent": LATENT, "moe": {"experts": 8, "first": 1, "shared": 1, "ffn": 8}}
OWN_MODELS = {
    "gpt2_untied": {
        **{**OWN, "norm": "layernorm", "activation": "gelu_tanh", "bias": True},
        **{"position": "learned", "positions": 64, "tie_embeddings": False},
    },
    "yarn_mscale": {
        **OWN,
        "rotary_scaling": {
            **{"kind": "yarn", "factor": 8, "original_length": 16, "high_frequency": 32},
            "mscale": 0.5,
        },
    },
    "mixtral_ffn": {**OWN, "moe": {**OWN_EXPERTS["moe"], "ffn": 16, "capacity": 0.5}},
    "qwen3_moe_ffn": {**OWN, "qk_norm": True, "moe": {**OWN_EXPERTS["moe"], "ffn": 16}},
    "deepseek_v2_ffn": {
        **OWN_LATENT,
        "moe": {**OWN_LATENT["moe"], "score": "softmax", "normalise": False, "balance": "none"},
    },
    "deepseek_v3": {**OWN_LATENT, "moe": {**OWN_LATENT["moe"], "balance": "bias"}},
    "deepseek_v3_sequence": {**OWN_LATENT, "moe": {**OWN_LATENT["moe"], "balance": "sequence"}},
    "deepseek_v3_eps": {**OWN_LATENT, "norm_eps": 0.1, "latent": {**LATENT, "norm_eps": 1e-6}},
    "deepseek_v3_alone": {**OWN_LATENT, "moe": {**OWN_LATENT["moe"], "shared": 0}},
    "deepseek_v3_groups": {
        **OWN_LATENT,
        "moe": {**OWN_LATENT["moe"], "groups": 4, "top_groups": 2, "group_best": 2},
    },
    "predictors": {**OWN, "mtp_depth": 1},
    "blocks": {
        **{**OWN, "layers": 4, "window": None},
        "blocks": [
            {"repeat": 2, "mixer": {"kind": "attention", "window": 3, "kv_heads": 2}},
            {"mixer": {"kind": "attention", "kv_heads": 2, "qk_norm": False}},
        ],
    },
    "expert_blocks": {
        **{**OWN_EXPERTS, "layers": 3, "heads": 2},
        "blocks": [
            {"mixer": {"heads": 4, "kv_heads": 2, "head_dim": 8}, "feed_forward": {"kind": "moe"}}
        ],
    },
}
FAMILY_OF = {
    **{"yarn_mscale": "llama", "predictors": "llama", "blocks": "ministral"},
    "expert_blocks": "mixtral",
}
"""Of those whose name does not begin with it."""


@pytest.mark.parametrize("name", OWN_MODELS)
def test_an_export_computes_the_same(name, tmp_path):
    checkpoint = make_random_checkpoint(tmp_path / "checkpoints", **OWN_MODELS[name])
    family = FAMILY_OF.get(name) or next(
        f for f in sorted(FAMILIES, reverse=True) if name.startswith(f)
    )
    with open_checkpoint(checkpoint) as opened:
        folders.export_model(opened, tmp_path / "theirs", tokenizer="none", family=family)
    assert_same_logits(checkpoint, tmp_path / "theirs")
    again = folders.import_model(tmp_path / "theirs", tmp_path / "again").checkpoint
    assert_same_logits(again, tmp_path / "theirs")


@pytest.mark.parametrize(
    ("family", "keys", "message"),
    [
        (
            "mixtral",
            {**OWN, "moe": {"experts": 4, "score": "softmax", "balance": "bias"}},
            "no mixtral of Hugging Face matches this config:\n  model.moe.balance='bias' would "
            "become 'none', and the bias takes part",
        ),
        (
            "qwen3_moe",
            {**OWN, "qk_norm": True, "moe": {**OWN_EXPERTS["moe"], "balance": "bias"}},
            "\n  model.moe.balance='bias' would become 'none'",
        ),
        (
            "deepseek_v2",
            {
                **OWN_LATENT,
                "moe": {**OWN_LATENT["moe"], "score": "softmax", "normalise": False},
            },
            "\n  model.moe.balance='bias' would become 'none'",
        ),
        (
            "deepseek_v3",
            {**OWN_LATENT, "norm_eps": 1e-5},
            "model.latent.norm_eps=1e-05 would become 1e-06; train with model.latent.norm_eps=1e-6",
        ),
        (
            "llama",
            {**OWN, "blocks": [{"mixer": {"softcap": 30.0}}, {}]},
            "layer 0: mixer.softcap=30.0 would become None",
        ),
        (
            "mixtral",
            {**OWN_EXPERTS, "blocks": [{"feed_forward": {"kind": "moe"}}, {}]},
            "layer 1: feed_forward.kind='mlp' would become 'moe'",
        ),
        (
            "mixtral",
            {**OWN_EXPERTS, "moe": {**OWN_EXPERTS["moe"], "scale": 1.5}},
            "moe.scale=1.5 would",
        ),
        ("deepseek_v3", OWN, "deepseek_v3: n_routed_experts is missing"),
    ],
)
def test_models_that_no_family_computes_are_refused(family, keys, message):
    with pytest.raises(UserError) as error:
        get_family(family).write_config(ModelConfig(**keys), 64)
    assert message in str(error.value)


def test_a_family_is_named_and_not_guessed(tmp_path):
    checkpoint = make_random_checkpoint(tmp_path / "checkpoints", **OWN)
    with open_checkpoint(checkpoint) as opened:
        with pytest.raises(
            UserError, match=r"needs --family; .*llama.*mistral.* computes the same"
        ):
            folders.export_model(opened, tmp_path / "theirs", tokenizer="none")
        with pytest.raises(
            UserError, match="model_type 'lama' is not a known family; the nearest are llama"
        ):
            folders.export_model(opened, tmp_path / "theirs", tokenizer="none", family="lama")
        folders.export_model(opened, tmp_path / "theirs", tokenizer="none", family="mistral")
    assert json.loads((tmp_path / "theirs/config.json").read_text())["model_type"] == "mistral"


@pytest.mark.parametrize(
    ("name", "window"),
    [
        ("llama", None),
        ("mistral", 5),
        ("ministral", (None, 3, 3)),
        ("qwen3", None),
        ("qwen3_types", (3, None)),
        ("qwen3_last", (None, None, None, 3)),
        ("qwen3_all", 3),
        ("qwen3_moe_all", 3),
    ],
)
def test_windows_are_the_shortest_pattern_of_their_layers(name, window):
    model = read_model(MODELS[name]().to_dict())
    assert model.window == window
    family = get_family(model.family)
    assert family.read_model(family.write_config(model, 64)).window == window
    repeated_model = model.model_copy(
        update={"window": (*list_windows(model), *list_windows(model))}
    )
    assert family.write_config(repeated_model, 64) == family.write_config(model, 64)


@pytest.mark.parametrize(
    ("family", "keys", "message"),
    [
        ("ministral", {"window": (3, 5)}, "layer 1: mixer.window=5 would become 3"),
        (
            "qwen3",
            {"window": (3, None, 5, None), "qk_norm": True},
            "layer 2: mixer.window=5 would become 3",
        ),
        ("mixtral", {"window": (3, None), "moe": {"experts": 4, "score": "softmax"}}, "become 3"),
        (
            "gpt2",
            {"window": 3, "norm": "layernorm", "position": "learned", "bias": True},
            "window=3 would become None",
        ),
    ],
)
def test_windows_that_no_family_has_are_refused(family, keys, message):
    shape = {"layers": 4, "hidden": 32, "heads": 4, "vocab": 61}
    with pytest.raises(UserError) as error:
        get_family(family).write_config(
            ModelConfig(**{**shape, "norm": "rmsnorm", "activation": "swiglu", **keys}), 64
        )
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("mistral", {"layer_types": [FULL, LOCALLY]}, "mistral: layer_types has full_attention in"),
        ("ministral", {"layer_types": [FULL]}, "has 1 layers, and num_hidden_layers is 4"),
        ("ministral", {"layer_types": ["chunked"] * 4}, "'chunked' is none of full_attention"),
        ("qwen3_types", {"use_sliding_window": False}, "there is no sliding_window for them"),
    ],
)
def test_layer_types_that_mean_nothing_here_are_refused(name, keys, message):
    with pytest.raises(UserError) as error:
        read_model({**MODELS[name]().to_dict(), **keys})
    assert message in str(error.value)


def test_large_models_are_several_files(tmp_path, monkeypatch):
    expected_logits = save_model("qwen3_moe", tmp_path / "theirs")
    for module in (folders, folder_export):
        monkeypatch.setattr(module, "FILE_BYTES", 10_000)
    monkeypatch.setattr(folders, "MAX_ENTRY_BYTES", 600)
    checkpoint = folders.import_model(tmp_path / "theirs", tmp_path / "checkpoints").checkpoint
    assert len(list(checkpoint.glob("*.safetensors"))) > 3
    with open_checkpoint(checkpoint) as opened:
        folders.export_model(opened, tmp_path / "again", "fp32")
    assert len(list((tmp_path / "again").glob("*.safetensors"))) > 3
    from transformers import AutoModelForCausalLM

    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert torch.equal(compute_logits(reloaded.eval()), expected_logits)
    once_more = folders.import_model(tmp_path / "again", tmp_path / "twice").checkpoint
    assert_same_logits(once_more, tmp_path / "again")


def change_config(folder, **keys):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"model_type": "xlnet"}, "model_type 'xlnet' is not a known family; known are gpt2"),
        ({"hidden_act": "gelu"}, "llama: hidden_act='gelu' is not supported, only 'silu'"),
        ({"attention_bias": True}, "model.layers.0.self_attn.q_proj.bias is missing"),
        ({"num_hidden_layers": 3}, "model.layers.2.input_layernorm.weight is missing"),
        ({"num_hidden_layers": 1}, "model.layers.1.input_layernorm.weight [32] has no counterpart"),
        ({"vocab_size": 60}, "model.embed_tokens.weight is [61, 32], not [60, 32]"),
        (
            {"rope_parameters": {"rope_type": "spiral"}},
            "rope_type 'spiral' is not one of default",
        ),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_written(keys, message, tmp_path):
    save_model("llama", tmp_path / "theirs")
    change_config(tmp_path / "theirs", **keys)
    with pytest.raises(UserError) as error:
        folders.import_model(tmp_path / "theirs", tmp_path / "checkpoints")
    assert message in str(error.value)
    assert not list(tmp_path.glob("checkpoints/*"))


def test_foreign_folders_do_no_harm(tmp_path):
    save_model("llama", tmp_path / "theirs")
    index = {"weight_map": {"model.norm.weight": "../elsewhere.safetensors"}}
    (tmp_path / "theirs/model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="no weight_map of file names"):
        folders.import_model(tmp_path / "theirs", tmp_path / "checkpoints")
    (tmp_path / "theirs/model.safetensors.index.json").unlink()
    (tmp_path / "theirs/model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(UserError, match="cannot read"):
        folders.import_model(tmp_path / "theirs", tmp_path / "checkpoints")
    (tmp_path / "theirs/config.json").write_text("[" * 100_000)
    with pytest.raises(UserError, match="is not JSON"):
        folders.import_model(tmp_path / "theirs", tmp_path / "checkpoints")


@pytest.mark.parametrize("name", ["qwen3", slow("llama3"), slow("deepseek_v3")])
def test_a_run_starts_with_imported_weights_and_its_export_has_the_tokenizer(
    name, tmp_path, corpus, pool, monkeypatch
):
    """The config beside an import needs nothing but data, wherever the run is started."""
    save_model(name, tmp_path / "theirs")
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(60)} | {"</s>": 60}, unk_token="w0"))
    words.save(str(tmp_path / "theirs/tokenizer.json"))
    settings = {"eos_token": "</s>"}
    (tmp_path / "theirs/tokenizer_config.json").write_text(json.dumps(settings))
    monkeypatch.chdir(tmp_path)
    imported = folders.import_model(Path("theirs"), Path("own"))
    assert imported.config_file == Path("own/config.yaml")
    run = {
        **{"run.dir": tmp_path / "run", "run.device": "cpu", "metrics.peak_tflops": 1.0},
        **{"train.steps": 1, "train.global_batch": 2, "train.microbatch": 1},
        **{"optim.lr": 1e-12, "optim.min_lr": 0, "checkpoint.every": 1},
        **{"data.sources": f"[{{path: {corpus}}}]", "kernels.matmul": "torch"},
    }
    overrides = [f"{key}={value}" for key, value in run.items()]
    config_file = tmp_path / imported.config_file
    pool.run(2, train, ["--config", str(config_file), *overrides])
    written = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
    assert written["train"]["seq"] == MODELS[name]().max_position_embeddings
    assert written["train"]["precision"] == "fp32"
    log = (tmp_path / "run/run.log").read_text()
    tensors = re.search(r"weights of (\S+): (\d+) tensors with ([\d,]+) parameters in (\w+), ", log)
    path, count, parameters, dtype = tensors.groups()
    assert Path(path) == tmp_path / imported.checkpoint and dtype == "float32"
    with open_checkpoint(imported.checkpoint) as opened:
        shapes = [tensor.shape for tensor in opened.tensors.values()]
    assert int(count) == len(shapes)
    assert int(parameters.replace(",", "")) == sum(map(math.prod, shapes))
    with open_checkpoint(tmp_path / "run/checkpoints/step-00000001") as opened:
        tokenizer = f"hf:{tmp_path / 'theirs/tokenizer.json'}"
        folders.export_model(opened, tmp_path / "again", tokenizer=tokenizer)
    from transformers import AutoTokenizer

    if name != "deepseek_v3":  # whose biases the step moves
        # The step is lost in fp32, or moves a logit by less than its rounding.
        actual, first = (compute_exact_logits(tmp_path / name) for name in ("again", "theirs"))
        assert_near(actual, first, 1, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "again")
    assert tokenizer.convert_tokens_to_ids(["w7", "w42"]) == [7, 42]


def test_an_import_overwrites_no_config(tmp_path):
    save_model("llama", tmp_path / "theirs")
    (tmp_path / "own").mkdir()
    (tmp_path / "own/config.yaml").write_text("of somebody")
    with pytest.raises(UserError, match=r"own/config.yaml already exists; remove it or give"):
        folders.import_model(tmp_path / "theirs", tmp_path / "own")
    assert [path.name for path in (tmp_path / "own").iterdir()] == ["config.yaml"]
