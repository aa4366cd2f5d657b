"""nanoGPT's own train.py with the command of its README for a CPU, then its validation loss.

One number of that command differs: it evaluates every 2000 iterations instead of every 250. The
time is then that of training, and the checkpoint is the model after exactly `--steps` updates. The
first and the last iteration, which evaluate, are not timed.
"""

from __future__ import annotations

import pickle
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from nanogpt_checkout import import_model, read_revision
from shakespeare_settings import SETTINGS, Text, make_parser, read_text
from workload import emit, read_peak_rss_bytes

ITERATION = re.compile(r"^iter (\d+): loss [\d.]+, time ([\d.]+)ms", re.MULTILINE)


def prepare(folder: Path, checkout: Path, text: Text) -> None:
    """Create what train.py needs in its working folder. The checkout is not changed."""
    data = folder / "data" / "shakespeare_char"
    data.mkdir(parents=True)
    text.training.tofile(data / "train.bin")
    text.validation.tofile(data / "val.bin")
    (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": text.vocab}))
    shutil.copy(checkout / "configurator.py", folder)


def make_command(checkout: Path, steps: int) -> list[str]:
    """Return the README's command line for config/train_shakespeare_char.py."""
    shape = SETTINGS
    return [
        sys.executable,
        str(checkout / "train.py"),
        str(checkout / "config" / "train_shakespeare_char.py"),
        "--device=cpu",
        "--compile=False",
        "--eval_iters=20",
        "--log_interval=1",
        f"--block_size={shape.seq}",
        f"--batch_size={shape.batch}",
        f"--n_layer={shape.layers}",
        f"--n_head={shape.heads}",
        f"--n_embd={shape.hidden}",
        f"--max_iters={steps}",
        f"--lr_decay_iters={steps}",
        "--dropout=0.0",
        f"--eval_interval={steps}",
        "--always_save_checkpoint=True",
    ]


def train(folder: Path, checkout: Path, steps: int) -> list[float]:
    """Run train.py and return the seconds of its iterations, without the two that evaluate."""
    result = subprocess.run(
        make_command(checkout, steps), cwd=folder, capture_output=True, text=True, check=False
    )
    if result.returncode != 0:
        sys.exit(f"train.py ended with {result.returncode}:\n{result.stderr[-4000:]}")
    timed = {int(number): float(time) / 1e3 for number, time in ITERATION.findall(result.stdout)}
    return [timed[number] for number in range(1, steps)]


def compute_validation_loss(checkpoint: Path, checkout: Path, text: Text) -> float:
    """Return the mean cross entropy in nats over all windows of the validation text."""
    import torch

    saved: dict[str, Any] = torch.load(checkpoint, weights_only=True)
    module = import_model(checkout)
    model = module.GPT(module.GPTConfig(**saved["model_args"]))
    model.load_state_dict(saved["model"])
    model.eval()
    windows, seq = text.validation_windows, SETTINGS.seq
    ids = torch.from_numpy(text.validation.astype(np.int64))
    tokens, targets = ids[: windows * seq].view(-1, seq), ids[1 : windows * seq + 1].view(-1, seq)
    total = 0.0
    with torch.no_grad():
        for window, window_targets in zip(tokens.split(128), targets.split(128), strict=True):
            total += model(window, window_targets)[1].item() * window.numel()
    return total / tokens.numel()


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--nanogpt", type=Path, required=True, help="a checkout of nanoGPT")
    arguments = parser.parse_args()
    text = read_text(arguments.text)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder, arguments.nanogpt, text)
        seconds = train(folder, arguments.nanogpt, arguments.steps)
        peak = read_peak_rss_bytes(resource.RUSAGE_CHILDREN)
        checkpoint = folder / "out-shakespeare-char" / "ckpt.pt"
        loss = compute_validation_loss(checkpoint, arguments.nanogpt, text)
    emit(
        tokens_per_second=SETTINGS.tokens_per_step * len(seconds) / sum(seconds),
        best_tokens_per_second=SETTINGS.tokens_per_step / min(seconds),
        peak_rss_bytes=peak,
        loss=loss,
        versions={"torch": version("torch"), "nanogpt": read_revision(arguments.nanogpt)},
    )


if __name__ == "__main__":
    main()
