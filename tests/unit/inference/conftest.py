"""Checkpoints of a small byte-level model."""

import pytest
from entry_runs import make_trainer
from evaluation_runs import make_numbers, write

from megaframe.config import RunConfig


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory):
    """Return checkpoints of a byte-level model after one step on one rank."""
    folder = tmp_path_factory.mktemp("saved_run")
    data = write(folder / "data", [make_numbers(n, 40, 257) for n in range(10)])
    config = RunConfig(
        run={"dir": str(folder / "run"), "device": "cpu"},
        model={"layers": 1, "hidden": 16, "heads": 2, "vocab": 257, "position": "learned"},
        train={"seq": 16, "steps": 1, "global_batch": 1, "precision": "fp32"},
        data={"sources": [{"path": data}], "split": [0.8, 0.2, 0.0], "tokenizer": "bytes"},
        checkpoint={"every": 1},
        metrics={"peak_tflops": 1.0, "console": "quiet"},
    )
    trainer = make_trainer(config)
    trainer.run()
    trainer.mesh.close()
    return folder / "run/checkpoints"
