"""Losses of the first steps of pretraining, beside nanoGPT and plain PyTorch.

python benchmarks/cpu/pretraining_losses.py --nanogpt ../nanoGPT --data runs/demo-chat-data/sources

All three begin with the same weights of a GPT-2 without biases, in fp32, and get the same batches
and learning rates. Nothing is timed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness import PEERS, describe_measurement
from recorded_batches import write_batches
from safetensors.torch import save_file

import megaframe
from megaframe.config import load

ROOT = Path(__file__).resolve().parents[2]
SEQ, BATCH, MICROBATCHES = 256, 16, 2
MODEL = {"layers": 4, "heads": 4, "hidden": 256, "ffn": 1024, "vocab": 4096}
OPTIMIZER = {"beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1, "clip": 1.0}
EARLY, TOLERANCE = 20, 1e-5
"""The first steps, in which losses may differ by rounding alone; later this difference grows."""


def main() -> None:
    """Train all, print their losses, and say whether they agree."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", nargs="+", required=True, metavar="PREFIX", help="token files")
    parser.add_argument("--nanogpt", type=Path, help="a checkout of nanoGPT")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--write", type=Path, metavar="FILE.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        losses, versions = compare(Path(folder), arguments)
    print("".join(f"{name:>12}" for name in ("step", *losses)))
    for step in sorted({1, EARLY, *range(50, arguments.steps, 50), arguments.steps}):
        print(f"{step:>12}" + "".join(f"{values[step - 1]:>12.6f}" for values in losses.values()))
    ours = losses["megaframe"]
    for name, values in losses.items():
        if name != "megaframe":
            gaps = [abs(one - other) for one, other in zip(ours, values, strict=True)]
            early = max(gaps[:EARLY])
            verdict = "within" if early <= TOLERANCE else "NOT within"
            print(
                f"{name}: largest difference of {EARLY} steps {early:.1e}, {verdict} "
                f"{TOLERANCE:.0e}; of {len(gaps)} steps {max(gaps):.1e}"
            )
    if arguments.write:
        document = {**describe_measurement(), "losses": losses, "versions": versions}
        arguments.write.write_text(json.dumps(document, indent=1) + "\n")


def compare(
    folder: Path, arguments: argparse.Namespace
) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Return the losses of all trainers by name, and the peers' versions."""
    words = [f"{name}={value}" for name, value in make_keys(folder / "run", arguments).items()]
    config = load(None, words)
    tensors = megaframe.build_model(config).tensors
    weights = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(weights, folder / "weights.safetensors")
    write_batches(config, arguments.steps, folder / "batches.safetensors")
    subprocess.run([sys.executable, "pretrain_gpt.py", *words], cwd=ROOT, check=True)
    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    losses = {"megaframe": [line["loss"] for line in lines]}
    settings = {
        **{"seq": SEQ, "microbatches": MICROBATCHES, "rates": [line["lr"] for line in lines]},
        **MODEL,
        **OPTIMIZER,
    }
    versions: dict[str, Any] = {}
    for name in ("plain", *(["nanogpt"] if arguments.nanogpt else [])):
        chosen = ("--nanogpt", str(arguments.nanogpt.resolve())) if name == "nanogpt" else ()
        answer = run_peer(folder, json.dumps(settings), chosen)
        losses[name], versions[name] = answer["losses"], answer["versions"]
    return losses, versions


def make_keys(run: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the keys of our run."""
    model = {f"model.{name}": value for name, value in MODEL.items()}
    optimizer = {f"optim.{name}": value for name, value in OPTIMIZER.items()}
    data = ", ".join(f"{{path: {Path(prefix).resolve()}}}" for prefix in arguments.data)
    return {
        **{"run.dir": str(run), "run.device": "cpu", "train.precision": "fp32"},
        **model,
        **{"model.norm": "layernorm", "model.position": "learned", "model.activation": "gelu"},
        **{"model.bias": "false", "model.tie_embeddings": "true"},
        **{"train.seq": SEQ, "train.global_batch": BATCH, "train.steps": arguments.steps},
        **{"train.microbatch": BATCH // MICROBATCHES, "train.eval_every": 0},
        **optimizer,
        **{"optim.lr": 1e-3, "optim.min_lr": 1e-4, "optim.warmup": 20, "metrics.every": 50},
        **{"data.sources": f"[{data}]", "data.split": "[1,0,0]", "checkpoint.every": 0},
    }


def run_peer(folder: Path, settings: str, chosen: tuple[str, ...]) -> dict[str, Any]:
    """Return what a peer says of its run."""
    command = [
        *(sys.executable, str(PEERS / "pretraining_loop.py"), *chosen),
        *("--weights", str(folder / "weights.safetensors")),
        *("--batches", str(folder / "batches.safetensors"), "--settings", settings),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


if __name__ == "__main__":
    main()
