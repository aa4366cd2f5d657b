"""Single updates of a built model, and copies of its weights."""

import torch

from megaframe.pipeline_parallel.stage_pass import StagePass


def take_step(built, microbatch, step, scale=1.0):
    built.sharded_parameters.start_step()
    scale = torch.as_tensor(scale * built.optimizer.loss_scale, dtype=torch.float64)
    built.stage.start_step(step)
    loss = built.stage.forward(StagePass(0, last=True), microbatch, scale)
    built.stage.backward(StagePass(0, last=True))
    built.sharded_parameters.wait_for_gradients()
    return loss, built.optimizer.update()


def copy_weights(built):
    return {
        parameter.spec.name: piece
        for bucket in built.sharded_parameters.buckets
        for parameter, _, piece in bucket.iterate_pieces(bucket.weights, bucket.master_span)
    }
