"""The bytes that autograd really keeps of one block, counted in storages."""

import torch


def measure_block_bytes(stage, microbatch, buckets):
    """Return the bytes that the first block keeps, not counting its input, its weights, the rotary
    tables and scalars."""
    context = stage.make_context(microbatch, scale=torch.ones((), dtype=torch.float64))
    rows = context.rows.padded // context.rows.ranks
    leaf = torch.randn(rows, stage.config.model.hidden).to(stage.precision.compute)
    leaf.requires_grad_()
    known = [bucket.parameters[0].value for bucket in buckets] + [leaf]
    tables = [table for rotary in context.rotary.values() for table in (rotary.cos, rotary.sin)]
    known = {tensor.untyped_storage().data_ptr() for tensor in (*known, *tables)}
    storages = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known and tensor.numel() and tensor.dim():
            storages[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = stage.blocks[0](leaf, context, stage.make_pass_state())
    storages.pop(output.untyped_storage().data_ptr(), None)
    turned = {table.shape for table in tables}  # also skips the negated table for backward
    return sum(size for size, tensor in storages.values() if tensor.shape not in turned)
