"""A shard of a parameter server: a part of the elements of the synchronised weights and of the
state of the outer optimizer.

It has an equal share of the rows of each parameter, whatever the layouts of the islands. What an
island pushes is written to a file before it is acknowledged, and the state before anybody gets it;
so a shard that dies continues from its files, and nobody has to push again."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from megaframe.architecture.spec import Box
from megaframe.config.sync import SyncConfig
from megaframe.errors import UnreadableFile
from megaframe.io.regular_file import delete_file, write_file
from megaframe.optim.outer_step import take_outer_step
from megaframe.optim.parameter_server.rounds import Commit, Contribution

STATE_FILE = "state.safetensors"
_PUSH_FILE = re.compile(r"push-([0-9]+)-([0-9]+)\.safetensors")


@dataclass(frozen=True)
class ParameterBox:
    """A box of a parameter, asked for or sent.

    Attributes:
        name: Of the parameter.
        shape: Of the whole parameter.
        box: Where it is in the parameter.
    """

    name: str
    shape: tuple[int, ...]
    box: Box


@dataclass(frozen=True)
class _Push:
    """What a rank of an island has pushed: boxes in this shard's rows, each with its offset."""

    session: int
    clock: int
    parts: Sequence[tuple[ParameterBox, Tensor]]


def find_shard_box(shape: Sequence[int], shard: int, shards: int) -> Box:
    """Return the rows of a parameter that a shard has, which may be none."""
    first, end = (index * shape[0] // shards for index in (shard, shard + 1))
    return Box((first, *(0 for _ in shape[1:])), (end - first, *shape[1:]))


class OuterShard:
    """The elements of one shard.

    Args:
        folder: Of its files; it continues what they hold.
        shard: Its number.
        shards: How many there are.
        sync: The outer optimizer.
        list_commits: Returns the commits from a version on.

    Attributes:
        version: Number of commits that it has applied.
        tensors: Its state, by kind ("weights", "momentum", and "early": differences that were
            applied since momentum moved) and parameter.

    Raises:
        UnreadableFile: If a file is damaged.
    """

    def __init__(
        self,
        folder: Path,
        shard: int,
        shards: int,
        sync: SyncConfig,
        list_commits: Callable[[int], Sequence[Commit]],
    ) -> None:
        self._folder, self._shard, self._shards = folder, shard, shards
        self._sync, self._list_commits = sync, list_commits
        self.version = 0
        self.tensors: dict[str, dict[str, Tensor]] = {"weights": {}, "momentum": {}, "early": {}}
        self._pushes: dict[tuple[int, int], _Push] = {}
        folder.mkdir(parents=True, exist_ok=True)
        self._load()

    def push(
        self,
        contribution: Contribution,
        rank: int,
        parts: Sequence[tuple[ParameterBox, NDArray[np.generic]]],
    ) -> None:
        """Keep what a rank of an island has pushed until it is committed and somebody pulls. Each
        push of a rank replaces the one before, so an island pulls between two. Elements that
        several ranks have are the same.

        Args:
            contribution: The round.
            rank: Of the island.
            parts: Boxes within this shard's rows, and their values.
        """
        push = _Push(
            contribution.session,
            contribution.clock,
            [(part, torch.tensor(values)) for part, values in parts],
        )
        self._save_push(contribution.island, rank, push)
        self._pushes[contribution.island, rank] = push

    def pull(self, version: int, parts: Sequence[ParameterBox]) -> list[NDArray[np.generic]]:
        """Return the synchronised weights in boxes within this shard's rows.

        Args:
            version: Commits that must have been applied.
            parts: The boxes.
        """
        if self.version < version:
            commits = self._list_commits(self.version)
            for commit in commits:
                self._apply(commit)
            self._save()
            self._forget({each for commit in commits for each in commit.contributions})
        weights = self.tensors["weights"]
        places = (weights[part.name][self._find_place(part)] for part in parts)
        return [values.contiguous().numpy() for values in places]

    def _apply(self, commit: Commit) -> None:
        """Change the state as a commit says."""
        mean = self._average(commit)
        if commit.kind == "weights":
            self.tensors["weights"] = mean
        else:
            for name, gradient in mean.items():
                self._step(name, gradient, momentum=commit.momentum)
        self.version += 1

    def _step(self, name: str, gradient: Tensor, *, momentum: bool) -> None:
        """Take an outer step, or, until momentum moves, one without it (delayed Nesterov)."""
        if not self._sync.outer_momentum:
            take_outer_step(self._sync, self.tensors["weights"][name], gradient, None)
            return
        kept, early = self.tensors["momentum"], self.tensors["early"]
        if momentum:
            average = kept.setdefault(name, torch.zeros_like(gradient))
            take_outer_step(
                self._sync, self.tensors["weights"][name], gradient, average, early.pop(name, None)
            )
            return
        before = early.setdefault(name, torch.zeros_like(gradient))
        before.add_(gradient)
        take_outer_step(self._sync, self.tensors["weights"][name], gradient, None)

    def _average(self, commit: Commit) -> dict[str, Tensor]:
        """Return what the contributions of a commit sum to, divided by its divisor. Islands are
        summed in the order of their numbers, as process groups sum them."""
        total: dict[str, Tensor] = {}
        for number, contribution in enumerate(commit.contributions):
            values = self._assemble(contribution)
            if not number:
                total = values
                continue
            for name, tensor in values.items():
                total[name].add_(tensor)
        return {name: tensor.div_(commit.divisor) for name, tensor in total.items()}

    def _assemble(self, contribution: Contribution) -> dict[str, Tensor]:
        """Return this shard's rows of what the ranks of an island have pushed."""
        rows: dict[str, Tensor] = {}
        for (island, _), push in self._pushes.items():
            if (island, push.session, push.clock) != (
                contribution.island,
                contribution.session,
                contribution.clock,
            ):
                continue
            for part, values in push.parts:
                if part.name not in rows:
                    own = find_shard_box(part.shape, self._shard, self._shards)
                    rows[part.name] = torch.zeros(own.shape, dtype=values.dtype)
                rows[part.name][self._find_place(part)] = values
        return rows

    def _forget(self, applied: Collection[Contribution]) -> None:
        for (island, rank), push in [*self._pushes.items()]:
            if Contribution(island, push.session, push.clock) in applied:
                del self._pushes[island, rank]
                delete_file(self._folder / f"push-{island}-{rank}.safetensors", inside=self._folder)

    def _find_place(self, part: ParameterBox) -> tuple[slice, ...]:
        own = find_shard_box(part.shape, self._shard, self._shards)
        return part.box.make_relative(own).slices

    # Files.

    def _save(self) -> None:
        tensors = {
            f"{kind}/{name}": tensor
            for kind, of_kind in self.tensors.items()
            for name, tensor in of_kind.items()
        }
        self._write(STATE_FILE, tensors, {"version": self.version, "shards": self._shards})

    def _save_push(self, island: int, rank: int, push: _Push) -> None:
        parts = [[part.name, part.shape, part.box.offset, part.box.shape] for part, _ in push.parts]
        tensors = {str(number): values for number, (_, values) in enumerate(push.parts)}
        values = {"session": push.session, "clock": push.clock, "parts": parts}
        self._write(f"push-{island}-{rank}.safetensors", tensors, values)

    def _write(self, name: str, tensors: dict[str, Tensor], values: object) -> None:
        content = save(tensors, {"megaframe": json.dumps(values)})
        write_file(self._folder / name, content, inside=self._folder, sync=True)

    def _load(self) -> None:
        if (self._folder / STATE_FILE).exists():
            values, tensors = self._read(STATE_FILE)
            if values["shards"] != self._shards:
                raise UnreadableFile(
                    f"{self._folder} is of a server of {values['shards']} shards, and this one has "
                    f"{self._shards}; use --shards {values['shards']}, or another folder"
                )
            self.version = values["version"]
            for path, tensor in tensors.items():
                kind, _, name = path.partition("/")
                self.tensors[kind][name] = tensor
        for file in sorted(path.name for path in self._folder.iterdir()):
            if match := _PUSH_FILE.fullmatch(file):
                values, tensors = self._read(file)
                parts = [
                    (
                        ParameterBox(name, tuple(shape), Box(tuple(offset), tuple(size))),
                        tensors[str(number)],
                    )
                    for number, (name, shape, offset, size) in enumerate(values["parts"])
                ]
                key = int(match[1]), int(match[2])
                self._pushes[key] = _Push(values["session"], values["clock"], parts)

    def _read(self, name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
        path = self._folder / name
        try:
            with safe_open(path, "pt") as file:
                values = json.loads(file.metadata()["megaframe"])
                return values, {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError, KeyError, ValueError, TypeError) as error:
            raise UnreadableFile(f"{path} is damaged: {error}; remove the folder") from None
