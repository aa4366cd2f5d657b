"""Names of settings of other programs: each is a key here, and messages and guide say the same."""

import re
from functools import cache
from pathlib import Path

import pytest

from megaframe.config import RunConfig, explain, load
from megaframe.config.keys import get_config_keys, suggest_keys
from megaframe.config.load import load_from_run
from megaframe.config.migration import RENAMED_KEYS, translate_setting, upgrade_keys
from megaframe.config.settings_elsewhere import SETTINGS_ELSEWHERE, SETTINGS_WITHOUT_KEY
from megaframe.dashboard.run_folder import RunFolder, get_config_value
from megaframe.errors import UserError

GUIDE = Path(__file__).resolve().parents[3] / "docs/guides/migrating.md"
BESIDE = {
    "model.moe.": ["model.moe.experts=8"],
    "model.latent.": [f"model.latent.{key}=8" for key in ("kv_rank", "head_dim", "rotary_dim")],
}


def list_keys(text):
    """Return the keys in what a name is here, each with its value if it has one."""
    return re.findall(r"[a-z]+\.[a-z_0-9]+[a-z0-9](?:\.[a-z_0-9]+)?(?:=[a-z0-9]+)?", text)


def test_there_are_enough_of_every_program():
    assert {*SETTINGS_ELSEWHERE} == {
        "Megatron-LM",
        "Hugging Face",
        "DeepSpeed",
        "torchtitan",
        "nanoGPT",
    }
    assert (
        min(map(len, SETTINGS_ELSEWHERE.values())) > 15
        and len(set().union(*SETTINGS_ELSEWHERE.values())) > 150
    )


@pytest.mark.parametrize("program", SETTINGS_ELSEWHERE)
def test_what_a_name_is_here_exists_and_takes_its_value(program):
    for name, replacement in SETTINGS_ELSEWHERE[program].items():
        known = get_config_keys().get(name)
        assert known is None or known.section or name == replacement
        assert list_keys(replacement) or replacement == "always on", name
        for text in list_keys(replacement):
            key, _, value = text.partition("=")
            assert key in get_config_keys(), replacement
            if value:
                load(None, [*BESIDE.get(f"{key.rpartition('.')[0]}.", ()), text])
        if replacement.rpartition(".")[2] == name.rpartition(".")[2]:
            assert suggest_keys(name.rpartition(".")[2]).endswith("?"), name  # likeness finds it
        else:
            message = translate_setting(name)
            assert f"{program}'s" in message and f"{name} is {replacement}" in message


@pytest.mark.parametrize("program", SETTINGS_WITHOUT_KEY)
def test_what_has_no_key_has_a_reason(program):
    """It names only keys that exist, and a name has a key or a reason and not both."""
    for name, reason in SETTINGS_WITHOUT_KEY[program].items():
        assert f"{program}'s" in translate_setting(name)
        assert f"{name} has no key: {reason}" in translate_setting(name)
        keys = [
            key
            for key in list_keys(reason)
            if key.partition(".")[0] in RunConfig.model_fields
            and not key.endswith((".py", ".jsonl"))
        ]
        assert {*keys} <= {*get_config_keys()}, reason
        assert name not in SETTINGS_ELSEWHERE[program]


@cache
def read_rows(program):
    """Return the cells of the guide's table for a program, with names as the program has them."""
    section = GUIDE.read_text(encoding="utf-8").split(f"\n## {program}\n")[1].split("\n## ")[0]
    rows = (line.strip("| ").partition(" | ") for line in section.splitlines() if line[:2] == "| ")
    return [
        (foreign_name.replace("--", "").replace("-", "_"), own_text)
        for foreign_name, _, own_text in rows
    ]


