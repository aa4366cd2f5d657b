"""Exports that are served: what vLLM and SGLang read in a folder is there.

Tests `megaframe.checkpoint.convert.huggingface.tokenizer_settings` and the keys of all families.
"""

import json
from pathlib import Path

import pytest
import tokenizers
from family_configs import make_tiny_config
from small_model_folders import write_small_folder

from megaframe.checkpoint import open_checkpoint
from megaframe.checkpoint.convert.huggingface import model_folder as folders
from megaframe.checkpoint.convert.huggingface.families import FAMILIES
from megaframe.checkpoint.convert.huggingface.tokenizer_settings import read_tokenizer_settings
from megaframe.errors import UserError

SERVED = json.loads((Path(__file__).parent / "serving_keys.json").read_text())["families"]
TOKENS = {"bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype"}
"""What an export adds to the keys of its family."""
NOT_SERVED = {
    *("gpt_neo", "ministral", "helium", "solar_open", "dots1", "codegen", "mpt", "bamba"),
    *("mistral4", "lfm3", "deepseek_v4"),
}
"""Families that neither of them has, or under another class alone, or whose class reads the section
of quantised weights always, as that of DeepSeek-V4 does (`quantization_config["scale_fmt"]`)."""


def test_every_family_is_listed():
    assert SERVED.keys() | NOT_SERVED == FAMILIES.keys() and not SERVED.keys() & NOT_SERVED


@pytest.mark.parametrize("family", SERVED)
def test_an_export_has_all_keys_that_servers_read(family):
    row = FAMILIES[family]
    model = row.read_model(make_tiny_config(family))
    written = row.write_config(model, model.positions or 64)
    for server, keys in SERVED[family].items():
        assert {*keys} <= {*written} | TOKENS, server


@pytest.mark.parametrize(
    ("family", "key", "value", "message"),
    [
        ("hy_v3", "expert_hidden_dim", 7, "expert_hidden_dim=7 contradicts other keys, by which"),
        ("hy_v3", "first_k_dense_replace", 2, "first_k_dense_replace=2 contradicts other keys"),
        ("exaone_moe", "is_moe_layer", [True] * 4, "by which it is [False, True, True, True]"),
        ("minimax_m2", "rotary_dim", 4, "rotary_dim=4 contradicts partial_rotary_factor, by which"),
        ("minimax_m2", "attn_type_list", [1, 0], "attn_type_list=[1, 0] is not supported, only 1"),
        ("minimax_m2", "use_qk_norm", False, "use_qk_norm=False is not supported, only True"),
    ],
)
def test_keys_of_servers_may_not_contradict(family, key, value, message):
    with pytest.raises(UserError) as error:
        FAMILIES[family].read_model({**make_tiny_config(family), key: value})
    assert message in str(error.value)


def test_a_rotated_width_is_a_share():
    config = make_tiny_config("minimax_m2")
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4}
    model = FAMILIES["minimax_m2"].read_model({**config, "rotary_dim": 4})
    assert model.rotary_fraction == 4 / config["head_dim"]


TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
WORDS = {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2, "<pad>": 3, "a": 4}


@pytest.fixture
def trained(tmp_path):
    """Return a checkpoint, and the folder of a chat model's tokenizer."""
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(WORDS, unk_token="a"))
    model.add_special_tokens([*WORDS][:4])
    model.save(str(folder / "tokenizer.json"))
    settings = {
        **{"bos_token": None, "eos_token": {"content": "<|im_end|>"}, "pad_token": "<pad>"},
        **{"chat_template": TEMPLATE, "tokenizer_class": "Own", "auto_map": {"a": "b.C"}},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    generation = {"eos_token_id": [2, 0, 999999], "temperature": 0.7, "top_k": "5", "x": 1}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    theirs = write_small_folder(tmp_path / "theirs")
    return folders.import_model(theirs, tmp_path / "own").checkpoint, folder


def export(checkpoint, to, tokenizer):
    with open_checkpoint(checkpoint) as opened:
        return folders.export_model(opened, to, tokenizer=f"hf:{tokenizer}/tokenizer.json")


def test_what_serves_a_chat_lies_in_the_export(trained, tmp_path):
    assert export(*trained[:1], tmp_path / "out", trained[1]) == []
    read = {file.name: file.read_text() for file in (tmp_path / "out").glob("*.j*")}
    config, settings, generation = (
        json.loads(read[f"{name}.json"])
        for name in ("config", "tokenizer_config", "generation_config")
    )
    ids = {"bos_token_id": None, "eos_token_id": 2, "pad_token_id": 3}
    assert config.items() >= {**ids, "dtype": "float32", "torch_dtype": "float32"}.items()
    assert generation == {"eos_token_id": [2, 0], "pad_token_id": 3, "temperature": 0.7}
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast" and "auto_map" not in settings
    assert settings["chat_template"] == read["chat_template.jinja"] == TEMPLATE
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(tmp_path / "out")
    text = loaded.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    assert text == "<|im_start|>a<|im_end|>" and loaded.eos_token_id == 2


def test_no_link_is_followed_and_nothing_large_is_copied(trained, tmp_path):
    checkpoint, folder = trained
    (tmp_path / "secret").write_text("secret")
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.jinja").symlink_to(tmp_path / "secret")
    (note,) = export(checkpoint, tmp_path / "out", folder)
    assert note.startswith("chat_template.jinja: not exported, because it is a link")
    assert not (tmp_path / "out/chat_template.jinja").exists()
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.jinja").write_text(" " * (1 << 20) + "x")
    with pytest.raises(UserError, match=r"chat_template\.jinja: it is larger than 1,048,576"):
        read_tokenizer_settings(folder)
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(UserError, match=r"chat_template\.jinja is not UTF-8"):
        export(checkpoint, tmp_path / "again", folder)
    assert not (tmp_path / "again").exists()
