"""Families of Hugging Face models: the logits are the same after an import and after an export.

Tests `megaframe.checkpoint.convert.huggingface.lfm2_families`,
`megaframe.checkpoint.convert.huggingface.llama4_families`,
`megaframe.checkpoint.convert.huggingface.deepseek_v4_families`,
`megaframe.checkpoint.convert.huggingface.delta_net_families`,
`megaframe.checkpoint.convert.huggingface.dense_families`,
`megaframe.checkpoint.convert.huggingface.falcon_families`,
`megaframe.checkpoint.convert.huggingface.gemma3n_families`,
`megaframe.checkpoint.convert.huggingface.gemma4_families`,
`megaframe.checkpoint.convert.huggingface.gpt_families`,
`megaframe.checkpoint.convert.huggingface.hunyuan_families`,
`megaframe.checkpoint.convert.huggingface.kimi_families`,
`megaframe.checkpoint.convert.huggingface.mimo_families`,
`megaframe.checkpoint.convert.huggingface.sparse_families`,
`megaframe.checkpoint.convert.huggingface.layered_families`,
`megaframe.checkpoint.convert.huggingface.mamba_families`,
`megaframe.checkpoint.convert.huggingface.mamba_keys`,
`megaframe.checkpoint.convert.huggingface.moe_families`,
`megaframe.checkpoint.convert.huggingface.moe_variants`,
`megaframe.checkpoint.convert.huggingface.older_families`,
`megaframe.checkpoint.convert.huggingface.tensor_names` and
`megaframe.checkpoint.convert.huggingface.tensors`.
"""

import json
from math import prod

import pytest
import torch
from family_configs import GLM_ROUTED, GROUPED, MODELS, OTHERS, make_tiny_config
from slow_cases import mark_slow, slow
from tolerances import assert_near
from transformers_models import (
    InFp64,
    assert_same_both_ways,
    assert_same_logits,
    make_random_checkpoint,
    save_random_model,
)

from megaframe.architecture.model_blocks import list_mixers
from megaframe.architecture.spec import count_active_parameters, count_parameters
from megaframe.architecture.streams import HyperConnectionDescription, StreamSumDescription
from megaframe.checkpoint import open_checkpoint
from megaframe.checkpoint.convert.huggingface import model_folder as folders
from megaframe.checkpoint.convert.huggingface.families import FAMILIES, get_family
from megaframe.checkpoint.convert.huggingface.match_tensors import SkippedTensors
from megaframe.checkpoint.convert.huggingface.model_facts import describe_model, find_differences
from megaframe.checkpoint.convert.huggingface.model_folder import export_model, import_model
from megaframe.checkpoint.convert.huggingface.rotary_keys import RotaryKeys
from megaframe.config import ModelConfig, TrainConfig
from megaframe.config.registry import Registry, use_registry
from megaframe.errors import UserError
from megaframe.extensions import load_named_extensions
from megaframe.model.model_chunk import list_model_specs
from megaframe.model.streams import HyperConnection, StreamSum

pytestmark = pytest.mark.numeric

FIRST = (
    "gemma2",
    "glm4",
    "cohere",
    "granitemoeshared",
    "gpt_oss",
    "qwen3_next",
    "opt",
    "phi",
    "nemotron_h",
    "deepseek_v4",
)
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
    assert_same_both_ways(tmp_path / "theirs", tmp_path)
    config = json.loads((tmp_path / "again/config.json").read_text())
    assert (config["model_type"], config["architectures"]) == (name, [FAMILIES[name].architecture])


def export_and_compare(checkpoint, tmp_path):
    """Assert that the export of a checkpoint computes the same, and its import again."""
    with open_checkpoint(checkpoint) as opened:
        folders.export_model(opened, tmp_path / "exported", "fp32", "none")
    assert_same_logits(checkpoint, tmp_path / "exported")
    again = folders.import_model(tmp_path / "exported", tmp_path / "again").checkpoint
    assert_same_logits(again, tmp_path / "exported")