@pytest.mark.parametrize("program", SETTINGS_ELSEWHERE)
def test_the_guide_says_the_same(program):
    """In one row there are each name, or its last part, and all keys that it is."""
    for name, replacement in SETTINGS_ELSEWHERE[program].items():
        word = re.compile(rf"\b{name.rpartition('.')[2]}\b")
        keys = [text.partition("=")[0] for text in list_keys(replacement)] or ["always"]
        texts = [own_text for foreign, own_text in read_rows(program) if word.search(foreign)]
        assert any(all(key in own_text for key in keys) for own_text in texts), (name, texts)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tensor_model_parallel_size", "-LM's tensor_model_parallel_size is parallel.tensor"),
        ("parallel.tensor-model-parallel-size", "model_parallel_size is parallel.tensor"),
        ("--NUM-LAYERS", "Megatron-LM's num_layers is model.layers"),
        ("training.local_batch_size", "torchtitan's local_batch_size is train.microbatch"),
        ("global_batch_size", "Megatron-LM's and torchtitan's global_batch_size is train.global_"),
        ("zero_optimization.stage", "DeepSpeed's zero_optimization.stage is parallel.zero"),
        ("train.lr_scheduler.warmup_steps", "torchtitan's lr_scheduler.warmup_steps is optim.war"),
        ("optim.learning_rate", "Hugging Face's and nanoGPT's learning_rate is optim.lr"),
    ],
)
def test_a_foreign_name_is_known_however_it_is_given(name, expected):
    assert expected in translate_setting(name)
    message = re.escape(translate_setting(name))
    with pytest.raises(UserError, match=f"is not a config key; {message}"):
        explain(name)
    with pytest.raises(UserError, match=f": unknown key; {message}"):
        load(None, [f"{name}=1"])


def test_a_foreign_name_is_known_in_a_file_and_inside_a_list_too(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("model: {n_embd: 64}\ndata: {sources: [{path: x, data_path: y}]}\n")
    with pytest.raises(UserError) as refusal:
        load(str(path))
    assert "c.yaml:1: model.n_embd: unknown key; nanoGPT's n_embd is model.hidden" in str(
        refusal.value
    )
    assert "Megatron-LM's data_path is data.sources" in str(refusal.value)


@pytest.mark.parametrize("name", RENAMED_KEYS)
def test_a_former_key_is_refused_with_its_successor(name):
    assert RENAMED_KEYS[name] in get_config_keys() and f"parallel.{name}" not in get_config_keys()
    message = f"parallel.{name}: unknown key; {RENAMED_KEYS[name]} has replaced {name}"
    with pytest.raises(UserError, match=re.escape(message)):
        load(None, [f"parallel.{name}=1"])


@pytest.mark.parametrize(
    ("saved", "upgraded"),
    [
        ({"compress": "none", "compress_share": 0.01, "compress_rank": 4}, {"compress": "none"}),
        (
            {"compress": "topk", "compress_share": 0.05, "compress_rank": 4},
            {"compress": "topk", "compress_keep": 0.05},
        ),
        (
            {"compress": "powersgd", "compress_share": 0.01, "compress_rank": 8},
            {"compress": "powersgd", "compress_keep": 8},
        ),
        ({"schedule_group": 4, "schedule_memory": None}, {"schedule_microbatches": 4}),
        ({"schedule_group": None, "schedule_memory": 2.5}, {"schedule_microbatches": 2.5}),
        ({"compress": ["of", "nobody"], "zero": 1}, {"compress": ["of", "nobody"], "zero": 1}),
    ],
)
def test_a_checkpoint_with_former_keys_says_the_same(saved, upgraded):
    assert upgrade_keys({"run": {}, "parallel": saved}) == {"run": {}, "parallel": upgraded}
    assert upgrade_keys({"parallel": "nonsense"}) == {"parallel": "nonsense"}


def test_a_former_section_is_refused_with_its_successor(tmp_path):
    path = tmp_path / "old.yaml"
    path.write_text("meter:\n  every: 3\n  wandb: words\n")
    with pytest.raises(UserError, match=r"old.yaml:1: meter: .*; metrics has replaced meter"):
        load(str(path))
    with pytest.raises(UserError, match=r"metrics\.every has replaced meter\.every"):
        load(None, ["meter.every=3"])
    with pytest.raises(UserError, match="is not a config key; metrics has replaced meter"):
        explain("meter")


def test_a_former_section_of_a_checkpoint_and_of_a_run_folder_is_read(tmp_path):
    assert upgrade_keys({"meter": {"every": 3}}) == {"metrics": {"every": 3}}
    (tmp_path / "config.yaml").write_text("meter: {every: 3, wandb: words}\n")
    assert load_from_run(tmp_path).metrics.every == 3
    assert get_config_value(RunFolder(tmp_path).config, "metrics.wandb") == "words"


def test_a_name_of_no_program_is_not_translated():
    for name in ("model.layer", "", "stage", "-", "..."):
        assert translate_setting(name) is None
