"""Exports during training: the same bytes under any layout, complete or not there, and no failure
of one ends a run.

Tests `megaframe.checkpoint.convert.huggingface.run_exports`,
`megaframe.checkpoint.convert.huggingface.folder_export`, `megaframe.checkpoint.exports` and
`megaframe.checkpoint.commit`.
"""

import pytest
from entry_runs import make_trainer, train
from transformers_models import assert_same_logits

from megaframe.checkpoint import open_checkpoint
from megaframe.checkpoint.convert.huggingface import folder_export
from megaframe.checkpoint.convert.huggingface.model_folder import export_model
from megaframe.checkpoint.convert.huggingface.run_exports import RunExports
from megaframe.config import load
from megaframe.errors import UserError

LLAMA = {
    **{"model__norm": "rmsnorm", "model__activation": "swiglu", "model__family": "llama"},
    **{"model__ffn": 24, "model__bias": False, "model__position": "rotary", "model__vocab": 300},
    **{"model__tie_embeddings": False, "data__tokenizer": "bytes", "model__norm_eps": 1e-6},
    **{"checkpoint__every": 2, "checkpoint__huggingface_every": 2, "checkpoint__keep": 2},
    # No step changes a bit of the weights, so those of all layouts are the same in every bit.
    **{"train__steps": 2, "optim__lr": 1e-300},
}
LAYOUTS = {
    1: {},
    2: {"parallel__tensor": 2},
    3: {"parallel__zero": 3},
    4: {"parallel__pipeline": 2, "parallel__zero": 1},
}


def make_small_files(function, *arguments):
    """Run a function with small files of weights."""
    folder_export.FILE_BYTES = 4096
    try:
        function(*arguments)
    finally:
        folder_export.FILE_BYTES = 2 << 30


def read_files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_an_export_has_the_same_bytes_under_any_layout(pool, overrides, tmp_path):
    exports = {}
    for world, layout in LAYOUTS.items():
        run = tmp_path / str(world)
        batch = {"train__global_batch": 12, "train__microbatch": 2}
        keys = overrides(**{**LLAMA, **layout, **batch, "run__dir": run})
        pool.run(world, make_small_files, train, keys)
        (folder,) = (run / "checkpoints/huggingface").iterdir()
        assert folder.name == "step-00000002"
        exports[world] = read_files(folder)
        assert len([*folder.glob("model-*.safetensors")]) > 4
    assert all(files == exports[1] for files in exports.values())
    with open_checkpoint(tmp_path / "1/checkpoints/step-00000002") as checkpoint:
        make_small_files(export_model, checkpoint, tmp_path / "by-hand")
    assert read_files(tmp_path / "by-hand") == exports[1]


def run_trainer(keys, prepare=None):
    trainer = make_trainer(load(None, keys))
    if prepare is not None:
        prepare(trainer)
    try:
        trainer.run()
    finally:
        trainer.mesh.close()


def test_an_export_loads_in_transformers_and_old_ones_go(pool, overrides, tmp_path):
    changes = {"train__steps": 9, "optim__lr": 0.01, "train__precision": "fp32"}
    pool.run(2, run_trainer, overrides(**{**LLAMA, **changes}))
    root = tmp_path / "run/checkpoints"
    names = ["step-00000008", "step-00000009"]
    assert sorted(path.name for path in (root / "huggingface").iterdir()) == names
    assert_same_logits(root / names[1], root / "huggingface" / names[1])


def fail(self, *arguments):
    raise OSError(28, "No space left on device", "weights")


def break_part(trainer):
    if trainer.mesh.rank == 1:
        trainer.checkpointer._writer._exports.write_part = lambda *a: fail(None)


def break_name(trainer):
    if trainer.mesh.rank == 0:
        trainer.checkpointer._writer._exports.publish = lambda *a: fail(None)


@pytest.mark.parametrize("break_export", [break_part, break_name])
def test_a_failed_export_is_said_and_loses_nothing(break_export, pool, overrides, tmp_path):
    pool.run(2, run_trainer, overrides(**{**LLAMA, "train__steps": 4}), break_export)
    root = tmp_path / "run/checkpoints"
    log = (tmp_path / "run/run.log").read_text()
    for step in (2, 4):
        open_checkpoint(root / f"step-{step:08d}").close()
        assert f"warning: the checkpoint of step {step} could not be exported: " in log
    assert "No space left on device" in log and "the checkpoint is saved" in log
    assert [*(root / "huggingface").iterdir()] == []


def test_what_a_killed_export_has_left_has_no_name_and_goes(pool, overrides, tmp_path):
    root = tmp_path / "run/checkpoints"
    (root / "huggingface/step-00000002.abc.tmp").mkdir(parents=True)
    (root / "huggingface/step-00000002.abc.tmp/model.safetensors").write_bytes(b"half")
    pool.run(1, run_trainer, overrides(**LLAMA))
    assert [path.name for path in (root / "huggingface").iterdir()] == ["step-00000002"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__family": "null"}, "needs model.family, which names the family of transformers"),
        ({"model__activation": "gelu"}, "no llama of Hugging Face matches this config"),
    ],
)
def test_what_cannot_be_exported_is_refused_before_the_run(changes, message, overrides, tmp_path):
    config = load(None, overrides(**{**LLAMA, **changes}))
    with pytest.raises(UserError) as error:
        RunExports(config, tmp_path, 0, 1)
    assert message in str(error.value)