@pytest.mark.parametrize("name", [slow("qwen3_5_moe_text"), slow("kimi_linear"), "olmo_hybrid"])
def test_a_folder_with_the_published_names_is_read(name, tmp_path):
    """What transformers saves of these families has other names."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(name, **MODELS[name])
    save_random_model(config, tmp_path / "theirs")
    checkpoint = folders.import_model(tmp_path / "theirs", tmp_path / "own").checkpoint
    export_and_compare(checkpoint, tmp_path)


@pytest.mark.slow
def test_a_delta_net_is_divided_into_queries_keys_and_values(tmp_path):
    """Of unequal widths, where transformers saves thirds of the convolution."""
    config = make_tiny_config("olmo_hybrid")
    config |= {"linear_value_head_dim": 7, "rope_parameters": {"rope_theta": 1e4}}
    model = FAMILIES["olmo_hybrid"].read_model(config).model_dump()
    export_and_compare(make_random_checkpoint(tmp_path / "own", **model), tmp_path)


@pytest.mark.parametrize(("pattern", "interval"), [("LLF", 3), ("LFF", None), ("LFL", 2)])
def test_an_interval_is_written_if_it_says_what_the_types_do(pattern, interval):
    """SGLang goes by it, and transformers by the types."""
    kinds = {"L": "linear_attention", "F": "full_attention"}
    config = {**make_tiny_config("qwen3_next"), "num_hidden_layers": 3}
    config |= {"layer_types": [kinds[letter] for letter in pattern]}
    model = FAMILIES["qwen3_next"].read_model(config)
    written = FAMILIES["qwen3_next"].write_config(model, 64)
    assert written.get("full_attention_interval") == interval


PUBLISHED = (
    "deepseek_v4",
    "gemma3n_text",
    "lfm3",
    "kimi_linear",
    "mimo_v2_flash",
    "olmo_hybrid",
    "qwen3_5_moe_text",
)
"""Families whose class has the sizes of a published model by default."""


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_size_has_the_parameters_of_its_class(name):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(name)
    with torch.device("meta"):
        expected = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    keys = {**json.loads(json.dumps(config.to_dict(), default=str)), "model_type": name}
    model = FAMILIES[name].read_model(keys)
    assert count_parameters(list_model_specs(model, TrainConfig())) == expected


def test_hyper_connections_are_those_of_deepseek_v4():
    """As transformers has them, of which no whole model is imported."""
    from transformers import DeepseekV4Config
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as theirs

    config = DeepseekV4Config(hidden_size=8, hc_mult=3, hc_sinkhorn_iters=4, rms_norm_eps=0.1)
    norm = {"norm_eps": 0.1, "init_std": 0.1}
    own = HyperConnection("own", HyperConnectionDescription(8, 3, 4, config.hc_eps, **norm))
    head = StreamSum("head", StreamSumDescription(8, 3, config.hc_eps, **norm))
    x, y = torch.randn(2, 5, 3, 8).double(), torch.randn(2, 5, 8).double()
    with InFp64(), torch.no_grad():
        half, last = theirs.DeepseekV4HyperConnection(config), theirs.DeepseekV4HyperHead(config)
        pairs = zip(
            (own.weight, own.bias, own.scale, head.weight, head.bias, head.scale),
            (half.fn, half.base, half.scale, last.hc_fn, last.hc_base, last.hc_scale),
            strict=True,
        )
        for parameter, values in pairs:
            parameter.value = values.normal_()
        write, mix, z = half(x)
        after = write.unsqueeze(-1) * y.unsqueeze(-2) + mix.mT @ x
        read, weights = own.read(x.reshape(10, 24))
        assert_near(read.view(z.shape), z, 24 + 9 * 8)
        written = own.write(x.reshape(10, 24), weights, y.reshape(10, 8))
        assert_near(written.view(after.shape), after, 24 + 9 * 8)
        assert_near(head(x.reshape(10, 24)).view(z.shape), last(x), 24 + 3)


FALCON_RW = {"multi_query": False, "alibi": True, "num_attention_heads": 16}
"""Half of the slopes of 16 heads are no powers of 2."""
NEW_FALCON = {"new_decoder_architecture": True, "num_kv_heads": 2, "parallel_attn": True}


@pytest.mark.parametrize(
    "keys",
    [
        NEW_FALCON,
        slow({**NEW_FALCON, "num_ln_in_parallel_attn": 1, "bias": True}),
        {**FALCON_RW, "parallel_attn": False, "bias": True},
    ],
)
def test_each_form_of_falcon_is_the_same_both_ways(keys, tmp_path):
    from transformers import AutoConfig

    config = AutoConfig.for_model("falcon", **{**MODELS["falcon"], **keys})
    save_random_model(config, tmp_path / "own")
    assert_same_both_ways(tmp_path / "own", tmp_path / "converted")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"parallel_attn": False}, "parallel_attn=False is not what new_decoder_architecture"),
        ({"num_ln_in_parallel_attn": 3}, "num_ln_in_parallel_attn=3 is not supported, only 1 and"),
        ({"alibi": True}, "alibi=True with 2 key heads for num_attention_heads=4 is not supported"),
        (
            {"new_decoder_architecture": False, "num_ln_in_parallel_attn": 2},
            "num_ln_in_parallel_attn=2 is not supported without new_decoder_architecture",
        ),
        (
            {"new_decoder_architecture": False, "multi_query": False},
            "num_kv_heads=2 is not supported with multi_query=False, only num_attention_heads=4",
        ),
    ],
)
def test_forms_of_falcon_that_code_cannot_compute_are_refused(keys, message):
    config = {"model_type": "falcon", **MODELS["falcon"], **NEW_FALCON, **keys}
    with pytest.raises(UserError, match=message):
        FAMILIES["falcon"].read_model(config)


def test_codegen_has_quarters_of_heads():
    with pytest.raises(UserError, match="n_head=6 is no multiple of 4, of which its code has"):
        FAMILIES["codegen"].read_model({"model_type": "codegen", **MODELS["codegen"], "n_head": 6})


@pytest.mark.parametrize(("length", "keys"), [(16, {}), (32, {"attention_factor": 1.3})])
def test_longrope_has_the_factors_of_the_samples_length(length, keys, tmp_path):
    """Samples of 18 tokens are long in one case and short in the other."""
    from transformers import AutoConfig

    factors = {"short_factor": [1.0, 1.5], "long_factor": [2.0, 9.0]}
    config = AutoConfig.for_model(
        "phi3",
        **{**GROUPED, "partial_rotary_factor": 0.5, "original_max_position_embeddings": length},
        rope_scaling={"type": "longrope", **factors, **keys},
    )
    save_random_model(config, tmp_path / "theirs")
    assert_same_both_ways(tmp_path / "theirs", tmp_path)


def test_dynamic_scaling_begins_after_the_longest_text(tmp_path):
    """Samples of 18 tokens are longer than what its config says, and texts are not."""
    from transformers import AutoConfig

    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    shape = {**GROUPED, "max_position_embeddings": 16, "rope_parameters": rope}
    save_random_model(AutoConfig.for_model("llama", **shape), tmp_path / "theirs")
    assert_same_both_ways(tmp_path / "theirs", tmp_path)
    other = {**rope, "original_max_position_embeddings": 8}
    config = {"model_type": "llama", "rms_norm_eps": 1e-6, **shape, "rope_parameters": other}
    with pytest.raises(UserError, match="embeddings=8 is not the length above which code scales"):
        FAMILIES["llama"].read_model(config)


def test_what_is_missing_or_null_is_what_transformers_makes_of_it():
    rope = {"rope_theta": 1e4, "rms_norm_eps": 1e-6}
    grouped = {**GROUPED, **GLM_ROUTED, **rope, "first_k_dense_replace": 1}
    del grouped["topk_group"]
    model = FAMILIES["glm4_moe"].read_model({**grouped, "model_type": "glm4_moe"})
    assert (model.moe.groups, model.moe.top_groups) == (4, 1)
    null = {**GROUPED, **rope, "model_type": "granite", "attention_multiplier": None}
    with pytest.raises(UserError, match="granite: attention_multiplier=None: input should be"):
        FAMILIES["granite"].read_model(null)


LFM2 = {
    **{"model_type": "lfm2", "vocab_size": 65536, "hidden_size": 2048, "num_hidden_layers": 16},
    **{"num_attention_heads": 32, "num_heads": 32, "num_key_value_heads": 8, "norm_eps": 1e-5},
    **{"block_dim": 2048, "block_ff_dim": 12288, "block_auto_adjust_ff_dim": True},
    **{"block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256, "block_norm_eps": 1e-5},
    **{"block_mlp_init_scale": 1.0, "block_out_init_scale": 1.0, "block_use_swiglu": True},
    **{"block_use_xavier_init": True, "conv_L_cache": 3, "conv_bias": False, "conv_dim": 2048},
    **{"conv_dim_out": 2048, "conv_use_xavier_init": True, "use_pos_enc": True},
    **{"full_attn_idxs": [2, 5, 8, 10, 12, 14], "rope_theta": 1e6, "tie_embedding": True},
}


def test_the_keys_of_lfm2_are_read_and_may_not_contradict():
    """Of LFM2 1.2B, with keys that transformers does not read, and its number of parameters."""
    model = FAMILIES["lfm2"].read_model(LFM2)
    mixers = [mixer.name for mixer in list_mixers(model)]
    attention = [layer for layer, name in enumerate(mixers) if name == "attention"]
    assert attention == LFM2["full_attn_idxs"] and len(mixers) == 16
    assert (model.ffn, model.tie_embeddings, model.head_dim) == (8192, True, 64)
    specs = list_model_specs(model, TrainConfig())
    assert sum(prod(spec.shape) for spec in specs) == 1_170_340_608
    with pytest.raises(UserError, match="conv_dim=1024 contradicts other keys, by which it is 204"):
        FAMILIES["lfm2"].read_model({**LFM2, "conv_dim": 1024})
    with pytest.raises(UserError, match="layer_types: 'mamba' is none of full_attention, conv"):
        FAMILIES["lfm2"].read_model({**LFM2, "layer_types": [*["conv"] * 15, "mamba"]})


MIMO = {
    **{"model_type": "mimo_v2_flash", "vocab_size": 152576, "hidden_size": 4096, "n_group": 1},
    **{"num_hidden_layers": 48, "num_attention_heads": 64, "num_key_value_heads": 4},
    **{"head_dim": 192, "v_head_dim": 128, "intermediate_size": 16384, "topk_group": 1},
    **{"moe_intermediate_size": 2048, "n_routed_experts": 256, "num_experts_per_tok": 8},
    **{"attention_value_scale": 0.707, "sliding_window": 128, "sliding_window_size": 128},
    **{"partial_rotary_factor": 0.334, "rope_theta": 5000000, "swa_rope_theta": 10000},
    **{"swa_num_attention_heads": 64, "swa_num_key_value_heads": 8, "swa_head_dim": 192},
    **{"swa_v_head_dim": 128, "moe_layer_freq": [0, *[1] * 47], "layernorm_epsilon": 1e-5},
    **{"hybrid_layer_pattern": [int(n > 0 and n % 6 != 5) for n in range(48)]},
    **{"add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False},
    **{"n_shared_experts": None, "routed_scaling_factor": None, "scoring_func": "sigmoid"},
}


def test_the_keys_of_mimo_are_read_and_may_not_contradict():
    """Of MiMo-V2-Flash, with keys that transformers does not read, and its 309B parameters, of
    which a token uses 15B."""
    model = FAMILIES["mimo_v2_flash"].read_model(MIMO)
    mixers = list_mixers(model)
    assert [mixer.kv_heads for mixer in mixers[:7]] == [4, 8, 8, 8, 8, 4, 8]
    assert [mixer.window for mixer in mixers[:2]] == [None, 129]
    assert [mixer.has_sinks for mixer in mixers[:2]] == [False, True]
    assert {(mixer.head_dim, mixer.value_dim, mixer.rotary.width) for mixer in mixers} == {
        (192, 128, 64)
    }
    specs = list_model_specs(model, TrainConfig())
    assert round(count_parameters(specs) / 1e9) == 309
    assert round(count_active_parameters(specs) / 1e9) == 15
    with pytest.raises(UserError, match=r"partial_rotary_factor=0\.5 contradicts other keys, by"):
        FAMILIES["mimo_v2_flash"].read_model({**MIMO, "partial_rotary_factor": 0.5})
    with pytest.raises(UserError, match="swa_num_key_value_heads=4 contradicts other keys, by"):
        FAMILIES["mimo_v2_flash"].read_model({**MIMO, "swa_num_key_value_heads": 4})


KIMI = {
    **{"model_type": "kimi_linear", "vocab_size": 163840, "hidden_size": 2304, "head_dim": 72},
    **{"num_hidden_layers": 27, "num_attention_heads": 32, "num_key_value_heads": 32},
    **{"kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "v_head_dim": 128},
    **{"qk_rope_head_dim": 64, "intermediate_size": 9216, "moe_intermediate_size": 1024},
    **{"num_experts": 256, "num_experts_per_token": 8, "num_shared_experts": 1, "topk_group": 1},
    **{"num_expert_group": 1, "moe_renormalize": True, "routed_scaling_factor": 2.446},
    **{"first_k_dense_replace": 1, "moe_router_activation_func": "sigmoid", "moe_layer_freq": 1},
    **{"rms_norm_eps": 1e-5, "mla_use_nope": True, "rope_theta": 10000.0, "rope_scaling": None},
    "linear_attn_config": {
        **{"head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4},
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "kda_layers": [n for n in range(1, 27) if n % 4],
    },
}


def test_the_section_of_kimi_is_read_and_names_each_layer_once():
    """Of Kimi Linear, with its 48B parameters, of which a token uses 3B."""
    family = FAMILIES["kimi_linear"]
    model = family.read_model(KIMI)
    mixers = list_mixers(model)
    assert [n + 1 for n, m in enumerate(mixers) if m.name == "attention"] == [*range(4, 28, 4), 27]
    assert mixers[3].rotary is None and mixers[0].decay_rank == 128
    specs = list_model_specs(model, TrainConfig())
    assert round(count_parameters(specs) / 1e9) == 49
    assert round(count_active_parameters(specs) / 1e9) == 3
    section = {**KIMI["linear_attn_config"], "kda_layers": [1, 2, 3]}
    with pytest.raises(UserError, match=r"kda_layers=\[1, 2, 3\] are not all of the layers 1"):
        family.read_model({**KIMI, "linear_attn_config": section})


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"block_multiple_of": 7},
        {"block_ffn_dim_multiplier": 1.3, "block_multiple_of": 10},
        {"block_auto_adjust_ff_dim": False},
        {"block_ff_dim": 47, "block_multiple_of": 1},
    ],
)
def test_a_width_is_adjusted_as_transformers_does(keys):
    from transformers import Lfm2Config
    from transformers.models.lfm2.modeling_lfm2 import Lfm2MLP

    config = {**GROUPED, "intermediate_size": 100, **keys}
    expected = Lfm2MLP(Lfm2Config(**config)).w1.out_features
    assert FAMILIES["lfm2"].read_model({**config, "model_type": "lfm2"}).ffn == expected


@pytest.mark.parametrize(
    ("family", "keys", "message"),
    [
        ("glm_moe_dsa", {"indexer_types": ["shared", *["full"] * 3]}, "layer 0 is shared, and no"),
        ("glm_moe_dsa", {"indexer_types": ["full", *["other"] * 3]}, "none of full, shared"),
        ("glm_moe_dsa", {"indexer_types": None, "index_topk_pattern": "F"}, "has 1 layers"),
        ("glm_moe_dsa", {"indexer_rope_interleave": False}, "False is not supported, only True"),
        ("deepseek_v32", {"indexer_rope_interleave": True}, "True is not supported, only False"),
        ("deepseek_v32", {"layer_types": ["full_attention"] * 2}, "is none of indexed_attention"),
        ("deepseek_v32", {"index_topk": None}, "index_topk is missing"),
    ],
)
def test_forms_of_sparse_attention_that_are_not_here_are_refused(family, keys, message):
    with pytest.raises(UserError) as error:
        FAMILIES[family].read_model({**make_tiny_config(family), **keys})
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("keys", "own"),
    [
        ({"indexer_types": ["full", "shared", "full", "full"]}, [True, False, True, True]),
        ({"index_topk_pattern": "FSSF"}, [True, False, False, True]),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 1}, [True, False, True, False]),
        ({"index_topk_freq": 3}, [True, True, False, False]),
        ({}, [True] * 4),
    ],
)
def test_layers_with_indexers_of_their_own_are_listed_in_each_form(keys, own):
    """As the published code does: a list, a pattern, or an interval from a layer on."""
    row, config = FAMILIES["glm_moe_dsa"], make_tiny_config("glm_moe_dsa")
    config.pop("indexer_types")
    model = row.read_model({**config, **keys})
    pattern = [block for block in model.blocks or [] for _ in range(block.repeat)]
    shares = [pattern[layer % len(pattern)].mixer.shared_indexer for layer in range(4) if pattern]
    assert [not each for each in shares or [False] * 4] == own
    written = row.write_config(model, 64)
    assert written["indexer_types"] == ["full" if each else "shared" for each in own]


def test_dense_attention_beside_an_indexer_is_not_exported():
    """It is a stage of training. The loss is another, and no logit depends on it."""
    family = FAMILIES["deepseek_v32"]
    model = family.read_model(make_tiny_config("deepseek_v32"))
    trained = model.indexer.model_copy(update={"loss": 0.5})
    family.write_config(model.model_copy(update={"indexer": trained}), 64)
    dense = trained.model_copy(update={"dense": True})
    with pytest.raises(UserError, match=r"indexer.dense=True .*; train with .*dense=false"):
        family.write_config(model.model_copy(update={"indexer": dense}), 64)


GEMMA4 = {
    "model_type": "gemma4_text",
    **{k: v for k, v in MODELS["gemma4_text"].items() if k not in ("pad_token_id",)},
    **{"use_bidirectional_attention": "vision", "num_kv_shared_layers": 0},
}


GEMMA4_EXPERTS = {
    **{"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 8},
    "hidden_size": 16,  # by whose root fp32 divides exactly
}


GEMMA4_INPUTS = {"hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": 61}
GEMMA4_SHARING = {
    **{**GEMMA4_INPUTS, "num_kv_shared_layers": 2, "use_double_wide_mlp": True},
}


def test_heads_of_gemma4_are_those_of_each_type_of_layers():
    family = FAMILIES["gemma4_text"]
    mixers = list_mixers(family.read_model(GEMMA4))
    sizes = [(mixer.head_dim, mixer.kv_heads, mixer.keys_as_values) for mixer in mixers]
    assert sizes == [(8, 2, False), (12, 1, True)] * 2
    apart = list_mixers(family.read_model({**GEMMA4, "attention_k_eq_v": False}))
    assert [(mixer.head_dim, mixer.kv_heads) for mixer in apart] == [(8, 2), (12, 2)] * 2
    ends = list_mixers(family.read_model({**GEMMA4, "layer_types": ["sliding_attention"] * 4}))
    assert [mixer.window for mixer in ends] == [5, 5, 5, None]
    own = {"per_layer_config": {"0": {"head_dim": 6}}}
    assert [m.head_dim for m in list_mixers(family.read_model(GEMMA4 | own))] == [6, 8, 8, 8]
    more = {
        "num_hidden_layers": 11,
        "layer_types": None,
        "per_layer_config": {"05": own["per_layer_config"]["0"]},
    }
    assert [m.head_dim for m in list_mixers(family.read_model(GEMMA4 | more))][4:7] == [8, 6, 8]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"hidden_size_per_layer_input": 4},
            "vocab_size_per_layer_input=262144 is not supported beside vocab_size=61",
        ),
        ({"hidden_size_per_layer_input": None}, "hidden_size_per_layer_input is missing"),
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers=4 leaves none of num_hidden_layers=4"),
        ({"enable_moe_block": True}, "num_experts is missing, and enable_moe_block=true needs it"),
        (
            {**GEMMA4_EXPERTS, "moe_intermediate_size": 7},
            "intermediate_size=24 is no multiple of moe_intermediate_size=7",
        ),
        ({"use_bidirectional_attention": "all"}, "'all' is not supported, only None and 'vision'"),
        ({"per_layer_config": {"4": {}}}, "per_layer_config names no layer with '4'"),
        ({"per_layer_config": {"0": {"window": 3}}}, "per_layer_config"),
    ],
)
def test_forms_of_gemma4_that_are_not_here_are_refused(keys, message):
    with pytest.raises(UserError, match=message):
        FAMILIES["gemma4_text"].read_model({**GEMMA4, **keys})


NO_EXPERTS = {"num_local_experts": 0, "num_experts_per_tok": 0, "position_embedding_type": "rope"}


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("granitemoehybrid", {**NO_EXPERTS, "mamba_proj_bias": True, "attention_bias": True}),
        slow("nemotron_h", {"hybrid_override_pattern": "M-*-M", "n_routed_experts": 4}),
        slow("mamba2", {"tie_word_embeddings": True, "use_bias": False, "use_conv_bias": False}),
        slow("bamba", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}}),
        slow("falcon_h1", {"mamba_rms_norm": False, "mamba_conv_bias": False}),
        slow("gemma4_text", {"attention_k_eq_v": False, "attention_bias": True}),
        slow("gemma4_text", GEMMA4_EXPERTS),
        ("gemma4_text", {**GEMMA4_EXPERTS, **GEMMA4_SHARING}),
        ("gemma4_text", GEMMA4_SHARING),
        slow("gemma4_text", {**GEMMA4_SHARING, "attention_k_eq_v": False}),
        slow("gemma4_text", GEMMA4_INPUTS),
        slow("falcon_h1", {"mamba_norm_before_gate": False, "tie_word_embeddings": True}),
    ],
)
def test_each_form_of_a_family_is_the_same_both_ways(name, keys, tmp_path):
    from transformers import AutoConfig

    config = AutoConfig.for_model(name, **{**MODELS[name], **keys})
    save_random_model(config, tmp_path / "theirs")
    assert_same_both_ways(tmp_path / "theirs", tmp_path)


def test_steps_have_the_range_of_a_text_read_at_once(tmp_path):
    """Where one token follows the other, transformers' plain code has no range."""
    from transformers import AutoConfig

    config = AutoConfig.for_model("bamba", **MODELS["bamba"], time_step_limit=[0.5, 0.6])
    save_random_model(config, tmp_path / "theirs")
    checkpoint = import_model(tmp_path / "theirs", tmp_path / "own").checkpoint
    assert_same_logits(checkpoint, tmp_path / "theirs")
    with open_checkpoint(checkpoint) as opened:
        export_model(opened, tmp_path / "again", "fp32")
    assert_same_logits(checkpoint, tmp_path / "again")


