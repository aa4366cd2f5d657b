"""parallel.auto: the layout is chosen, reported, and kept when the run resumes."""

from types import SimpleNamespace

import pytest
import torch
from tool_process import run_tool

from megaframe.config import ModelConfig, RunConfig, dump, load
from megaframe.distributed.device import read_host_memory
from megaframe.distributed.mesh import Mesh
from megaframe.errors import UserError
from megaframe.layout import Layout
from megaframe.training.auto_layout import (
    UNDECIDED,
    choose_layout,
    choose_recomputed_blocks,
    find_cluster,
    refuse_undecided,
    resolve_config,
)
from megaframe.training.trainer import Trainer
from megaframe.validate.run import validate_config


def make_config(folder, **sections):
    parallel = {"auto": True, "cluster": "h100-ib", **sections.pop("parallel", {})}
    return RunConfig(
        run={"dir": str(folder), "device": sections.pop("run_device", "auto")},
        model={"layers": 16, "hidden": 4096, "heads": 32, "vocab": 50_000},
        train={"seq": 4096, "global_batch": 256},
        parallel=parallel,
        **sections,
    )


def test_without_auto_nothing_changes(tmp_path):
    config = make_config(tmp_path, parallel={"auto": False})
    assert choose_layout(config, 8) == (config, [])


@pytest.mark.parametrize("world", [8, 48])
def test_the_choice_runs_and_is_the_same_on_every_rank(world, tmp_path):
    config, notes = choose_layout(make_config(tmp_path), world)
    assert not config.parallel.auto
    validate_config(config, world, data=False)
    assert Layout.from_parallel(config.parallel, world).world == world
    assert notes[0].startswith(f"parallel.auto: {world} ranks on h100-ib. Use ")
    assert choose_layout(make_config(tmp_path), world)[0] == config


def test_what_the_config_sets_stays(tmp_path):
    config, _ = choose_layout(make_config(tmp_path, parallel={"tensor": 4, "zero": 2}), 16)
    assert (config.parallel.tensor, config.parallel.zero) == (4, 2)


def test_a_resumed_run_keeps_its_layout_on_as_many_ranks(tmp_path):
    resumed_config = make_config(tmp_path, checkpoint={"resume": "latest"})
    config, _ = choose_layout(resumed_config, 16)
    other = {"tensor": 2, "pipeline": 2, "data": None, "zero": 1}
    begun = config.model_copy(update={"parallel": config.parallel.model_copy(update=other)})
    (tmp_path / "config.yaml").write_text(dump(begun))
    resolved, notes = choose_layout(resumed_config, 16)
    assert (resolved.parallel.tensor, resolved.parallel.pipeline, resolved.parallel.zero) == (
        2,
        2,
        1,
    )
    assert "started with" in notes[0]
    (tmp_path / "config.yaml").write_text(
        dump(config.model_copy(update={"parallel": config.parallel.model_copy(update={"data": 3})}))
    )
    anew, notes = choose_layout(resumed_config, 16)
    assert anew.parallel == config.parallel and "is not one for 16 ranks" in notes[-1]


def test_a_model_without_room_is_refused_before_anything_is_built(tmp_path):
    config = make_config(tmp_path)
    large = ModelConfig(layers=80, hidden=16384, heads=128, vocab=50_000)
    with pytest.raises(UserError, match="no layout on 8 GPUs of h100-ib"):
        choose_layout(config.model_copy(update={"model": large}), 8)


@pytest.fixture
def gpu(monkeypatch):
    """gpu(name, gib): torch sees a GPU with this name and memory."""

    def there(name, gib):
        properties = SimpleNamespace(total_memory=int(gib * 2**30), multi_processor_count=46)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=0: name)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index=0: properties)

    return there


@pytest.mark.parametrize(
    ("name", "gib", "cluster", "chip"),
    [
        ("NVIDIA A100-SXM4-40GB", 39.4, "a100-40gb-roce", "a100-40gb"),
        ("NVIDIA H20", 95.1, "h20", "h20"),
        ("NVIDIA GeForce RTX 4090", 23.5, "rtx-4090", "rtx-4090"),
        ("AMD Instinct MI300X", 192.0, "mi300x", "mi300x"),
    ],
)
def test_chip_and_memory_are_those_of_the_device(gpu, tmp_path, name, gib, cluster, chip):
    gpu(name, gib)
    config = make_config(tmp_path, parallel={"cluster": None})
    chosen_cluster = find_cluster(config.parallel, config.run)
    assert (chosen_cluster.name, chosen_cluster.chip.name) == (cluster, chip)
    assert chosen_cluster.chip.memory == int(gib * 2**30)
    _, notes = choose_layout(config, 8)
    assert f"8 ranks on {cluster}" in notes[0] and any(f"chip {chip}" in note for note in notes)
    fitted = chosen_cluster.chip.family in ("a100", "h100")
    assert any("not fitted" in note for note in notes) != fitted
    _, (note,) = choose_layout(make_config(tmp_path, parallel={"auto": False, "cluster": None}), 8)
    assert note.startswith(f"{name} is the chip {chip}, with {gib:.1f} GiB")


