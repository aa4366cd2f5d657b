"""Trace a tiny run of megaframe on the CPU: the calls from the trainer to the first block, and the
calls and files of a step of one microbatch.

    python tools/trace_step.py CHECKOUT FOLDER

trains in this process, on `FOLDER/tokens`, and writes `FOLDER/trace.json`. `measure_tree.py` calls
`trace_step`, which prepares the tokens and runs this command for any checkout.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType
from typing import Any

STEPS = 3
"""Steps of the traced run. The last is counted, because the first builds what later ones reuse."""
TINY_RUN = {
    "model.layers": 1,
    "model.heads": 2,
    "model.hidden": 32,
    "model.ffn": 64,
    "model.vocab": 257,
    "train.steps": STEPS,
    "train.seq": 16,
    "train.global_batch": 1,
    "train.microbatch": 1,
    "train.precision": "fp32",
    "train.eval_every": 0,
    "data.tokenizer": "bytes",
    "data.split": "[1, 0, 0]",
    "checkpoint.every": 0,
    "run.device": "cpu",
}


class StepTrace:
    """Records the calls of each step of one microbatch; it is a function for `sys.setprofile`.

    A step is what one call from `trainer.py` of another file does, if a block is called within it.
    Calls of generators count each time that they go on.
    """

    def __init__(self, package: str) -> None:
        self._package = package.rstrip(os.sep) + os.sep
        self._outer: FrameType | None = None
        self._calls, self._files, self._path = 0, set[str](), list[str]()
        self.steps: list[dict[str, Any]] = []

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """Take an event of the interpreter."""
        if event == "call" and frame.f_code.co_filename.startswith(self._package):
            self._enter(frame)
        elif event == "return" and frame is self._outer:
            if self._path:
                files = sorted(self._files)
                self.steps.append({"path": self._path, "calls": self._calls, "files": files})
            self._outer = None

    def _enter(self, frame: FrameType) -> None:
        caller = frame.f_back
        if self._outer is None and caller and is_trainer(caller) and not is_trainer(frame):
            self._outer = frame
            self._calls, self._files, self._path = 0, set(), []
        if self._outer is not None:
            self._calls += 1
            self._files.add(frame.f_code.co_filename.removeprefix(self._package))
            if not self._path and is_block(frame):
                self._path = self._name_callers(frame)

    def _name_callers(self, frame: FrameType | None) -> list[str]:
        """Return the functions between the trainer and this frame, and that of the frame."""
        names: list[str] = []
        while frame is not None and not is_trainer(frame):
            file = frame.f_code.co_filename
            if file.startswith(self._package):
                names.append(f"{file.removeprefix(self._package)}: {frame.f_code.co_name}")
            frame = frame.f_back
        return names[::-1]


def is_trainer(frame: FrameType) -> bool:
    """Return whether a function is one of the trainer's file."""
    return os.path.basename(frame.f_code.co_filename) == "trainer.py"


def is_block(frame: FrameType) -> bool:
    """Return whether a call is the forward pass of a transformer block."""
    owner = type(frame.f_locals.get("self")).__name__
    return owner in ("Block", "TransformerBlock") and frame.f_code.co_name in (
        "__call__",
        "forward",
    )


def train_traced(checkout: Path, folder: Path) -> None:
    """Train a tiny model by the entry script of a checkout, and write what its last step calls."""
    keys = {**TINY_RUN, "run.dir": folder / "run", "data.sources": f"[{{path: {folder}/tokens}}]"}
    sys.argv = ["pretrain_gpt.py", *(f"{key}={value}" for key, value in keys.items())]
    trace = StepTrace(str(checkout / "megaframe"))
    threading.setprofile(trace)
    sys.setprofile(trace)
    try:
        runpy.run_path(str(checkout / "pretrain_gpt.py"), run_name="__main__")
    finally:
        sys.setprofile(None)
        (folder / "trace.json").write_text(json.dumps(trace.steps[-1:]), encoding="utf-8")


def trace_step(checkout: Path) -> dict[str, Any]:
    """Trace a tiny run of a checkout of megaframe in a process of its own.

    Returns:
        The functions from the trainer to the first block, and the calls and files of a step.

    Raises:
        RuntimeError: The run failed, with the end of its output.
    """
    checkout = checkout.resolve()
    paths = os.pathsep.join(map(str, (checkout, checkout / "kernels")))
    environment = {**os.environ, "PYTHONPATH": paths}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = json.dumps({"text": "a few words of a corpus " * 100})
        (folder / "corpus.jsonl").write_text(text + "\n", encoding="utf-8")
        prepare = [str(checkout / "tools/preprocess_data.py"), "--tokenizer", "bytes"]
        prepare += ["--input", str(folder / "corpus.jsonl"), "--output", str(folder / "tokens")]
        train = [str(Path(__file__).resolve()), str(checkout), str(folder)]
        for arguments in (prepare, train):
            completed = subprocess.run(
                [sys.executable, *arguments],
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
            )
            if completed.returncode:
                raise RuntimeError(
                    f"{arguments[0]} failed:\n{(completed.stdout + completed.stderr)[-4000:]}"
                )
        (step,) = json.loads((folder / "trace.json").read_text(encoding="utf-8"))
    return {
        "block_calls": len(step["path"]),
        "block_files": len({call.partition(":")[0] for call in step["path"]}),
        "block_path": step["path"],
        "step_calls": step["calls"],
        "step_files": len(step["files"]),
    }


if __name__ == "__main__":
    train_traced(Path(sys.argv[1]), Path(sys.argv[2]))
