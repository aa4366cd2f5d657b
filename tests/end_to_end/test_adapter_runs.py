"""Whole runs with adapters: from a base, resumed under other layouts, saved without the base, and
read as the model that both are together.

Tests `megaframe.architecture.adapted_weights`, `megaframe.checkpoint.base_weights` and
`megaframe.checkpoint.merged_adapters`.
"""

import shutil

import pytest
from entry_runs import make_trainer, read_lines, train
from safetensors.torch import load_file
from slow_cases import slow
from tolerances import assert_near, near, promised

from megaframe.checkpoint import locate_checkpoint, open_checkpoint
from megaframe.checkpoint.convert.huggingface.adapter_export import export_adapters
from megaframe.checkpoint.manifest import MANIFEST, decode_manifest, encode_manifest
from megaframe.checkpoint.merged_adapters import describe_rounding, open_model
from megaframe.config import load
from megaframe.errors import UserError
from megaframe.inference.library import load_model
from megaframe.training.rank_pool import RankFailure

LLAMA = {"model__norm": "rmsnorm", "model__activation": "swiglu", "model__kv_heads": 2}
MOE = {**LLAMA, "model__moe": "{experts: 4, ffn: 12, shared: 1}"}
ADAPTERS = "{rank: 3, alpha: 6, dropout: 0.2}"
OF_EXPERTS = "{rank: 3, alpha: 6}"
DORA = "{rank: 3, alpha: 6, dora: true}"
WIDE = {**LLAMA, "model__ffn": 32}
NF4 = "{rank: 3, alpha: 6, quantize_base: {block: 2, absmax_block: 2}}"
NF4_DORA = "{rank: 3, alpha: 6, dora: true, quantize_base: {block: 4}}"
LAYOUTS = ((2, {"tensor": 2, "zero": 3}), (4, {"pipeline": 2, "data": 2, "zero": 2}), (1, {}))


def start(overrides):
    """Start a run whose refusal a test looks at."""
    make_trainer(load(None, overrides)).mesh.close()


@pytest.fixture
def make_base(pool, overrides, tmp_path):
    """make_base(model, folder) -> keys that start from a trained model, and its folder."""

    def make(model, folder="base", seed=1):
        keys = {"run__dir": tmp_path / folder, "train__steps": 2, "checkpoint__every": 2}
        pool.run(1, train, overrides(**model, **keys, run__seed=seed))
        return tmp_path / folder / "checkpoints"

    return make


@pytest.mark.parametrize(
    ("model", "adapters"), [(LLAMA, ADAPTERS), (WIDE, NF4), slow(MOE, OF_EXPERTS)]
)
def test_a_run_goes_on_under_other_layouts(model, adapters, pool, overrides, make_base, tmp_path):
    base = make_base(model)
    keys = {**model, "model__adapters": adapters, "checkpoint__weights": base, "optim__lr": 0.02}
    keys |= {"train__eval_every": 6, "train__microbatch": 1, "optim__schedule": "constant"}
    pool.run(1, train, overrides(**keys, run__dir=tmp_path / "whole", train__steps=6))
    for part, (ranks, parallel) in enumerate(LAYOUTS, 1):
        layout = {f"parallel__{key}": value for key, value in parallel.items()}
        options = {"train__steps": 2 * part, "checkpoint__every": 2, "checkpoint__resume": "latest"}
        pool.run(ranks, train, overrides(**keys, **options, **layout))
    lines, whole = read_lines(tmp_path / "run"), read_lines(tmp_path / "whole")
    for line, other in zip(lines, whole, strict=True):
        assert line["loss"] == promised(other["loss"])
    assert lines[-1]["loss"] < lines[0]["loss"]

    path = locate_checkpoint(tmp_path / "run", "path")
    with open_checkpoint(path) as checkpoint, open_checkpoint(locate_checkpoint(base, "")) as full:
        assert all(".adapters." in name for name in checkpoint.tensors)
        assert checkpoint.state["base"]["path"] == str(full.path)
        sizes = [
            sum(f.bytes for f in opened.manifest.files.values()) for opened in (checkpoint, full)
        ]
        assert sizes[0] < sizes[1] / 2
    with open_model(path) as merged, open_checkpoint(locate_checkpoint(base, "")) as full:
        weights = {name for name in full.tensors if not name.startswith("optimizer.")}
        assert set(merged.tensors) == weights
        name = "blocks.0.attention.output.weight"
        assert not merged.read_tensor(name).equal(full.read_tensor(name))


@pytest.mark.parametrize(
    ("model", "adapters"), [(WIDE, NF4_DORA), slow(LLAMA, DORA), slow(MOE, OF_EXPERTS)]
)
def test_a_merged_model_computes_what_the_run_does(
    model, adapters, pool, overrides, make_base, tmp_path
):
    """A new run from it, without adapters and on tensor ranks, begins with the loss that the run
    with them ended at."""
    base = make_base(model)
    keys = {"model__adapters": adapters, "checkpoint__weights": base, "optim__lr": 0.02}
    keys |= {"train__eval_every": 2, "train__steps": 2, "checkpoint__every": 2}
    pool.run(1, train, overrides(**model, **keys))
    evaluated = read_lines(tmp_path / "run")[-1]["eval_loss"]
    before = read_lines(tmp_path / "base")[-1]["loss"]
    keys = {"checkpoint__weights": tmp_path / "run", "run__dir": tmp_path / "on"}
    keys |= {"train__eval_every": 1, "train__steps": 1, "optim__lr": 1e-30}
    if model is MOE:  # the first step would change whom routers choose
        keys["optim__frozen"] = "['*.balance']"
    pool.run(2, train, overrides(**model, **keys, parallel__tensor=2))
    assert read_lines(tmp_path / "on")[-1]["eval_loss"] == near(evaluated, 8 * 16 * 61)
    assert evaluated != before
    merged = load_model(tmp_path / "run")
    assert not any(".adapters." in name for name in merged.tensors)
    with open_checkpoint(locate_checkpoint(tmp_path / "run", "path")) as checkpoint:
        notes = [*describe_rounding(checkpoint)]
    assert ["as nf4 in blocks of 4 (" in note for note in notes] == [True] * ("base" in adapters)


