"""A microbatch of random tokens, with which parts of a model are measured."""

from __future__ import annotations

import torch

from megaframe.config import RunConfig
from megaframe.context_parallel.axis import ContextParallel
from megaframe.data.microbatch import Microbatch, look_ahead, select_context_part


def make_random_microbatch(
    config: RunConfig, context: ContextParallel, device: torch.device
) -> Microbatch:
    """Return this context rank's part of a microbatch of random tokens, all of which have a label.

    Args:
        config: The run.
        context: The ranks that divide samples.
        device: Where to put it.
    """
    model, shape = config.model, (config.train.microbatch, config.train.seq)
    generator = torch.Generator().manual_seed(1)
    tokens, labels = torch.randint(0, model.vocab or 1, (2, *shape), generator=generator).to(device)
    documents = torch.zeros_like(tokens) if config.data.reset_attention else None
    samples = torch.arange(shape[0], device=device)
    microbatch = Microbatch(tokens, labels, samples, None, documents)
    microbatch = look_ahead(microbatch, model.mtp_depth)
    return select_context_part(microbatch, context.index, context.size)
