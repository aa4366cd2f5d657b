"""A run on one rank of many, with the real engine and without any other rank or any number.

The mesh is that of the whole world, the model, the optimizer and the schedule are those of the
rank, and every action of a step is run; but tensors have no content and nothing travels. What is
counted on the way, memory and bytes, is therefore what the code does and not what a formula says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch

from megaframe.config import RunConfig
from megaframe.config.schema import Kernels
from megaframe.layout import Layout
from megaframe.mesh import Mesh
from megaframe.microbatch import Microbatch
from megaframe.pipeline import Pipeline
from megaframe.rehearsal.hollow import Hollow, Ledger
from megaframe.schedule import Action, Kind

__all__ = ["Counted", "Ledger", "counted_step", "rehearse"]


@dataclass(frozen=True)
class Counted:
    """Of one step of a rank. buffers: bytes of weights, values and gradients. optimizer: of its
    state. rooms: for what transfers bring on a CPU, and what comes from the host's memory. kept:
    most bytes beside these between two actions, which are activations and messages on their way.
    peak: most at any time, all counted. traffic: bytes handed to collectives and links, by axes.
    actions: that were run. host: bytes kept in the host's memory, which nothing else counts."""

    buffers: int
    optimizer: int
    rooms: int
    kept: int
    peak: int
    traffic: Mapping[str, int]
    actions: int
    host: int

    @property
    def temporaries(self) -> int:
        """Most bytes that single operations needed beside all that is kept."""
        return self.peak - self.buffers - self.optimizer - self.rooms - self.kept


def rehearse(config: RunConfig, layout: Layout, rank: int) -> Counted:
    """One step of `rank` as the config says. Raises `ValueError` for a rank outside the layout.

    Pairs of passes (`parallel.expert_overlap`) run one after the other, fused products over
    symmetric memory, kernels and compiled pieces as plain code, and no step is a graph: all need
    what is not here.
    """
    parallel = {"expert_overlap": False, "symmetric_memory": "off"}
    train: dict[str, object] = {"compile": "none", "cuda_graph": False}
    config = config.model_copy(
        update={
            "parallel": config.parallel.model_copy(update=parallel),
            "train": config.train.model_copy(update=train),
            "kernels": Kernels(),
        }
    )
    with Hollow() as ledger:
        mesh = Mesh(layout, alone=rank)
        return counted_step(config, mesh, ledger)


def counted_step(config: RunConfig, mesh: Mesh, ledger: Ledger) -> Counted:
    """Build what this rank of the mesh runs, and count one step of it."""
    watch = _Between(ledger)
    pipeline = Pipeline(config, mesh, lambda part: nullcontext())
    pipeline.follow(watch.follow)
    optimizer = pipeline.optimizer
    optimizer.initialise(config.run.seed)
    mesh.take_traffic()
    count = config.train.global_batch // (config.train.microbatch * mesh.layout.data)
    microbatches = [_microbatch(config)] * count
    state, host = optimizer.held()["optimizer"], optimizer.route.bytes

    def rooms() -> int:
        return optimizer.buffers.rooms + optimizer.route.rooms

    watch.begin(lambda: optimizer.buffers.bytes + rooms() + state + host)
    outcome = pipeline.train(microbatches, 0, 1.0)
    del outcome
    return Counted(
        optimizer.buffers.bytes,
        state,
        rooms(),
        watch.most,
        ledger.peak - watch.before - host,
        mesh.take_traffic(),
        watch.actions,
        host,
    )


class _Between:
    """What lives between the actions of a step; `follow` is for the engine, which tells each."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._held: Callable[[], int] | None = None
        self.most = self.actions = self.before = 0

    def begin(self, held: Callable[[], int]) -> None:
        """The step begins. held: bytes of what is there to stay."""
        self._held = held
        self.before = self._ledger.live - held()
        self._ledger.mark()

    @contextmanager
    def follow(self, action: Action, kind: str) -> Iterator[None]:
        """Around an action of a step; what the update needs is the optimizer's own."""
        yield
        if action.kind is not Kind.UPDATE and self._held is not None:
            self.actions += 1
            self.most = max(self.most, self._ledger.live - self.before - self._held())


def _microbatch(config: RunConfig) -> Microbatch:
    """Samples of one document each, of tokens from all over the vocabulary."""
    train, vocab = config.train, config.model.vocab
    assert vocab is not None, "the config is resolved"
    shape = (train.microbatch, train.seq)
    tokens = (torch.arange(shape[0] * shape[1]) * 7919 % vocab).view(shape)
    documents = torch.zeros_like(tokens) if config.data.reset_attention else None
    return Microbatch(tokens, tokens, torch.arange(shape[0]), None, documents)