def read_hybrid(name, **keys):
    eps = {} if name in ("mamba2", "nemotron_h") else {"rms_norm_eps": 1e-5}
    config = {**eps, "model_type": name, **MODELS[name], **keys}
    return FAMILIES[name].read_model({k: v for k, v in config.items() if v is not ...})


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("bamba", {"mamba_d_head": 3}, "mamba_n_heads=6 times mamba_d_head=3 is not mamba_expand="),
        ("bamba", {"time_step_limit": [0.1]}, "time_step_limit=.* at least 2 items"),
        (
            "falcon_h1",
            {"mamba_d_ssm": 12, "mamba_d_head": 3},
            "d_head=3 is not mamba_d_ssm=12",
        ),
        ("falcon_h1", {"ssm_multipliers": [1.0]}, "ssm_multipliers=.* at least 5 items"),
        ("falcon_h1", {"key_multiplier": 0.0}, "key_multiplier=0.0"),
        ("mamba2", {"expand": 2}, "num_heads=6 times head_dim=16 is not expand=2 times the width"),
        (
            "granitemoehybrid",
            {"shared_intermediate_size": 30},
            "shared_intermediate_size=30 is no multiple of intermediate_size=24",
        ),
        (
            "nemotron_h",
            {"hybrid_override_pattern": "MX"},
            r"hybrid_override_pattern: 'X' is none of M, \*, -, E",
        ),
        ("nemotron_h", {"hybrid_override_pattern": ...}, "hybrid_override_pattern is missing"),
        ("nemotron_h", {"n_routed_experts": ...}, "n_routed_experts is missing"),
        ("nemotron_h", {"moe_latent_size": 8}, "moe_latent_size=8 is not supported, only None"),
    ],
)
def test_forms_of_mamba2_that_code_cannot_compute_are_refused(name, keys, message):
    with pytest.raises(UserError, match=message):
        read_hybrid(name, **keys)


