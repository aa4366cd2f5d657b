"""What a checkpoint holds of islands, and how any number of islands continues from it.

The weights in it are the last synchronised ones, so whatever reads a model reads these. Beside them
are the state of the outer optimizer, and weights and optimizer state of each island under names
with its number. As many islands continue with their own; another number continues with the mean of
all."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

import torch

from megaframe.checkpoint import Checkpoint, Slice
from megaframe.checkpoint.slices import Box
from megaframe.checkpoint.train_state import OPTIMIZER_PREFIX, TrainState
from megaframe.distributed.collectives import all_gather
from megaframe.distributed.mesh import Mesh
from megaframe.optim.islands import UNSENT_PREFIX, IslandSync

_ISLAND, _WEIGHTS = f"{OPTIMIZER_PREFIX}island", "weights"


def name_for_island(name: str, island: int) -> str:
    """Return the name under which a checkpoint has an island's own tensor."""
    kind, path = _WEIGHTS, name
    if name.startswith(OPTIMIZER_PREFIX):
        kind, _, path = name.removeprefix(OPTIMIZER_PREFIX).partition("/")
    return f"{_ISLAND}{island}.{kind}/{path}"


def remove_island(name: str) -> str:
    """Return the name that `name_for_island` was given; other names as they are."""
    if not name.startswith(_ISLAND):
        return name
    kind, _, path = name.partition(".")[2].partition(".")[2].partition("/")
    return path if kind == _WEIGHTS else f"{OPTIMIZER_PREFIX}{kind}/{path}"


class IslandCheckpoint:
    """This rank's part of what a checkpoint holds of islands.

    Args:
        islands: Of this rank; None if the run has one island.
        mesh: This rank's groups.
        trained: Names of this rank's parameters that are not frozen.
    """

    def __init__(self, islands: IslandSync | None, mesh: Mesh, trained: Collection[str]) -> None:
        self._islands, self._trained, self._device = islands, trained, mesh.device
        self._group = mesh.group("islands")
        self._is_first_copy = not mesh.group("data_replicate").index

    def list_saved(self, slices: Sequence[Slice]) -> list[Slice]:
        """Return what this rank saves, given what it would save as the only island. What travels
        has then arrived."""
        if self._islands is None:
            return [*slices]
        self._islands.settle()
        index, saved = self._group.index, list[Slice]()
        outer = self._list_outer(owned=True) if self._is_first_copy else ()
        for part, is_own in (*((part, self._is_own(part)) for part in slices), *outer):
            if is_own:
                saved.append(replace(part, name=name_for_island(part.name, index)))
            elif index == 0:  # the others have the same
                saved.append(part)
        return saved

    def complete_state(self, state: TrainState) -> TrainState:
        """Return the state with what islands add to it. Collective."""
        if self._islands is None:
            return state
        own = state.optimizer
        numbers = torch.tensor([own.updates, own.loss_scale, own.good_steps], dtype=torch.float64)
        rows = all_gather(numbers.to(self._device), self._group).wait().view(-1, 3).tolist()
        return state.model_copy(
            update={
                "islands": tuple(
                    replace(own, updates=int(updates), loss_scale=scale, good_steps=int(good))
                    for updates, scale, good in rows
                ),
                "unmixed": tuple(sorted(self._islands.unmixed)),
            }
        )

    def load_tensors(
        self,
        checkpoint: Checkpoint,
        slices: Sequence[Slice],
        unshared: Collection[tuple[str, Box]],
        state: TrainState,
    ) -> Iterator[str]:
        """Load this rank's tensors, and yield lines to log.

        Args:
            checkpoint: Whose tensors they are.
            slices: What the rank would load as the only island.
            unshared: As for `Checkpoint.load`.
            state: Of the checkpoint; the optimizer state in it becomes that of this island.
        """
        # With one island there is nothing of its own, unless a server has others.
        before, now = len(state.islands), self._group.size if self._islands is not None else 0
        own = [part for part in slices if self._is_own(part)]
        common = [part for part in slices if not self._is_own(part)]
        saved = {remove_island(name) for name in checkpoint.tensors}
        for part, is_own in self._list_outer(owned=False):
            if part.name in saved:
                (own if is_own else common).append(part)
            else:
                part.tensor.zero_()
        if before == 0:
            common, own = [*common, *own], []
        elif before == now:
            unshared = {(self._rename(name), box) for name, box in unshared}
            common += [replace(part, name=self._rename(part.name)) for part in own]
            own, state.optimizer = [], state.islands[self._group.index]
        checkpoint.load(common, unshared)
        if own:
            _load_mean(checkpoint, own, before)
        if before != now:
            yield _describe_change(before, now)

    def continue_from(self, state: TrainState) -> None:
        """Continue from a state whose tensors are loaded."""
        if self._islands is not None:
            self._islands.load(state.unmixed)

    def abandon(self) -> None:
        """Forget what travels, before other state is loaded."""
        if self._islands is not None:
            self._islands.abandon()

    def begin(self) -> None:
        """Begin with the weights as they are."""
        if self._islands is not None:
            self._islands.begin()

    def _is_own(self, part: Slice) -> bool:
        return part.name.rpartition("/")[2] in self._trained

    def _rename(self, name: str) -> str:
        is_own = name.rpartition("/")[2] in self._trained
        return name_for_island(name, self._group.index) if is_own else name

    def _list_outer(self, *, owned: bool) -> Iterator[tuple[Slice, bool]]:
        """Yield the outer state, and whether it is of this island alone."""
        if self._islands is not None:
            for name, spec, box, tensor in self._islands.list_tensors(owned=owned):
                part = Slice(name, spec.shape, box.offset, tensor)
                yield part, name.startswith(UNSENT_PREFIX)


def _load_mean(checkpoint: Checkpoint, slices: Sequence[Slice], islands: int) -> None:
    """Load the mean of what islands have of their own."""
    copies = [replace(part, tensor=torch.empty_like(part.tensor)) for part in slices]
    for part in slices:
        part.tensor.zero_()
    for island in range(islands):
        checkpoint.load([replace(c, name=name_for_island(c.name, island)) for c in copies])
        for part, copy in zip(slices, copies, strict=True):
            part.tensor.add_(copy.tensor.div_(islands))


def _describe_change(before: int, now: int) -> str:
    if before == 0:
        return (
            f"{now} islands begin with the weights and the optimizer state of the checkpoint; that "
            "of the outer optimizer starts from zero"
        )
    if now == 0:
        return (
            f"the weights and the optimizer states of {before} islands are averaged; that of the "
            "outer optimizer is dropped"
        )
    return (
        f"each of {now} islands begins with the mean of the weights and of the optimizer states of "
        f"{before} islands; that of the outer optimizer continues"
    )
