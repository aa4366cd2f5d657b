"""Whole runs through the entry, `pretrain_gpt.py`, and what they leave in their folders."""

import json
import sys
from pathlib import Path

from patience import PATIENCE

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pytest
import yaml
from bitwise import RunLosses

import pretrain_gpt
from megaframe.checkpoint.manifest import MANIFEST, decode_manifest, encode_manifest
from megaframe.config import load
from megaframe.distributed.mesh import Mesh, read_world_size
from megaframe.training.auto_layout import resolve_config
from megaframe.training.trainer import Trainer


def train(overrides):
    """Run the entry in this process, which may be a worker of the pool."""
    sys.argv = ["pretrain_gpt.py", *overrides]
    pretrain_gpt.main()


def make_trainer(config):
    """Return this rank's trainer of what the entry would run, for a test that looks inside; closing
    its mesh is left to the test."""
    config, layout, notes = resolve_config(config, read_world_size())
    return Trainer(config, Mesh(layout, device="cpu", timeout=PATIENCE), notes)


def read_lines(folder):
    """Return the lines of a run's metrics."""
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


def read_losses(folder, first=1):
    """Return the loss of each step of a run, which must be there once and in order, from `first`
    on."""
    metrics = read_lines(folder)
    assert [line["step"] for line in metrics] == list(range(first, first + len(metrics)))
    config = yaml.safe_load((Path(folder) / "config.yaml").read_text())
    return RunLosses([line["loss"] for line in metrics], config)


def rewrite_config(path, change):
    """Change the config in a checkpoint to what another version would have written."""
    manifest = decode_manifest((path / MANIFEST).read_bytes(), path)
    change(manifest.state["config"])
    (path / MANIFEST).write_bytes(encode_manifest(manifest))


def run_prepared(overrides, prepare):
    """Train alone, after `prepare` has patched what is to be patched for this run."""
    with pytest.MonkeyPatch.context() as patch:
        prepare(patch)
        trainer = make_trainer(load(None, overrides))
        trainer.run()
    trainer.mesh.close()
