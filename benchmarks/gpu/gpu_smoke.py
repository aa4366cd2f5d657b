"""One step of the demo on this GPU, beside the same step on the CPU.

    python benchmarks/gpu/gpu_smoke.py [--dry]

Weights and tokens are drawn on the host, so both begin alike; in fp32 the losses agree to rounding.
Prints one JSON object after every number, each with all that is known until then.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]
_TINY = ("model.layers=1", "train.global_batch=2", "train.microbatch=2", "train.seq=32")
_ROUNDING = {"fp32": 1e-4, "bf16": 2e-2}
"""Largest difference to the CPU's loss in fp32, relative to it. In fp32 the sums of up to 4,096
terms differ in their order only."""


def train_step(device: str, precision: str, overrides: tuple[str, ...]) -> dict[str, Any]:
    """Train one step of the demo. Return its loss, the norm of its gradients, and the kernels."""
    import torch

    from megaframe.config import load
    from megaframe.data.microbatch import Microbatch
    from megaframe.distributed.mesh import Mesh
    from megaframe.layout import Layout
    from megaframe.training.train_step import TrainStep

    config = load(str(ROOT / "configs/demo.yaml"), [f"train.precision={precision}", *overrides])
    train = config.train
    mesh = Mesh(Layout.from_parallel(config.parallel, 1), device=device)
    step = TrainStep(config, mesh)
    step.sharded_parameters.initialize_weights(config.run.seed)
    step.optimizer.begin()
    shape = (train.microbatch, train.seq + 1)
    generator = torch.Generator().manual_seed(config.run.seed)
    samples = torch.arange(train.microbatch).to(mesh.device)

    def draw() -> Microbatch:
        words = torch.randint(0, config.model.vocab or 1, shape, generator=generator, device="cpu")
        words = words.to(mesh.device)
        return Microbatch(words[:, :-1], words[:, 1:], samples)

    count = train.global_batch // train.microbatch
    tokens = train.global_batch * train.seq
    result = step.train([draw() for _ in range(count)], 0, 1.0 / tokens)
    outcome = {"loss": float(result.loss) / tokens, "kernels": step.kernels.list_active()}
    mesh.close()
    return outcome


def compare(loss: float, reference: float, precision: str) -> str | None:
    """Return in what a loss differs from the CPU's by more than its type explains, or None."""
    difference = abs(loss / reference - 1)
    if difference <= _ROUNDING[precision]:
        return None
    return f"loss {loss:.6f} in {precision}, {reference:.6f} on the CPU: {difference:.1e} apart"


def main() -> int:
    """Run the command. The status is 1 if a loss is not the CPU's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry", action="store_true", help="a tiny step")
    dry = parser.parse_args().dry
    overrides = _TINY if dry else ()
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")
    found: dict[str, Any] = {"python": sys.version.split()[0], "devices": torch.cuda.device_count()}
    if device == "cuda":
        found["memory"] = torch.cuda.get_device_properties(0).total_memory
        found["capability"] = ".".join(map(str, torch.cuda.get_device_capability()))
    print(json.dumps(found), flush=True)
    cpu = train_step("cpu", "fp32", overrides)
    found["cpu_loss"] = cpu["loss"]
    print(json.dumps(found), flush=True)
    for precision in _ROUNDING:
        outcome = train_step(device, precision, overrides)
        found |= {f"loss_{precision}": outcome["loss"], "kernels": outcome["kernels"]}
        if trouble := compare(outcome["loss"], cpu["loss"], precision):
            found["trouble"] = trouble
        print(json.dumps(found), flush=True)
    return 1 if "trouble" in found else 0


if __name__ == "__main__":
    sys.exit(main())
