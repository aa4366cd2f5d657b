"""The bytes that autograd really keeps of one block, counted in storages."""

import torch
from patience import PATIENCE

from megaframe.config import RunConfig
from megaframe.data.microbatch import Microbatch
from megaframe.distributed.mesh import Mesh
from megaframe.layout import Layout
from megaframe.metrics import StepTimer
from megaframe.planner.activations import compute_block_bytes
from megaframe.training.train_step import TrainStep


def measure_block_bytes(stage, microbatch, buckets):
    """Return the bytes that the first block keeps, not counting its input, its weights, the rotary
    tables and scalars."""
    inputs = stage.make_inputs(microbatch, scale=torch.ones((), dtype=torch.float64))
    rows = inputs.rows.padded // inputs.rows.ranks
    leaf = torch.randn(rows, stage.config.model.stream_width).to(stage.precision.compute)
    leaf.requires_grad_()
    known = [bucket.parameters[0].value for bucket in buckets] + [leaf]
    tables = [table for rotary in inputs.rotary.values() for table in (rotary.cos, rotary.sin)]
    known = {tensor.untyped_storage().data_ptr() for tensor in (*known, *tables)}
    storages = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known and tensor.numel() and tensor.dim():
            storages[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = stage.blocks[0](leaf, inputs, stage.make_pass_state())
    storages.pop(output.untyped_storage().data_ptr(), None)
    turned = {table.shape for table in tables}  # also skips the negated table for backward
    return sum(size for size, tensor in storages.values() if tensor.shape not in turned)


def measure_block(model, recompute, tensor, chunks):
    """Train one step of one block -> the bytes that it keeps, the planned bytes, and the bytes
    moved over the tensor axis."""
    config = RunConfig(
        model={"layers": 1, "hidden": 64, "heads": 4, "vocab": 64, **model},
        train={"seq": 16, "global_batch": 2, "microbatch": 2, "recompute": recompute},
        parallel={"tensor": tensor, "tensor_chunks": chunks},
    )
    mesh = Mesh(Layout(tensor=tensor), device="cpu", timeout=PATIENCE)
    train_step = TrainStep(config, mesh, StepTimer().time)
    train_step.optimizer.initialize(1)
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    microbatch = Microbatch(tokens, tokens, torch.arange(2))
    saved = measure_block_bytes(
        train_step.stages[0], microbatch, train_step.sharded_parameters.buckets
    )
    group = mesh.group("tensor")
    group.traffic.take()
    train_step.train([microbatch], 0, 1.0)
    bytes_sent, _ = group.traffic.take()
    mesh.finish()
    return (
        saved,
        compute_block_bytes(config.model, config.parallel, config.train, 0) // tensor,
        bytes_sent,
    )