def test_of_an_unknown_chip_only_memory_is_planned(gpu, tmp_path):
    gpu("NVIDIA Abacus", 47.0)
    auto = {"auto": True, "cluster": None}
    with pytest.raises(UserError, match=r"unknown chip NVIDIA Abacus with 47\.0 GiB: its memory"):
        choose_layout(make_config(tmp_path, parallel=auto), 8)
    plain = make_config(tmp_path, parallel={**auto, "auto": False})
    resolved, notes = choose_layout(plain, 8)
    assert resolved == plain and "tools/measure_kernels.py --write" in notes[0]
    few = plain.model_copy(
        update={"train": plain.train.model_copy(update={"recompute_blocks": "auto"})}
    )
    _, (note,) = choose_recomputed_blocks(few, 8)
    assert "to fit NVIDIA Abacus" in note


def test_a_gpu_that_cannot_be_asked_is_assumed_with_a_word(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = make_config(tmp_path, parallel={"auto": False, "cluster": None}, run_device="cuda")
    assert find_cluster(config.parallel, config.run).name == "h100-ib"
    _, (note,) = choose_layout(config, 8)
    assert "no GPU here that could be asked" in note and "h100-ib is assumed" in note


def test_a_cpu_has_the_memory_of_the_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = make_config(tmp_path, parallel={"auto": False, "cluster": None}, run_device="cpu")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert find_cluster(config.parallel, config.run).chip.memory == read_host_memory() / 4
    assert choose_layout(config, 4) == (config, [])


def test_a_run_says_why_and_its_folder_has_the_layout(overrides, tmp_path):
    options = overrides(parallel__auto="true", train__steps=2, checkpoint__every=2)
    options.remove("train.microbatch=4")
    for steps, words in ((2, "Use "), (4, "the layout that")):
        words_of_run = (*options, "checkpoint.resume=latest", f"train.steps={steps}")
        process = run_tool("pretrain_gpt.py", *words_of_run)
        assert process.returncode == 0, process.stderr
        assert f"parallel.auto: {'1 ranks on cpu. ' if steps == 2 else ''}{words}" in process.stdout
        saved = load(str(tmp_path / "run/config.yaml"))
        assert not saved.parallel.auto and saved.parallel.data == 1


AUTO = {
    "vocab": ("model.vocab", "null"),
    "layout": ("parallel.auto", "true"),
    "buckets": ("parallel.bucket_size", "auto"),
    "recomputed blocks": ("train.recompute_blocks", "auto"),
}


@pytest.mark.parametrize("what", AUTO)
def test_a_trainer_refuses_what_is_not_decided_and_one_function_decides_all(what, overrides):
    """So no run trains with other buckets than the entry would give it."""
    key, value = AUTO[what]
    keys = [*overrides(data__tokenizer="bytes", model__vocab=512), f"{key}={value}"]
    config = load(None, keys)
    with pytest.raises(UserError, match=rf"{key}={value}.*: not decided, .*resolve_config"):
        Trainer(config, Mesh(Layout(), device="cpu"))
    decided, layout, _ = resolve_config(config, 2)
    refuse_undecided(decided)
    assert layout.world == 2 and resolve_config(decided, 2) == (decided, layout, [])
    if what == "vocab":
        assert decided.model.vocab == 257


def test_every_key_that_may_be_automatic_has_one_who_decides_it():
    """Those that a trainer decides itself, in each run alike, are the device and what follows from
    it."""
    by_device = {"run.device", "run.numa_binding", "parallel.symmetric_memory"}
    automatic = {
        f"{section}.{name}"
        for section, of_section in RunConfig.model_fields.items()
        for name, field in of_section.annotation.model_fields.items()
        if "auto" in str(field.annotation) or name == "auto"
    }
    kernels = {key for key in automatic if key.startswith("kernels.")}
    within = {key for key in UNDECIDED if key.count(".") > 1}
    assert within == {"model.indexer.absorb"}
    assert automatic - by_device - kernels == {*UNDECIDED} - within - {"model.vocab"}
