"""megaframe on a GPU: its pipeline and optimizer as a run has them, on random tokens and weights.

Weights are drawn on the GPU, in no order that a layout could rely on: drawing billions of them on
the host, as a run does once, would take longer than the measurement.
"""

from __future__ import annotations

import torch
from gpu_workload import batches, read, run
from torch import Tensor

from megaframe.layout import Layout
from megaframe.mesh import Mesh
from megaframe.meter import StepTimer
from megaframe.microbatch import Microbatch
from megaframe.pipeline import Pipeline
from megaframe.spec import Normal


def main() -> None:
    config, device = read()
    mesh = Mesh(Layout.from_parallel(config.parallel, 1), device=device.type)
    pipeline = Pipeline(config, mesh, StepTimer().time)
    for bucket in pipeline.optimizer.buckets:
        for parameter, _, weights in bucket.pieces(bucket.weights, bucket.kept):
            init = parameter.spec.init
            if isinstance(init, Normal):
                weights.normal_(0.0, init.std)
            else:
                weights.fill_(init.value)
        bucket.begin()
    make, train = batches(config, device), config.train
    tokens = train.global_batch * train.seq
    samples = torch.arange(train.microbatch, device=device)
    count = 0

    def step() -> Tensor:
        nonlocal count
        microbatches = [
            Microbatch(*make(), samples) for _ in range(train.global_batch // train.microbatch)
        ]
        outcome = pipeline.train(microbatches, count, 1.0 / tokens)
        count += 1
        return outcome.loss / tokens

    kernels = [f"{name}={active}" for name, active in pipeline.kernels.active().items()]
    run(step, config, device, kernels)
    mesh.close()


if __name__ == "__main__":
    main()
