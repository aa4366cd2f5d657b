"""A microbatch of random tokens, with which parts of a model are measured."""

from __future__ import annotations

import torch

from megaframe.config import ModelConfig, TrainConfig
from megaframe.context_parallel.axis import ContextParallel
from megaframe.data.microbatch import Microbatch, look_ahead, select_context_part


def make_random_microbatch(
    model: ModelConfig,
    train: TrainConfig,
    context: ContextParallel,
    device: torch.device,
    *,
    documents: bool,
) -> Microbatch:
    """Return this context rank's part of a microbatch of random tokens, all of which have a label.

    Args:
        model: Has the vocabulary.
        train: Has the shape.
        context: The ranks that divide samples.
        device: Where to put it.
        documents: Whether each sample is marked as a document.
    """
    shape = train.microbatch, train.seq
    generator = torch.Generator().manual_seed(1)
    tokens, labels = torch.randint(0, model.vocab or 1, (2, *shape), generator=generator).to(device)
    documents_BS = torch.zeros_like(tokens) if documents else None
    samples = torch.arange(shape[0], device=device)
    microbatch = Microbatch(tokens, labels, samples, None, documents_BS)
    microbatch = look_ahead(microbatch, model.mtp_depth)
    return select_context_part(microbatch, context.index, context.size)
