"""Whole runs through the entry, `pretrain_gpt.py`, and what they leave in their folders."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pretrain_gpt
from megaframe.checkpoint.manifest import MANIFEST, decode_manifest, encode_manifest


def train(overrides):
    """Run the entry in this process, which may be a worker of the pool."""
    sys.argv = ["pretrain_gpt.py", *overrides]
    pretrain_gpt.main()


def read_lines(folder):
    """Return the lines of a run's metrics."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def read_losses(folder):
    """Return the loss of each step of a run, which must be there once and in order."""
    metrics = read_lines(folder)
    assert [line["step"] for line in metrics] == list(range(1, len(metrics) + 1))
    return [line["loss"] for line in metrics]


def rewrite_config(path, change):
    """Change the config in a checkpoint to what another version would have written."""
    manifest = decode_manifest((path / MANIFEST).read_bytes(), path)
    change(manifest.state["config"])
    (path / MANIFEST).write_bytes(encode_manifest(manifest))
