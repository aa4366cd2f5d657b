"""Muon: momentum with orthogonalised matrices (Jordan et al. 2024), each on one owner.

A matrix can be orthogonalised only as a whole. Its pieces, under any layout, are therefore sent to
one rank, and the result is sent back, so the answer is that of one process. As many buckets as
there are ranks are updated together, and their matrices are distributed by work. All ranks then
have the same amount of work, and about one bucket is in transit on each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from megaframe.data_parallel.bucket import Bucket
from megaframe.data_parallel.partition import Division
from megaframe.distributed.collectives import Group
from megaframe.distributed.nccl_communicators import connect_pairs
from megaframe.optim.elementwise import Change, Descent, Elementwise, MomentumOptions, Speed
from megaframe.optim.matrix_gather import Boxes, Exchange, Piece, deal
from megaframe.optim.optimizer_state import Keeping
from megaframe.optim.rule import Step
from megaframe.parameters.parameter import Precision

_COEFFICIENTS = 3.4445, -4.7750, 2.0315
"""Of x, x^3 and x^5: steep at 0, and near 1 elsewhere up to x = 1 (Jordan et al. 2024)."""
_STEPS = 5
_SCALE = 0.2
"""Root mean square of an update: about AdamW's, so that one rate fits both (Liu et al. 2025)."""


class Muon:
    """The rule of a bucket of matrices. group: the ranks that together hold one copy of them.
    divisions: how the bucket is divided on each of these ranks. after: changes that follow Muon's
    own."""

    def __init__(
        self,
        bucket: Bucket,
        options: MomentumOptions,
        keeping: Keeping,
        precision: Precision,
        group: Group,
        divisions: Sequence[Division],
        after: Sequence[Change] = (),
    ) -> None:
        self._bucket, self._group = bucket, group
        changes = [Descent(options.rates), *after]
        self._speed = Elementwise(bucket.weights, [Speed(options, keeping)], keeping)
        self._descent = Elementwise(bucket.weights, changes, keeping)
        # Entries of a large matrix of norm 1 are too small for fp16.
        half = precision.compute == torch.float16
        self._dtype = torch.float32 if half else precision.compute
        self._boxes = Boxes(
            [_within(division, division.own) for division in divisions],
            [_within(division, division.kept) for division in divisions],
        )
        self._wholes = [
            Piece(index, box)
            for index, parameter in enumerate(bucket.parameters)
            for box in parameter.spec.matrices
        ]
        self._exchange: Exchange | None = None
        connect_pairs(self._group, bucket.device)

    @property
    def work(self) -> list[float]:
        """The cost of each matrix; only the ratios matter."""
        sizes = [sorted(self._sides(whole)) for whole in self._wholes]
        return [float(few * few * (2 * many + few)) for few, many in sizes]

    def give_to(self, owners: Sequence[int]) -> None:
        """Set which rank of the group owns each matrix."""
        self._exchange = Exchange(self._group, self._boxes, self._wholes, owners, self._dtype)

    @property
    def state(self) -> dict[str, Tensor]:
        """All state, as it is stored in memory."""
        return {**self._speed.state, **self._descent.state}

    def start(self, weights: Tensor) -> None:
        """Begin a run: the weights have their initial values."""
        self._descent.start(weights)

    def settle(self) -> None:
        """Return when everything that was changed is back where it is kept."""
        self._speed.settle()
        self._descent.settle()

    def shown(self, *, to_load: bool = False) -> Mapping[str, Tensor]:
        """Return the state for a checkpoint, each tensor as long as the weights."""
        return {**self._speed.shown(to_load=to_load), **self._descent.shown(to_load=to_load)}

    def load(self) -> None:
        """Take back the tensors that were shown, which have been changed."""
        self._speed.load()
        self._descent.load()

    def update(
        self, weights: Tensor, grads: Tensor, step: Step, rounded: Tensor | None = None
    ) -> Iterator[None]:
        """m = momentum m + g; w -= lr (scale * orthogonal(g + momentum m) + decay w). Weights do
        not travel, only what the gradients have become, so weights can come in chunks."""
        assert self._exchange is not None, "every matrix has an owner before the first update"
        self._speed.update(weights, grads, step)
        gives = self._bucket.pieces(self._own(grads), self._bucket.own)
        arriving = self._exchange.collect([piece for _, _, piece in gives], grads.device)
        yield
        wholes = self._exchange.wholes(arriving.wait())
        made = {index: self._direction(index, whole) for index, whole in wholes.items()}
        arriving = self._exchange.spread(made, grads.device)
        yield
        takes = [piece for _, _, piece in self._bucket.pieces(grads, self._bucket.kept)]
        for index, place, direction in self._exchange.taken(arriving.wait()):
            takes[index][place].copy_(direction)
        self._descent.update(weights, grads, step, rounded)

    def _own(self, kept: Tensor) -> Tensor:
        start = self._bucket.own.start - self._bucket.kept.start
        return kept[start : start + self._bucket.own.stop - self._bucket.own.start]

    def _sides(self, whole: Piece) -> tuple[int, int]:
        """Return the number of outputs and of inputs of a matrix."""
        inputs = self._bucket.parameters[whole.tensor].spec.inputs
        return math.prod(whole.box.shape[:-inputs]), math.prod(whole.box.shape[-inputs:])

    def _direction(self, index: int, whole: Tensor) -> Tensor:
        sides = self._sides(self._wholes[index])
        scale = _SCALE * math.sqrt(max(sides))
        return orthogonal(whole.view(sides)).mul_(scale).view(whole.shape)


def _within(division: Division, span: slice) -> list[Piece]:
    return [Piece(number, box) for number, box, _ in division.pieces(span)]


def orthogonal(matrix_OI: Tensor) -> Tensor:
    """Return roughly U V^T of a matrix U S V^T: its singular values become about 0.7 to 1.2, by
    five Newton-Schulz iterations of a quintic (Jordan et al. 2024), in the matrix's own type."""
    a, b, c = _COEFFICIENTS
    wide = torch.promote_types(matrix_OI.dtype, torch.float32)
    norm = torch.linalg.vector_norm(matrix_OI, dtype=wide).clamp_min(torch.finfo(wide).tiny)
    x = (matrix_OI / norm).to(matrix_OI.dtype)
    tall = x.shape[0] > x.shape[1]
    x = x.t() if tall else x
    for _ in range(_STEPS):
        gram = x @ x.t()
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.t() if tall else x).contiguous()


def together(buckets: Sequence[Bucket], group: Group) -> list[list[Bucket]]:
    """Return the buckets that are trained, in order, in lists of those that are updated together.
    Gives the matrices of Muon their owners."""
    found: list[list[Bucket]] = []
    window: list[Bucket] = []
    for bucket in buckets:
        if bucket.optimizer is None:
            continue
        if _muon(bucket) is None:
            found.append([bucket])
            continue
        if not window:
            found.append(window)
        window.append(bucket)
        if len(window) == group.size:
            window = []
    for together in found:
        muons = [muon for muon in map(_muon, together) if muon is not None]
        owners = iter(deal([work for muon in muons for work in muon.work], group.size))
        for muon in muons:
            muon.give_to([next(owners) for _ in muon.work])
    return found


def _muon(bucket: Bucket) -> Muon | None:
    return bucket.optimizer if isinstance(bucket.optimizer, Muon) else None
