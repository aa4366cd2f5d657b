"""What files of torchtitan, nanoGPT and Hugging Face's Trainer mean here."""

import itertools
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaframe.config import load
from megaframe.config.settings_elsewhere import SETTINGS_ELSEWHERE, SETTINGS_WITHOUT_KEY
from megaframe.errors import UserError
from megaframe.migration.config_text import format_config
from megaframe.migration.conversion import DECIDE, HEADINGS, REFUSED, UNKNOWN
from megaframe.migration.huggingface import migrate_huggingface
from megaframe.migration.nanogpt import migrate_nanogpt
from megaframe.migration.torchtitan import find_model_name, migrate_torchtitan, parse_toml

TITAN = {
    "job": {"dump_folder": "./out", "description": "a job"},
    "model": {"name": "llama3", "flavor": "8B", "hf_assets_path": "assets/Llama-3.1-8B"},
    "optimizer": {"name": "AdamW", "lr": 3e-4},
    "lr_scheduler": {"warmup_steps": 100, "decay_type": "cosine", "min_lr_factor": 0.1},
    "training": {"local_batch_size": 2, "seq_len": 8192, "steps": 1000, "dataset": "c4"},
    "parallelism": {"data_parallel_shard_degree": -1, "tensor_parallel_degree": 8},
    "checkpoint": {"enable": True, "interval": 500, "folder": "ckpt"},
    "activation_checkpoint": {"mode": "full"},
    "compile": {"enable": True, "components": ["model", "loss"]},
    "metrics": {"log_freq": 5, "enable_wandb": False},
    "validation": {"enable": True, "freq": 100, "steps": 10, "local_batch_size": 4},
}
NANO = """\
import time
out_dir = 'out-words'
wandb_log = True; wandb_project = 'words'
wandb_run_name = 'x' + str(time.time())
dataset = 'words'
batch_size = 12
block_size: int = 512
gradient_accumulation_steps = 5 * 8   # of all ranks
n_layer, n_head = 3, 3
n_layer = 6
n_head = 6
n_embd = 64 * n_head
max_iters = 5_000
lr_decay_iters = max_iters
learning_rate = 1e-3
min_lr = learning_rate / 10
eval_iters = 20
eval_interval = 250
dtype = 'bfloat16' if good() else 'float16'
"""
ARGUMENTS = {
    "output_dir": "out",
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 8,
    "learning_rate": 2e-4,
    "max_steps": 1000,
    "warmup_ratio": 0.03,
    "lr_scheduler_type": "cosine_with_min_lr",
    "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
    "bf16": True,
    "gradient_checkpointing": True,
    "eval_strategy": "steps",
    "eval_steps": 100,
    "save_total_limit": 3,
    "report_to": ["wandb"],
    "max_length": 512,
}


def reload(conversion, tmp_path):
    """Return the config that the YAML of a conversion makes."""
    config = conversion.validate()
    path = tmp_path / "config.yaml"
    path.write_text(format_config(conversion, "x"), encoding="utf-8")
    assert load(str(path)) == config
    return config


def dump_model(name):
    return load(name).model.model_dump(mode="json", exclude_unset=True, exclude_none=True)


def test_a_torchtitan_job(tmp_path):
    assert find_model_name(TITAN) == "llama3-8b"
    conversion = migrate_torchtitan(TITAN, dump_model("llama3-8b"), 64)
    config = reload(conversion, tmp_path)
    train, optim, parallel = config.train, config.optim, config.parallel
    assert config.model == load("llama3-8b").model
    assert (parallel.tensor, parallel.zero, train.seq, train.steps) == (8, 3, 8192, 1000)
    assert (train.global_batch, train.microbatch) == (2 * 8, 2)
    assert (train.recompute, train.compile) == ("full", "inductor")
    assert (optim.schedule, optim.warmup, optim.min_lr) == ("cosine", 100, 3e-5)
    assert (train.eval_every, train.eval_samples) == (100, 40)
    assert config.data.tokenizer == "hf:assets/Llama-3.1-8B/tokenizer.json"
    assert (config.checkpoint.folder, config.checkpoint.every) == ("./out/ckpt", 500)
    assert (config.checkpoint.keep, config.checkpoint.resume) == (10, "latest")
    assert [note.partition(":")[0] for note in conversion.notes[DECIDE]] == [
        "training.dataset = c4"
    ]
    assert conversion.notes[REFUSED] == conversion.notes[UNKNOWN] == []


