"""Optimizer: from the summed gradients of all buckets to updated weights.

An update has three phases: the norm of the summed gradients; the update of each bucket, with the
clipping factor and the loss scale folded in; and bringing the new weights to where the model
computes. All three run on the device without waiting for the host: if the norm is not finite, every
weight stays as it was, and the host learns of it when it asks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from megaframe.architecture.spec import Box, ParamSpec
from megaframe.config import OptimConfig, TrainConfig
from megaframe.data_parallel.bucket import Bucket
from megaframe.data_parallel.sharded_parameters import ShardedParameters
from megaframe.data_parallel.small_batches import SquaredNorms
from megaframe.distributed.collectives import Group, Pending, all_reduce
from megaframe.distributed.mesh import Mesh
from megaframe.distributed.pending import copy_to_host
from megaframe.ops.kernel_dispatch import NO_KERNELS, Kernels
from megaframe.optim.loss_scale import LossScale
from megaframe.optim.lr_schedule import compute_learning_rate
from megaframe.optim.muon import group_shards
from megaframe.optim.parameter_groups import ParameterGroups
from megaframe.optim.update_rule import OptimizerShard, UpdateStep
from megaframe.parameters.parameter import PRECISIONS

_NAME_BYTES = 512
"""Bytes for the names of parameters with non-finite gradients that ranks send each other."""


@dataclass(frozen=True)
class UpdateResult:
    """The outcome of one optimizer step.

    Attributes:
        grad_norm: Before clipping, fp64 scalar on the device; if it is not finite, nothing was
            updated.
        lr: The learning rate.
        host_norms: Returns, on the host, that norm and the norm of each piece of gradient that this
            rank sums.
        squared_norms: Those of small batches and of the whole one; None if they are not measured.
    """

    grad_norm: Tensor
    lr: float
    host_norms: Callable[[], list[Tensor]]
    squared_norms: SquaredNorms | None = None

    def is_finite(self) -> bool:
        """Return whether weights were updated; waits for the step."""
        return bool(torch.isfinite(self.host_norms()[0]))


@dataclass(frozen=True)
class OptimizerState:
    """What a checkpoint holds of an optimizer besides tensors.

    Attributes:
        updates: Number of updates done.
        loss_scale: Of the next step.
        good_steps: Steps since the last overflow.
        updates_before: Updates of the run before the first one of a parameter, by name, if there
            were any: it was frozen, or its moments started anew. What corrects moments for having
            started at zero counts the parameter's own updates.
    """

    updates: int
    loss_scale: float
    good_steps: int
    updates_before: Mapping[str, int] = field(default_factory=dict)

    def restart(self, trained: Iterable[str], restarted: Collection[str]) -> OptimizerState:
        """Return this state where moments of some parameters start from zero.

        Args:
            trained: Names of all parameters that are trained from now on.
            restarted: Those of them that start anew.
        """
        before = {
            name: self.updates if name in restarted else self.updates_before.get(name, 0)
            for name in trained
        }
        return replace(self, updates_before={n: count for n, count in before.items() if count})


@dataclass(frozen=True)
class _UpdateGroup:
    """Shards that are updated together.

    Attributes:
        shards: All of them.
        phased: Those whose rules have later phases.
        gathered: The buckets whose new values other ranks need.
    """

    shards: Sequence[OptimizerShard]
    phased: Sequence[OptimizerShard]
    gathered: Sequence[Bucket]

    @classmethod
    def make(cls, shards: Sequence[OptimizerShard]) -> _UpdateGroup:
        """Return the group of these shards."""
        phased = [shard for shard in shards if shard.rule is not None and shard.rule.has_phases]
        return cls(shards, phased, [shard.bucket for shard in shards if shard.bucket.gathers])


class Optimizer:
    """Updates the weights of a rank's buckets.

    Attributes:
        shards: The rule of each bucket, in the order of `ShardedParameters.buckets`.
        offload: Where optimizer state is.
    """

    def __init__(
        self,
        optim: OptimConfig,
        train: TrainConfig,
        mesh: Mesh,
        parameters: ShardedParameters,
        groups: ParameterGroups,
        kernels: Kernels = NO_KERNELS,
    ) -> None:
        """Allocate the optimizer state. All ranks of the world must call this.

        Args:
            optim: The section `optim`.
            train: The section `train`.
            mesh: This rank's groups.
            parameters: The buckets, made with `groups.bucketing`.
            groups: How each parameter is trained.
            kernels: The kernels that the run uses.
        """
        self._optim, self._train = optim, train
        self._mesh, self._kernels = mesh, kernels
        self._parameters = parameters
        self._groups, self.offload = groups, groups.offload
        self.shards = [groups.shard(bucket) for bucket in parameters.buckets]
        self._update_groups = [
            _UpdateGroup.make(shards) for shards in group_shards(self.shards, groups.owner_group)
        ]
        self._scale = LossScale(train, optim, mesh.device)
        self._updates, self._updates_before = 0, dict[str, int]()
        self._pending: UpdateResult | None = None
        """The last update, as long as the host does not know its outcome."""
        self._before_update: Callable[[], None] | None = None
        self._piece_kinds: Tensor | None = None

    def initialize(self, seed: int) -> None:
        """Begin with the initial weights."""
        self._parameters.initialize_weights(seed)
        self.begin()

    def begin(self) -> None:
        """Begin a run with the weights as they are."""
        for shard in self.shards:
            shard.begin()

    # Updates.

    @property
    def loss_scale(self) -> float | Tensor:
        """The factor by which the loss of the next step is to be multiplied; under fp16 a scalar on
        the device."""
        return self._scale.value if self._scale.dynamic else 1.0

    def delay_update(self, wait: Callable[[], None]) -> None:
        """Delay the next update until `wait` returns, because weights and state are being read."""
        self._before_update = wait

    def update(self) -> UpdateResult:
        """Clip the summed gradients and update the weights. The host learns the outcome a step
        later, so that it does not have to wait for it."""
        self._count_pending()
        if self._before_update is not None:
            self._before_update()
            self._before_update = None
        lr = compute_learning_rate(self._optim, self._updates, self._train.steps)
        pieces = self._compute_piece_norms()
        # Gradients carry the loss scale of their step; the norm that is clipped and logged does
        # not.
        norm = self._compute_global_norm(pieces) / self._scale.value
        squared_norms = self._collect_squared_norms(pieces)
        # A scalar on the device. The norm is summed over the whole model, so all ranks decide
        # alike.
        finite = torch.isfinite(norm)
        # The divisor is made before the loss scale changes below.
        step = UpdateStep(self._updates + 1, lr, self._compute_divisor(norm), (~finite).float())
        self._scale.update(finite)
        # At ZeRO stage 3 the values here are rounded from the old weights.
        self._parameters.release_blocks()
        for group in self._update_groups:
            # Phase by phase, so that the transfers of all buckets of a group are in flight at once.
            for shard in group.shards:
                shard.start_update(step)
            for shard in group.phased:
                shard.continue_update()
            for shard in group.phased:
                shard.finish_update()
            for bucket in group.gathered:
                bucket.gather()
        # On a GPU the copies run on a separate stream; the host reads them a step later.
        host_norms = copy_to_host([Pending(norm), Pending(pieces)], self._mesh.device)
        self._pending = UpdateResult(norm, lr, host_norms, squared_norms)
        return self._pending

    def _compute_divisor(self, norm: Tensor) -> Tensor:
        """Return the loss scale times the clipping factor, a scalar in master precision."""
        # A new tensor: the loss scale changes before the update reads this.
        divisor = self._scale.value.clone()
        clip = self._optim.clip
        if clip:
            # Dividing by the larger of 1 and norm / clip scales down only, never up.
            divisor *= (norm / clip).clamp_min(1.0)
        return divisor.to(PRECISIONS[self._train.precision].master)

    def _count_pending(self) -> None:
        """Count the last update if it was done; the host waits for it."""
        if self._pending is not None:
            finite, self._pending = self._pending.is_finite(), None
            # A skipped step does not count: schedule and bias correction continue from the last
            # real one.
            self._updates += finite

    # State.

    def synchronize_state(self) -> None:
        """Return when weights and state are back where they are stored. Code other than the rules
        may then read them, or change weights and call `Bucket.publish_weights`."""
        self.offload.synchronize()

    def list_tensors(
        self, *, owned: bool = False, coded: bool = True
    ) -> Iterator[tuple[str, ParamSpec, Box, Tensor]]:
        """Yield everything that a checkpoint holds of the weights and of the optimizer.

        Args:
            owned: Only what this rank saves; else all that this rank has.
            coded: Also weights that are kept as codes, decoded in host memory.

        Yields:
            Key, spec, box and piece.
        """
        # Replicas have equal weights; the first of them saves.
        if owned and self._mesh.group("data_replicate").index:
            return
        for shard in self.shards:
            if coded or not shard.is_coded:
                yield from shard.list_tensors(owned=owned)

    def list_coded(self) -> Iterator[list[tuple[str, ParamSpec, Box, Tensor]]]:
        """Yield the weights that are kept as codes, to be changed one bucket at a time; each is
        coded again before the next one is decoded."""
        for shard in self.shards:
            if shard.is_coded:
                yield list(shard.list_tensors(owned=False))
                shard.bucket.publish_weights()

    def list_moments(self) -> dict[str, tuple[str, ...]]:
        """Return the names of the moments of each trained parameter of the whole model, by its
        name. Those of another rank's parameters are the same as here."""
        return self._groups.list_moments()

    def read_state(self) -> OptimizerState:
        """Return the numbers that a checkpoint holds besides the tensors."""
        self._count_pending()
        return OptimizerState(self._updates, *self._scale.read_state(), self._updates_before)

    def load_state(self, state: OptimizerState) -> None:
        """Continue from `state`; its tensors are already loaded into those of `list_tensors`."""
        self._pending, self._updates = None, state.updates
        self._updates_before = dict(state.updates_before)
        self._scale.load(state.loss_scale, state.good_steps)
        self._parameters.release_blocks()
        for shard in self.shards:
            shard.load(self._updates_before)

    def count_memory_bytes(self) -> dict[str, int]:
        """Return the bytes on this rank's device by kind. `buffers`: values that are not the
        weights themselves, and memory for whole gradients and transfers."""
        buckets = self._parameters.buckets
        weights = sum(bucket.stored.nbytes for bucket in buckets if not bucket.offloaded)
        gradients = sum(bucket.grad_sums.nbytes for bucket in self._parameters.trained)
        state = 0
        if self.offload.device is None:
            rules = [shard.rule for shard in self.shards if shard.rule is not None]
            state = sum(tensor.nbytes for rule in rules for tensor in rule.state.values())
        buffers = max(0, self._parameters.buffers.bytes - weights - gradients)
        buffers += self.offload.staging_bytes
        return {"weights": weights, "gradients": gradients, "optimizer": state, "buffers": buffers}

    # Norms.

    def _compute_piece_norms(self) -> Tensor:
        """Return the norm of each piece of gradient that this rank sums, fp64 [pieces]. The ranks
        that together hold one copy of the model have each element of the gradient once."""
        pieces = [piece for _, _, piece in self._owned_pieces]
        if not pieces:
            return torch.zeros(0, dtype=torch.float64, device=self._mesh.device)
        kernels = [self._kernels.find("square_sum", piece) for piece in pieces]
        if self._kernels.has("square_sum") and all(kernels):
            pairs = zip(kernels, pieces, strict=True)
            sums = [kernel(piece) for kernel, piece in pairs if kernel is not None]
            # The kernel returns sums of squares; the root is taken once for all pieces.
            return torch.stack(sums).sqrt()
        # Each norm is in master precision; squares are summed over pieces and ranks in fp64.
        return torch.stack(torch._foreach_norm(pieces)).double()

    def _collect_squared_norms(self, piece_norms: Tensor) -> SquaredNorms | None:
        """Return what is measured of the step for the noise of gradients, if it is."""
        small_batches = self._parameters.small_batches
        if small_batches is None or not small_batches.active:
            return None
        if self._piece_kinds is None:  # made once, because the host waits for it
            buckets = [bucket for bucket, _, _ in self._owned_pieces]
            self._piece_kinds = small_batches.number_kinds(buckets)
        return small_batches.collect(piece_norms.square(), self._piece_kinds, self._scale.value)

    @cached_property
    def _owned_pieces(self) -> list[tuple[Bucket, str, Tensor]]:
        """The pieces, each with its bucket and the names of its parameters; with a kernel one piece
        per bucket, because each piece is one launch."""
        buckets = [
            bucket
            for bucket in self._parameters.trained
            # A replica would count twice, and loads of experts are no gradients.
            if not bucket.replica and bucket.parameters[0].spec.role != "balance"
        ]
        if self._kernels.has("square_sum"):
            return [
                (bucket, ",".join(p.spec.name for p in bucket.parameters), bucket.owned_grad_sums)
                for bucket in buckets
            ]
        return [
            (bucket, parameter.spec.name, piece)
            for bucket in buckets
            for parameter, _, piece in bucket.iterate_pieces(
                bucket.owned_grad_sums, bucket.owned_span
            )
        ]

    def _compute_global_norm(self, pieces: Tensor) -> Tensor:
        """Return the norm of the whole model's gradients, from the norms of this rank's pieces."""
        # Squares are summed, since the pieces and ranks divide the elements of the model.
        return all_reduce(pieces.square().sum(), self._model_group).wait().sqrt()

    @cached_property
    def _model_group(self) -> Group:
        """Return the ranks that together hold one copy of the model."""
        return self._mesh.group("pipeline", "data_shard", "context", "tensor")

    def find_nonfinite_parameters(self, update: UpdateResult) -> tuple[str, ...]:
        """Return the names of parameters whose gradients of an update were not finite, on the first
        rank that has any; none if only their norm overflows. All ranks call it, and get the same
        names."""
        norms = update.host_norms()[1].tolist()
        nonfinite = {
            name: None
            for (_, name, _), norm in zip(self._owned_pieces, norms, strict=True)
            if not math.isfinite(norm)
        }
        group = self._mesh.world
        # The smallest index wins; `group.size` means none.
        first = torch.tensor(group.index if nonfinite else group.size, device=self._mesh.device)
        first = all_reduce(first, group, "min").wait()
        text = ",".join(nonfinite).encode()[:_NAME_BYTES] if int(first) == group.index else b""
        # All other ranks send zeros, so a sum sends the text to everyone.
        names = torch.tensor([*text.ljust(_NAME_BYTES, b"\0")], dtype=torch.int32)
        names = all_reduce(names.to(self._mesh.device), group).wait()
        text = bytes(names.tolist()).rstrip(b"\0")
        return tuple(text.decode(errors="replace").split(",")) if text else ()
