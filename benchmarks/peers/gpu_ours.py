"""megaframe on a GPU: the pipeline and optimizer of a run, on random tokens and weights.

Weights are drawn on the GPU, in an order on which no layout could rely. Drawing billions of them on
the host, as a run does once, would take longer than the measurement.
"""

from __future__ import annotations

import json

import torch
from gpu_workload import make_batches, profile_steps, read, run
from torch import Tensor

from megaframe.architecture.spec import Constant, Normal
from megaframe.config import RunConfig
from megaframe.data.microbatch import Microbatch
from megaframe.distributed.mesh import Mesh
from megaframe.layout import Layout
from megaframe.metrics import StepTimer
from megaframe.training.train_step import TrainStep


class Training:
    """Steps of a run on one rank."""

    def __init__(self, config: RunConfig, device: torch.device) -> None:
        train = config.train
        self.mesh = Mesh(Layout.from_parallel(config.parallel, 1), device=device.type)
        self._timer = StepTimer.make_for_device(self.mesh.device)
        self.train_step = train_step = TrainStep(config, self.mesh, self._timer.time)
        self.kernels = [
            f"{name}={active}" for name, active in train_step.kernels.list_active().items()
        ]
        for bucket in train_step.sharded_parameters.buckets:
            for parameter, _, weights in bucket.iterate_pieces(bucket.weights, bucket.master_span):
                init = parameter.spec.init
                if isinstance(init, Normal):
                    weights.normal_(0.0, init.std)
                else:
                    assert isinstance(init, Constant), "no layer comes from outside"
                    weights.fill_(init.value)
        train_step.optimizer.begin()
        self._make = make_batches(config, device)
        self._tokens = train.global_batch * train.seq
        self._microbatches = train.global_batch // train.microbatch
        self._samples = torch.arange(train.microbatch, device=device)
        self._count = 0
        self._timer.start()
        self._split = self._timer.take()

    def step(self) -> Tensor:
        """Train one step and return the mean loss of a token."""
        with self._timer.time("data"):
            batch = [self._make() for _ in range(self._microbatches)]
            microbatches = [Microbatch(*pair, self._samples) for pair in batch]
        with self._timer.time("compute"):
            result = self.train_step.train(microbatches, self._count, 1.0 / self._tokens)
        self._count += 1
        self._split = self._timer.take()
        return result.loss / self._tokens

    def parts(self) -> dict[str, float]:
        """Return the seconds of each part of the last step."""
        return {name: spent / 1e9 for name, spent in self._split.sum_parts().items() if spent}


def main() -> None:
    config, device, trace = read()
    training = Training(config, device)
    results = run(training.step, config, device, training.kernels)
    # As in a run, the previous step is still running when the last step is launched.
    for _ in range(2):
        training.step()
    results["parts"] = training.parts()
    print(json.dumps(results), flush=True)
    print(json.dumps({**results, **profile_steps(training.step, device, trace)}))
    training.mesh.close()


if __name__ == "__main__":
    main()
