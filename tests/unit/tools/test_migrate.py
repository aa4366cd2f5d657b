"""tools/migrate.py: files of other trainers become configs that load and can be planned."""

import json
import os
import sys
from pathlib import Path

import pytest
from entry_runs import pretrain_gpt
from programs import load_program

from megaframe.config import load

tool = load_program("tools/migrate.py")
main = tool.report_errors()(tool.main)

SCRIPT = """\
GPUS=8
torchrun --nproc_per_node $GPUS --nnodes 16 pretrain_gpt.py --num-layers 96 --hidden-size 12288 \\
  --num-attention-heads 96 --seq-length 2048 --max-position-embeddings 2048 --vocab-size 50257 \\
  --micro-batch-size 1 --global-batch-size 1536 --train-iters 500000 --lr 6.0e-5 --fp16 \\
  --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 --use-distributed-optimizer \\
  --recompute-granularity full --recompute-method uniform --data-path $DATA --use-flash-attn
"""
TOML = """\
[model]
name = "llama3"
flavor = "8B"
[training]
steps = 9
[activation_checkpoint]
mode = "full"
"""
PYTHON = "n_layer = 6\nn_head = 6\nn_embd = 384\nbatch_size = 12\n"
JSON = '{"max_steps": 9, "max_length": 64}'
FILES = {
    "megatron": ("train.sh", SCRIPT, ["DATA=/d"], 128),
    "torchtitan": ("job.toml", TOML, ["--gpus", "64"], 64),
    "nanogpt": ("train_words.py", PYTHON, [], 8),
    "hf": ("arguments.json", JSON, ["--model", "config.json", "--gpus", "8"], 8),
}
MODEL = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "vocab_size": 99,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize("program", FILES)
def test_a_file_becomes_a_config_that_loads_and_is_planned(
    program, tmp_path, monkeypatch, call_main
):
    if program == "torchtitan" and sys.version_info < (3, 11):
        pytest.importorskip("tomli")
    monkeypatch.chdir(tmp_path)
    name, text, options, gpus = FILES[program]
    Path(name).write_text(text)
    Path("config.json").write_text(json.dumps(MODEL))
    status, output, errors = call_main(main, program, name, *options)
    assert status == 0 and errors.endswith("the comments say more\n")
    assert output.startswith(f"# {name}, settings of ") and "\0" not in output
    Path("migrated.yaml").write_text(output)
    config = load("migrated.yaml")
    assert config.run.dir == {"torchtitan": "./outputs", "nanogpt": "out"}.get(
        program, f"runs/{Path(name).stem}"
    )
    planned = ["--config", "migrated.yaml", "--dry-run", "--gpus", gpus, "--force"]
    planned.append("parallel.cluster=h100-ib")
    status, output, errors = call_main(pretrain_gpt.main, *planned)
    assert status == 0, errors
    assert f"layers: {config.model.layers}\n" in output


def test_migrate_without_output_writes_nothing_and_says_what_is_left(
    tmp_path, monkeypatch, call_main
):
    monkeypatch.chdir(tmp_path)
    Path("train.sh").write_text(SCRIPT)
    status, output, errors = call_main(main, "megatron", "train.sh")
    assert status == 0 and os.listdir() == ["train.sh"]
    assert "#   --data-path $DATA: its value is not in the file; data.sources" in output
    assert "  layers: 96  # --num-layers 96\n" in output
    assert "to decide: 1" in errors


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("megatron", "absent.sh"), "absent.sh: cannot be read: No such file"),
        (("megatron", "folder"), "folder: cannot be read: "),
        (("megatron", "pipe"), "pipe: cannot be read: "),
        (("megatron", "binary"), "binary: is not text"),
        (("megatron", "large"), "large: cannot be read: it is larger than 256,000 bytes"),
        (("megatron", "good.sh", "DATA"), "'DATA' is not of the form NAME=VALUE"),
        (("megatron", "empty"), "empty: it has no command with options"),
        (("hf", "empty"), "empty: it has no settings"),
        (("hf", "bad.json"), "bad.json: it is not JSON"),
        (("hf", "good.json", "--model", "bad.json"), "bad.json is not JSON"),
        (("hf", "good.json", "--model", "good.json"), "model_type None is not a known family"),
        (("nanogpt", "good.sh"), "good.sh: it is not Python: line 1"),
        (("nanogpt", "empty", "A=1"), "NAME=VALUE is for megatron"),
        (("nanogpt", "empty", "--model", "x"), "--model is for hf"),
        (("hf", "good.json", "--gpus", "0"), "whole number from 1"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_one_message(words, message, tmp_path, monkeypatch, call_main):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    Path("folder").mkdir()
    Path("binary").write_bytes(b"\x00\xff" * 9)
    Path("large").write_text("# " + "x" * 256_000)
    Path("empty").write_text("")
    Path("good.sh").write_text("python t.py --num-layers 2")
    Path("good.json").write_text("{}")
    Path("bad.json").write_text("{" * 99)
    status, output, errors = call_main(main, *words)
    assert status == 2 and output == ""
    assert message in errors and "Traceback" not in errors