@pytest.mark.parametrize(
    ("section", "keys"),
    [
        ({"training": {}}, {"train.global_batch": 8 * 8, "train.steps": 10000, "optim.lr": 8e-4}),
        ({"training": {"global_batch_size": 99}}, {"train.global_batch": 99}),
        ({"parallelism": {"data_parallel_shard_degree": 4, "data_parallel_replicate_degree": 2}},
         {"parallel.data": 8, "parallel.data_replicate": 2, "parallel.zero": 3}),
        ({"parallelism": {"fsdp_reshard_after_forward": "never"}}, {"parallel.zero": 2}),
        ({"parallelism": {"pipeline_parallel_degree": 2,
                          "pipeline_parallel_schedule": "Interleaved1F1B"}},
         {"parallel.pipeline": 2, "parallel.schedule": "interleaved", "parallel.chunks": 2,
          "parallel.zero": 2, "train.microbatch": 1, "train.global_batch": 8 * 4}),
        ({"lr_scheduler": {"decay_ratio": 0.2}},
         {"optim.schedule": "wsd", "optim.decay": 2000, "optim.warmup": 200}),
        ({"lr_scheduler": {"decay_ratio": 0.8, "warmup_steps": 2000, "decay_type": "cosine"}},
         {"optim.schedule": "cosine", "optim.warmup": 2000}),
        ({"activation_checkpoint": {"mode": "memory_budget"}}, {"train.recompute_blocks": "auto"}),
        ({"model": {"converters": ["float8"]},
          "quantize": {"linear": {"float8": {"recipe_name": "rowwise"}}}}, {"train.fp8": "row"}),
        ({"checkpoint": {"enable": False}}, {"checkpoint.every": 0}),
        ({"comm": {"train_timeout_seconds": 100}}, {"parallel.timeout": 100}),
    ],
)  # fmt: skip
def test_what_keys_of_torchtitan_mean(section, keys):
    conversion = migrate_torchtitan(section, dump_model("llama3-8b"), 8)
    conversion.validate()
    assert {key: conversion.get_value(key) for key in keys} == keys
    assert conversion.notes[REFUSED] == []


def test_a_model_that_is_not_shipped_is_left_to_decide():
    table = {"model": {"name": "llama3", "flavor": "debugmodel"}}
    conversion = migrate_torchtitan(table, {}, None)
    notes = "\n".join(conversion.notes[DECIDE])
    assert "llama3 debugmodel is none of the shipped configs" in notes
    assert "give their number by --gpus" in notes


@pytest.mark.skipif(sys.version_info < (3, 11), reason="TOML comes with Python 3.11")
def test_toml_is_parsed_and_what_is_none_is_refused():
    assert parse_toml("[training]\nsteps = 1_000 # many\n") == {"training": {"steps": 1000}}
    for text in ("[training", "a = ", "a = " + "[" * 5000, "a = " + "9" * 5000):
        with pytest.raises(UserError, match="it is not TOML: "):
            parse_toml(text)


def test_a_nanogpt_config(tmp_path):
    conversion = migrate_nanogpt(NANO)
    config = reload(conversion, tmp_path)
    model, train, optim = config.model, config.train, config.optim
    assert (model.layers, model.heads, model.hidden, model.vocab) == (6, 6, 384, 50257)
    assert (model.position, model.activation, model.tie_embeddings) == ("learned", "gelu", True)
    assert not model.bias and model.norm == "layernorm"
    assert (train.global_batch, train.microbatch, train.seq, train.steps) == (480, 12, 512, 5000)
    assert (optim.lr, optim.min_lr, optim.warmup, optim.decay) == (1e-3, 1e-4, 2000, 5000)
    assert (train.eval_every, train.eval_samples) == (250, 240)
    assert (config.run.dir, config.metrics.wandb) == ("out-words", "words")
    assert "dtype = an expression" in "\n".join(conversion.notes[DECIDE])
    assert conversion.notes[UNKNOWN] == conversion.notes[REFUSED] == []


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("", {"model.layers": None, "train.global_batch": 480, "optim.decay": 600000}),
        ("decay_lr = False", {"optim.schedule": "constant", "optim.warmup": None}),
        ("init_from = 'gpt2-xl'", {"model.layers": 48, "model.hidden": 1600, "model.bias": True}),
        ("init_from = 'resume'", {"checkpoint.resume": "latest"}),
        ("dropout = 0.0", {"model.dropout": 0.0}),
        ("bias = True\ndevice = 'cpu'", {"model.bias": True, "run.device": "cpu"}),
        ("compile = True\ndtype = 'float32'",
         {"train.compile": "inductor", "train.precision": "fp32"}),
        ("dataset = 'x_char'", {"model.vocab": None}),
        ("n_layer = 7\nexec(open('configurator.py').read())\nn_layer = 9", {"model.layers": 7}),
        ("n_layer = len('ab')\nn_head = n_layer", {"model.layers": None, "model.heads": None}),
        ("always_save_checkpoint = False", {"checkpoint.keep_best": 1}),
    ],
)  # fmt: skip
def test_what_names_of_nanogpt_mean(text, keys):
    conversion = migrate_nanogpt(text)
    conversion.validate()
    assert {key: conversion.get_value(key) for key in keys} == keys


@pytest.mark.parametrize("text", ["a = (", "a = " + "(" * 5000, "\0", "a = " + "-" * 100_000 + "1"])
def test_what_is_no_python_is_refused(text):
    with pytest.raises(UserError, match="it is not Python: "):
        migrate_nanogpt(text)