def test_another_base_is_refused(pool, overrides, make_base, tmp_path):
    base, other = make_base(LLAMA), make_base(LLAMA, "other", seed=2)
    keys = {**LLAMA, "model__adapters": ADAPTERS, "checkpoint__every": 1, "train__steps": 1}
    pool.run(1, train, overrides(**keys, checkpoint__weights=base))
    resumed = {**keys, "train__steps": 2, "checkpoint__resume": "latest"}
    shutil.rmtree(base)
    message = "with the fingerprint .*other.*it is another base"
    with pytest.raises(RankFailure, match=message):
        pool.run(1, start, overrides(**resumed, checkpoint__weights=other))
    with pytest.raises(RankFailure, match=r"holds adapters of .*base.* is not a checkpoint"):
        pool.run(1, start, overrides(**resumed))
    other_rank = {**resumed, "model__adapters": "{rank: 4}"}
    with pytest.raises(RankFailure, match=r"model.adapters.rank: 3 there, 4 here"):
        pool.run(1, start, overrides(**other_rank, checkpoint__weights=other))


def test_a_base_of_initial_values_is_saved_and_loaded(pool, overrides, tmp_path):
    """Checkpoints have its values, of which the same codes are made again, on other ranks too."""
    keys = {**WIDE, "model__adapters": NF4, "optim__lr": 0.02, "optim__schedule": "constant"}
    keys |= {"train__microbatch": 1}
    pool.run(1, train, overrides(**keys, run__dir=tmp_path / "whole", train__steps=4))
    keys |= {"checkpoint__every": 2}
    pool.run(2, train, overrides(**keys, train__steps=2, parallel__zero=3))
    resumed = {**keys, "train__steps": 4, "checkpoint__resume": "latest"}
    pool.run(2, train, overrides(**resumed, parallel__tensor=2))
    lines, whole = read_lines(tmp_path / "run"), read_lines(tmp_path / "whole")
    for line, other in zip(lines, whole, strict=True):
        assert line["loss"] == promised(other["loss"])
    assert len({line["loss"] for line in lines}) == 4


def test_exports_during_a_run_are_the_sums(pool, overrides, make_base, tmp_path):
    base = make_base(LLAMA)
    keys = {**LLAMA, "model__family": "llama", "model__adapters": ADAPTERS, "train__steps": 2}
    keys |= {"checkpoint__weights": base, "checkpoint__every": 2, "optim__lr": 0.02}
    pool.run(2, train, overrides(**keys, checkpoint__huggingface_every=2, parallel__tensor=2))
    path = locate_checkpoint(tmp_path / "run", "path")
    exported = load_file(path.parent / "huggingface" / path.name / "model.safetensors")
    with open_model(path) as merged:
        weight = merged.read_tensor("blocks.1.mlp.down.weight")
    assert_near(exported["model.layers.1.mlp.down_proj.weight"], weight, 3)
    assert not any("lora" in name or "adapters" in name for name in exported)


def test_a_run_starts_from_adapters_of_peft(pool, overrides, make_base, tmp_path):
    """On tensor ranks it begins where the run whose adapters were exported ended."""
    base = make_base(LLAMA)
    keys = {**LLAMA, "model__family": "llama", "model__adapters": DORA, "train__steps": 2}
    keys |= {"checkpoint__weights": base, "checkpoint__every": 2, "optim__lr": 0.02}
    pool.run(1, train, overrides(**keys, train__eval_every=2))
    with open_checkpoint(locate_checkpoint(tmp_path / "run", "path")) as checkpoint:
        export_adapters(checkpoint, tmp_path / "peft", dtype="fp64")
    keys |= {"checkpoint__adapters": tmp_path / "peft", "run__dir": tmp_path / "on"}
    keys |= {"train__steps": 1, "train__eval_every": 1, "optim__lr": 1e-30}
    pool.run(2, train, overrides(**keys, parallel__tensor=2, parallel__zero=2))
    evaluated = read_lines(tmp_path / "run")[-1]["eval_loss"]
    assert read_lines(tmp_path / "on")[-1]["eval_loss"] == promised(evaluated)


def test_a_state_that_names_no_base_is_refused(pool, overrides, make_base, tmp_path):
    base = make_base(LLAMA)
    keys = {**LLAMA, "model__adapters": ADAPTERS, "checkpoint__every": 1, "train__steps": 1}
    pool.run(1, train, overrides(**keys, checkpoint__weights=base))
    path = locate_checkpoint(tmp_path / "run", "path")
    for wrong, message in (
        ({"path": ["elsewhere"]}, r"has no run state: base.path"),
        ({"path": "else\0where", "fingerprint": "0" * 16}, r"has no run state: base.path"),
        ({"path": "s3://bucket/step-00000001", "fingerprint": "0" * 16}, "a base under a URL, s3:"),
    ):
        manifest = decode_manifest((path / MANIFEST).read_bytes(), path)
        manifest.state["base"] = wrong
        (path / MANIFEST).write_bytes(encode_manifest(manifest))
        with pytest.raises(UserError, match=message):
            open_model(path)
