"""`make model`, shortened: from text to a model that answers, in stages that continue.

The whole command and its numbers are in docs/road.md.
"""

import os
import subprocess
import sys

import pytest
from entry_runs import read_lines
from repo_copy import copy_tracked

pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install 'megaframe[evaluate]'")
pytestmark = pytest.mark.slow

SMALL = (
    "model.layers=2 model.hidden=64 model.heads=2 model.ffn=192 model.vocab=1000 train.seq=128 "
    "train.global_batch=4 train.microbatch=4 train.eval_samples=8"
)
PHASES = (
    "'data.phases=[{tokens: 40960}, {tokens: 10240, overrides: [optim.schedule=linear, "
    'optim.min_lr=0, "data.sources=[{path: runs/demo-chat-data/prose}]"]}]\''
)
BASE = f"{SMALL} {PHASES} optim.warmup=5"
CHAT = f"{SMALL} train.steps=60 evaluate.limit=40"
LOSSES = {"demo-chat-base": 5.225, "demo-chat": 4.686}
"""Validation losses at the end of each run, of the library of Python 3.11."""
TOLERANCE = 0.05
"""What another version's library may change of them."""


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    folder = copy_tracked(tmp_path_factory.mktemp("model"))
    (folder / ".venv").symlink_to(sys.prefix)
    return folder


def make(clone, base, chat):
    """Run `make model`, shortened, with what is installed here."""
    installed = [word for name in ("ready", "evaluate") for word in ("-o", f".venv/{name}")]
    words = ["MEGABYTES=0.5", "VOCAB=1000", f"BASE={base}", f"CHAT={chat}"]
    environment = {**os.environ, "PYTHONPATH": str(clone)}
    command = ["make", *installed, "model", *words]
    return subprocess.run(command, cwd=clone, env=environment, capture_output=True, text=True)


def read_last(folder, key):
    """Return the last value of a key in the metrics of a run."""
    return [line[key] for line in read_lines(folder) if line.get(key) is not None][-1]


def test_a_model_is_made_from_text_and_answers(clone):
    """The first run stops within a phase, and the second one fails. The next command goes on."""
    stopped = make(clone, f"{BASE} train.stop_after=20", f"{CHAT} optim.lr=0")
    assert stopped.returncode == 2 and "optim.lr" in stopped.stderr
    finished = make(clone, BASE, CHAT)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "resumed from step 20 of runs/demo-chat-base" in finished.stdout
    assert "demo_corpus.py" not in finished.stdout
    folder = clone / "runs"
    for name, loss in LOSSES.items():
        assert read_last(folder / name, "eval_loss") == pytest.approx(loss, rel=TOLERANCE)
    assert 0 < read_last(folder / "demo-chat", "eval_tasks")["describe"]["acc"] < 1
    assert {"config.json", "tokenizer.json", "chat_template.jinja"} <= {
        path.name for path in (folder / "demo-chat-huggingface").iterdir()
    }
    asked, answer = finished.stdout.split("> What does textwrap.dedent do?\n")
    assert asked.count("> ") and answer.partition("\n")[0]