def test_a_config_in_python_is_not_run(tmp_path):
    planted = tmp_path / "planted"
    migrate_nanogpt(f"open({str(planted)!r}, 'w')\nn_layer = open({str(planted)!r}, 'w')\n")
    assert not planted.exists()


def test_training_arguments(tmp_path):
    model = dump_model("llama3-8b")
    conversion = migrate_huggingface(ARGUMENTS, model, 8)
    config = reload(conversion, tmp_path)
    train, optim = config.train, config.optim
    assert config.model == load("llama3-8b").model
    assert (train.global_batch, train.microbatch, train.steps, train.seq) == (256, 4, 1000, 512)
    assert (optim.lr, optim.min_lr, optim.warmup, optim.schedule) == (2e-4, 2e-5, 30, "cosine")
    assert (optim.beta2, optim.weight_decay, config.run.seed) == (0.999, 0.0, 42)
    assert (train.recompute, train.precision, train.eval_every) == ("full", "bf16", 100)
    assert (config.checkpoint.every, config.checkpoint.keep) == (500, 3)
    assert (config.run.dir, config.metrics.wandb) == ("out", "megaframe")
    assert conversion.notes[REFUSED] == conversion.notes[UNKNOWN] == []
    assert len(conversion.notes[DECIDE]) == 1  # the data


@pytest.mark.parametrize(
    ("arguments", "keys"),
    [
        ({}, {"train.global_batch": 8, "optim.lr": 5e-5, "train.precision": "fp32"}),
        ({"bf16": "True", "max_steps": "10"}, {"train.precision": "bf16", "train.steps": 10}),
        ({"max_steps": 100, "warmup_steps": 0.1}, {"optim.warmup": 10}),
        ({"lr_scheduler_type": "constant", "warmup_steps": 5},
         {"optim.schedule": "constant", "optim.warmup": None, "optim.lr": 5e-5}),
        ({"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 5},
         {"optim.schedule": "constant", "optim.warmup": 5}),
        ({"save_strategy": "no"}, {"checkpoint.every": 0}),
        ({"optim": "adamw_bnb_8bit"}, {"optim.state": "int8"}),
        ({"resume_from_checkpoint": True}, {"checkpoint.resume": "latest"}),
        ({"report_to": "none", "use_cpu": True}, {"metrics.wandb": None, "run.device": "cpu"}),
    ],
)  # fmt: skip
def test_what_training_arguments_mean(arguments, keys):
    conversion = migrate_huggingface(arguments, {}, 1)
    conversion.validate()
    assert {key: conversion.get_value(key) for key in keys} == keys
    assert conversion.notes[REFUSED] == []


def test_epochs_are_the_length_unless_steps_are():
    for arguments, epochs in (({"num_train_epochs": 2}, 2), ({}, 3), ({"max_steps": 5}, None)):
        conversion = migrate_huggingface(arguments, {}, None)
        assert conversion.get_value("data.epochs") == epochs
    notes = migrate_huggingface({"warmup_ratio": 0.1}, {}, None).notes[DECIDE]
    assert any("optim.warmup, in steps" in note for note in notes)


MIGRATE = {
    "torchtitan": lambda table: migrate_torchtitan(table, {}, None),
    "Hugging Face": lambda table: migrate_huggingface(table, {}, None),
    "nanoGPT": lambda table: migrate_nanogpt(
        "\n".join(f"{name} = {value!r}" for name, value in table.items())
    ),
}


@pytest.mark.parametrize("program", MIGRATE)
def test_no_setting_goes_unsaid(program):
    settings = [*SETTINGS_ELSEWHERE[program], *SETTINGS_WITHOUT_KEY[program]]
    names = [name for name in settings if "." not in name]
    for name, value in itertools.product(names, (True, False, 1, "x", 0.5, [1, "y"])):
        conversion = MIGRATE[program]({name: value})
        conversion.validate()
        text = format_config(conversion, "x")
        origins = [origin for _, origin in conversion.keys.values()]
        notes = [note for notes in conversion.notes.values() for note in notes]
        assert any(name in said for said in (*origins, *notes)), text


SETTINGS = st.dictionaries(
    st.sampled_from(sorted({name for program in MIGRATE for name in SETTINGS_ELSEWHERE[program]})),
    st.none() | st.booleans() | st.integers(-3, 10**12) | st.floats() | st.text(max_size=9)
    | st.lists(st.integers(-1, 3), max_size=3),
    max_size=6,
)  # fmt: skip


@given(SETTINGS)
def test_any_values_make_a_config_that_loads(table):
    for program in ("torchtitan", "Hugging Face"):
        nested = {}
        for name, value in table.items():
            section, _, last = name.rpartition(".")
            nested.setdefault(section or "training", {})[last] = value
        conversion = MIGRATE[program](nested if program == "torchtitan" else table)
        conversion.validate()
        assert "\n\n" not in format_config(conversion, "x")
        assert {*conversion.notes} == {*HEADINGS}
