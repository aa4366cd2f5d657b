"""Of a model for texts and images the model for texts is imported, and computes the same."""

import json

import pytest
import torch
from family_configs import MODELS as FAMILY_MODELS
from tolerances import assert_near
from transformers_models import (
    SUMS,
    InFp64,
    compute_logits,
    compute_own_logits,
    load_exact,
    save_random_model,
)

from megaframe.checkpoint.convert.huggingface import model_folder as folders
from megaframe.checkpoint.convert.huggingface.nested_models import NESTED_MODELS, unwrap_config
from megaframe.errors import UserError

pytestmark = pytest.mark.numeric

TEXT = {
    **{"num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 24, "vocab_size": 61},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 5},
    **{"initializer_range": 0.3, "max_position_embeddings": 64, "pad_token_id": 0},
}
LAYERS_OF_GEMMA = {
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
TOWER = {
    **{"hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1, "image_size": 28},
    **{"num_attention_heads": 2, "patch_size": 14},
}
MODELS = {
    "gemma3": {
        "text_config": {**TEXT, **LAYERS_OF_GEMMA, "query_pre_attn_scalar": 20},
        "mm_tokens_per_image": 4,
    },
    "gemma4": {
        "text_config": {
            **{**TEXT, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True},
            **{"global_head_dim": 12, "num_global_key_value_heads": 1},
            "layer_types": LAYERS_OF_GEMMA["layer_types"],
            "use_bidirectional_attention": "vision",
        },
        "audio_config": None,
    },
    "llama4": {
        "text_config": {
            **{**{k: v for k, v in TEXT.items() if k != "sliding_window"}},
            **{"intermediate_size_mlp": 40, "num_local_experts": 4, "floor_scale": 4},
            **{"attention_chunk_size": 5, "no_rope_layer_interval": 3},
        },
    },
    "qwen3_5": {
        "text_config": {
            **{k: v for k, v in TEXT.items() if k != "sliding_window"},
            **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6},
            **{"linear_value_head_dim": 5, "full_attention_interval": 2},
        },
    },
    "qwen3_5_moe": {
        "text_config": {
            **{k: v for k, v in TEXT.items() if k not in ("sliding_window", "intermediate_size")},
            **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6},
            **{"linear_value_head_dim": 5, "full_attention_interval": 2, "num_experts": 4},
            **{"num_experts_per_tok": 2, "moe_intermediate_size": 12},
            "shared_expert_intermediate_size": 24,
        },
    },
    "mistral3": {"text_config": {**TEXT, "model_type": "mistral"}, "tie_word_embeddings": False},
}


@pytest.fixture
def save(tmp_path):
    """Return a function that saves a random model with towers, and returns its folder, the model
    and its logits in fp64."""

    def save_model(name):
        from transformers import AutoConfig, AutoModelForImageTextToText

        torch.manual_seed(1)
        config = AutoConfig.for_model(name, **MODELS[name], vision_config=TOWER)
        model = AutoModelForImageTextToText.from_config(config).eval()
        model.save_pretrained(tmp_path / "theirs")
        with InFp64():
            loaded = AutoModelForImageTextToText.from_pretrained(
                tmp_path / "theirs", dtype=torch.float64, experts_implementation="eager"
            )
            return tmp_path / "theirs", compute_logits(loaded.eval())

    return save_model


@pytest.mark.parametrize("name", MODELS)
def test_the_model_for_texts_computes_the_same(name, save, tmp_path):
    folder, expected_logits = save(name)
    imported = folders.import_model(folder, tmp_path / "own")
    assert expected_logits.dtype is torch.float64
    assert_near(compute_own_logits(imported.checkpoint), expected_logits, SUMS, sums=torch.float64)
    assert any("tensors of towers for images are left out" in note for note in imported.notes)


def test_every_model_is_compared():
    assert MODELS.keys() | {"gemma3n"} == NESTED_MODELS.keys()


def test_a_gemma3n_with_towers_and_keys_that_nothing_reads_computes_the_same(tmp_path):
    """Made of the model for texts, because its tower for images needs a library of its own. Its
    published folders have keys and values of layers that attend to those of others."""
    from safetensors.torch import load_file, save_file
    from transformers import AutoConfig

    config = AutoConfig.for_model("gemma3n_text", **FAMILY_MODELS["gemma3n_text"])
    save_random_model(config, tmp_path)
    with InFp64():
        expected_logits = compute_logits(load_exact(tmp_path))
    weights = load_file(tmp_path / "model.safetensors")
    names = {name: name.replace("model.", "model.language_model.", 1) for name in weights}
    weights = {names[name]: weight for name, weight in weights.items()}
    unread = torch.ones(32, 64)
    for part in ("k_proj", "v_proj"):
        weights[f"model.language_model.layers.3.self_attn.{part}.weight"] = unread.clone()
    weights |= {"model.vision_tower.a": unread.clone(), "model.embed_audio.b": unread.clone()}
    save_file(weights, tmp_path / "model.safetensors")
    section = json.loads((tmp_path / "config.json").read_text())
    outer = {"model_type": "gemma3n", "text_config": section, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    imported = folders.import_model(tmp_path, tmp_path / "own")
    assert_near(compute_own_logits(imported.checkpoint), expected_logits, SUMS, sums=torch.float64)


@pytest.mark.parametrize("name", NESTED_MODELS)
def test_what_a_section_leaves_out_is_what_its_class_has(name):
    from transformers import AutoConfig

    row = NESTED_MODELS[name]
    theirs = AutoConfig.for_model(name).text_config.to_dict()
    own = unwrap_config({"model_type": name, "text_config": {}})
    assert own == {**row.defaults, "model_type": row.text}
    assert {key: theirs[key] for key in own} == own


@pytest.mark.parametrize("section", [None, [], {"model_type": "qwen3"}])
def test_another_section_is_refused(section):
    with pytest.raises(UserError, match=r"^gemma3: text_config.* is not "):
        unwrap_config({"model_type": "gemma3", "text_config": section})


def test_a_tensor_that_is_no_tower_and_no_text_is_refused(save, tmp_path):
    from safetensors.torch import load_file, save_file

    folder, _ = save("mistral3")
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "audio_tower.weight": torch.ones(1)}, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"audio_tower.weight \[1\] has no counterpart"):
        folders.import_model(folder, tmp_path / "own")
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "mistral3" and not (tmp_path / "own").exists()
