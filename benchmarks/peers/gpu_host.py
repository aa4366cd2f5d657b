"""The host time of a block: the slope of a step's host time between two numbers of layers.

There are so few layers that the GPU's queue never fills, and so few tokens that the GPU is soon
done. What a step costs independently of its layers cancels.
"""

from __future__ import annotations

import gc
import json
from typing import Any

import torch
from gpu_ours import Training
from gpu_workload import WARMUP, measure_host_seconds, read

from megaframe.config import RunConfig

_LAYERS = 2, 6
_SEQ = 256


def measure_host_time(config: RunConfig, device: torch.device, layers: int) -> float:
    """Return the host seconds of a step with this many layers."""
    sections = config.model_dump()
    sections["model"]["layers"] = layers
    sections["train"] |= {"seq": min(_SEQ, config.train.seq), "global_batch": 1, "microbatch": 1}
    training = Training(RunConfig(**sections), device)
    for _ in range(WARMUP):
        training.step()
    seconds = measure_host_seconds(training.step, device)
    training.mesh.close()
    del training
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return seconds


def main() -> None:
    config, device, _ = read()
    few, many = (measure_host_time(config, device, layers) for layers in _LAYERS)
    per_block = (many - few) / (_LAYERS[1] - _LAYERS[0])
    results: dict[str, Any] = {"host_seconds_per_block": per_block, "host_seconds": [few, many]}
    print(json.dumps(results))


if __name__ == "__main__":
    main()