def test_infinity_has_the_names_of_each_version():
    for largest in (float("inf"), {"__float__": "Infinity"}):
        model = read_hybrid("bamba", time_step_limit=[0.1, largest])
        assert (model.blocks[0].mixer.step_min, model.blocks[0].mixer.step_max) == (0.1, None)


def test_a_layer_with_two_halves_is_no_nemotron_h():
    model = read_hybrid("bamba")
    with pytest.raises(UserError, match="layer 0 has two halves, and those of the family have one"):
        FAMILIES["nemotron_h"].write_config(model, 64)
    with pytest.raises(UserError, match="no layer has Mamba-2, without which the family's code"):
        FAMILIES["bamba"].write_config(ModelConfig(vocab=61), 64)


def test_a_second_mixer_is_in_no_other_family():
    model = ModelConfig(vocab=61, blocks=[{"second_mixer": "mamba2"}], norm="rmsnorm")
    with pytest.raises(UserError, match=r"second_mixer\.kind='mamba2' would become None"):
        FAMILIES["llama"].write_config(model, 64)


def test_the_sum_of_two_mixers_has_no_order():
    mamba = {"kind": "mamba2", "norm": "none", "convolution_bias": False}
    shared = {"vocab": 61, "norm": "rmsnorm", "activation": "swiglu", "position": "rotary"}
    orders = [{"second_mixer": mamba}, {"mixer": mamba, "second_mixer": {"kind": "attention"}}]
    models = [ModelConfig(**shared, blocks=[block]) for block in orders]
    assert not find_differences(*map(describe_model, models))
    configs = [FAMILIES["falcon_h1"].write_config(model, 64) for model in models]
    assert configs[0] == configs[1] and configs[0]["mamba_rms_norm"] is False


def test_predictors_beside_the_layers_are_left_out_and_said():
    skipped = SkippedTensors(FAMILIES["qwen3_next"], head=False, layers=range(4, 4))
    assert skipped.covers("mtp.fc.weight") and not skipped.covers("model.norm.weight")
    (line,) = skipped.describe(["mtp.fc.weight", "mtp.norm.weight", "model.norm.weight"])
    assert line.startswith("2 tensors of mtp. are left out: they predict further tokens")
