"""`--explain` and `--help`: each key's values, its default and its purpose."""

import pytest

from megaframe.config import (
    describe_all_keys,
    describe_common_keys,
    describe_unknown_options,
    explain,
)
from megaframe.config.describe import COMMON, WIDTH
from megaframe.config.keys import find_nearest_keys, get_config_keys, suggest_keys
from megaframe.errors import UserError


def test_every_key_is_documented():
    for name, key in get_config_keys().items():
        text = explain(name)
        words = " ".join(text.split())
        assert text.splitlines()[0] == name
        assert key.text.endswith(".") and key.text in words, name
        if key.section is None:
            assert f"Takes {key.allowed}." in words, name
            default = "Required." if key.field.is_required() else f"Default: {key.default}."
            assert default in text, name


def test_the_listing_names_every_key_that_holds_a_value_aligned():
    text = describe_all_keys()
    assert max(map(len, text.splitlines())) <= WIDTH
    names = [
        line.split()[0] for line in text.splitlines() if line.startswith("  ") and line[2] > " "
    ]
    assert names == [key.name for key in get_config_keys().values() if key.section is None]
    for block in text.split("\n\n"):
        starts = {
            len(line) - len(line[2:].split(None, 2)[-1])
            for line in block.splitlines()[1:]
            if line[2] > " " and "[" not in line
        }
        assert len(starts) == 1


def test_the_listing_says_what_every_key_takes():
    text = " ".join(describe_all_keys().split())
    for name, key in get_config_keys().items():
        assert key.section or f" Takes {key.allowed}." in text.partition(f" {name} ")[2], name


def test_the_keys_that_people_change_have_a_line_each_in_the_order_of_the_schema():
    lines = describe_common_keys().splitlines()
    assert [line.split()[0] for line in lines] == [*COMMON]
    assert [name for name in get_config_keys() if name in COMMON] == [*COMMON]
    assert all(len(line) <= WIDTH for line in lines)
    (rate,) = (line.split() for line in lines if " optim.lr " in line)
    assert rate == ["optim.lr", "0.0003", "Peak", "learning", "rate."]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("train.seq", "a whole number >= 1"),
        ("run.seed", "a whole number from 0 to 9223372036854775807"),
        ("model.window", "a whole number >= 1 or null or a list, each a whole number >= 1 or null"),
        ("model.dropout", "a number >= 0 and < 1"),
        ("model.rotary_fraction", "a number > 0 and <= 1"),
        ("model.rotary_scaling.factor", "a number >= 1"),
        ("parallel.zero", "a whole number from 0 to 3"),
        ("train.precision", "one of fp32, bf16, fp16, fp64"),
        ("checkpoint.resume", "text or null"),
        ("data.split", "a list of 3, each a number from 0 to 1"),
        (
            "data.sources",
            "a list, each {path: text, weight: a number > 0 (default 1.0), "
            "epochs: a number > 0 or null (default null), "
            "max_tokens: a whole number >= 1 or null (default null), "
            "split: null or a list of 3, each a number from 0 to 1 (default null), "
            "key: text (default text), "
            "format: one of auto, jsonl, csv, tsv, parquet, text (default auto), "
            "split_blank_lines: true or false (default false), "
            "where: a list, each text (default []), "
            "files: a list, each text (default []), "
            "fim: {rate: a number from 0 to 1 (default 0.5), "
            "spm_rate: a number from 0 to 1 (default 0.5), prefix: a whole number >= 0 or text, "
            "suffix: a whole number >= 0 or text, middle: a whole number >= 0 or text} "
            "or null (default null)}, or only its path",
        ),
    ],
)
def test_what_a_key_takes(name, words):
    assert get_config_keys()[name].allowed == words


def test_a_section_is_explained_key_by_key():
    text = explain("train")
    assert text.startswith("train\n")
    assert "\ntrain.batch_ramp.start\n" in text
    assert "optim." not in text


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("train.stesp", "train.steps"),
        ("trian.steps", "train.steps"),
        ("train.lr", "optim.lr"),
        ("lr", "optim.lr"),
        ("model.num_layers", "model.layers"),
        ("optim.warmup_steps", "optim.warmup"),
        ("parallel.tensor_size", "parallel.tensor"),
        ("seed", "run.seed"),
        ("mixed_precision", "train.precision"),
        ("model.layer", "model.layers"),
    ],
)
def test_the_nearest_key(wrong, right):
    assert find_nearest_keys(wrong) == right
    suggestion = suggest_keys(wrong)
    assert suggestion == f"did you mean {right}?" or suggestion.endswith(f" is {right}")
    with pytest.raises(UserError) as refusal:
        explain(wrong)
    assert str(refusal.value) == f"{wrong} is not a config key; {suggestion}"


@pytest.mark.parametrize(
    "name", ["num_wrokers", "bogus", "model.foo", "train.lathes", "use-fused-kernel", "optim.size"]
)
def test_what_is_like_no_key_is_given_none(name):
    assert find_nearest_keys(name) == ""
    assert suggest_keys(name) == "pretrain_gpt.py --help all lists all keys"


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--tensor-model-parallel-size", "Megatron-LM's tensor_model_parallel_size is parallel.te"),
        ("--n_layer=12", "--n_layer: nanoGPT's n_layer is model.layers"),
        ("--train.steps=5", "--train.steps: write train.steps=VALUE"),
        ("--dry_run", "--dry_run: did you mean --dry-run?"),
        ("--dryrun", "--dryrun: did you mean --dry-run?"),
        ("--lr=secret", "--lr: did you mean optim.lr?"),
        ("--overlap-grad-reduce", "Megatron-LM's overlap_grad_reduce is always on"),
        ("--use-flash-attn", "Megatron-LM's use_flash_attn has no key: attention never stores"),
        ("--num-workers=2", "Megatron-LM's num_workers has no key: data is read by a thread"),
    ],
)
def test_an_unknown_option_is_a_key_a_foreign_name_or_near_an_option(option, words):
    head, line = describe_unknown_options([option], ["--config", "--dry-run"]).split("\n  ")
    assert head == "unknown option; keys are given without dashes: section.key=value"
    assert words in line and "secret" not in line
