"""The coordinator of a parameter server: its rounds, in a file, for islands that train one model.

It has no tensors. What it has answered is in the file before the answer, so that a coordinator that
dies continues where it was."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megaframe.config import RunConfig
from megaframe.errors import UnreadableFile, UserError
from megaframe.io.regular_file import write_file
from megaframe.model.model_chunk import list_model_specs
from megaframe.optim.parameter_groups import find_frozen_names
from megaframe.optim.parameter_server.rounds import (
    Answer,
    Commit,
    Joined,
    PushKind,
    RoundRules,
    Rounds,
)
from megaframe.parameters.parameter import PRECISIONS

COORDINATOR_FILE = "coordinator.json"
_SAME_KEYS = (
    *("every", "optimizer", "outer_lr", "outer_momentum"),
    *("islands", "consistency", "staleness", "timeout"),
)
"""Keys of `sync` that all islands and the server have the same."""


@dataclass(frozen=True)
class SyncedModel:
    """What all islands of a server must have the same.

    Attributes:
        shapes: The shape and the type of each trained parameter, by name.
        keys: Values of keys of the config, by name.
    """

    shapes: Mapping[str, Sequence[object]]
    keys: Mapping[str, object]


class Coordinator:
    """Answers islands.

    Args:
        folder: Of its file; it continues what that holds.
        name: Of the server.
        model: What its islands train.
        rules: Of the rounds.
        shards: How many there are.
        clock: Returns seconds.

    Raises:
        UserError: If the folder is of another server.
        UnreadableFile: If its file is damaged.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        model: SyncedModel,
        rules: RoundRules,
        shards: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path, self._name, self._shards, self._clock = (
            folder / COORDINATOR_FILE,
            name,
            shards,
            clock,
        )
        self._model = model
        self.rounds = Rounds(rules)
        folder.mkdir(parents=True, exist_ok=True)
        if self._path.exists():
            self._load(rules)

    def join(self, island: int, clock: int, model: SyncedModel) -> Joined | None:
        """As `Rounds.join`.

        Args:
            island: Its number.
            clock: The rounds that it has trained.
            model: What it trains.

        Raises:
            UserError: If the server is of another model.
        """
        difference = find_difference(model, self._model, "of the server")
        if difference:
            raise UserError(
                f"island {island} does not train what server {self._name} synchronises: "
                f"{difference}; use the config of the server, or another one (sync.server)"
            )
        joined = self.rounds.join(island, clock, self._clock())
        self._save()
        return joined

    def push(self, island: int, session: int, clock: int, kind: PushKind = "differences") -> Answer:
        """As `Rounds.push`, and then as `Rounds.poll`."""
        self.rounds.push(island, session, clock, self._clock(), kind)
        self._save()
        return self.poll(island, session)

    def poll(self, island: int, session: int) -> Answer:
        """As `Rounds.poll`."""
        version, members = self.rounds.version, self.rounds.members
        answer = self.rounds.poll(island, session, self._clock())
        if (version, members) != (self.rounds.version, self.rounds.members):
            self._save()
        return answer

    def hear(self, island: int, session: int) -> None:
        """As `Rounds.hear`."""
        self.rounds.hear(island, session, self._clock())

    def leave(self, island: int, session: int) -> None:
        """As `Rounds.leave`."""
        self.rounds.leave(island, session, self._clock())
        self._save()

    def list_commits(self, shard: int, version: int) -> list[Commit]:
        """As `Rounds.list_commits`."""
        return self.rounds.list_commits(shard, version, self._shards)

    def take_notes(self) -> list[str]:
        """Return the lines about islands that came or went since the last call."""
        notes, self.rounds.notes = self.rounds.notes, []
        return notes

    def _save(self) -> None:
        state = {"shards": self._shards, "model": asdict(self._model), "rounds": self.rounds.save()}
        write_file(self._path, json.dumps(state), inside=self._path.parent, sync=True)

    def _load(self, rules: RoundRules) -> None:
        folder = self._path.parent
        try:
            state = json.loads(self._path.read_text())
            saved, model = int(state["shards"]), SyncedModel(**state["model"])
            self.rounds = Rounds.load(rules, state["rounds"], self._clock())
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UnreadableFile(f"{self._path} is damaged: {error}; remove {folder}") from None
        if saved != self._shards:
            raise UserError(
                f"{folder} is of a server of {saved} shards, and this one has {self._shards}; use "
                f"--shards {saved}, or another folder"
            )
        if difference := find_difference(self._model, model, f"in {folder}"):
            raise UserError(f"{difference}; use the same config, or another folder")


def describe_model(config: RunConfig) -> SyncedModel:
    """Return what the islands of a server must have the same.

    Args:
        config: Of an island, or of the server.
    """
    specs = list_model_specs(config.model, config.train)
    frozen = find_frozen_names(config.frozen_patterns, specs)
    master = str(PRECISIONS[config.train.precision].master).removeprefix("torch.")
    shapes = {spec.name: [*spec.shape, master] for spec in specs if spec.name not in frozen}
    keys = {f"sync.{key}": getattr(config.sync, key) for key in _SAME_KEYS}
    train = {
        "train.global_batch": config.train.global_batch,
        "train.seq": config.train.seq,
        "train.steps": config.train.steps,
        "run.seed": config.run.seed,
    }
    return SyncedModel(shapes, {**keys, **train})


def find_difference(model: SyncedModel, other: SyncedModel, where: str) -> str:
    """Return the first difference of two models in words, empty if there is none. where: The
    other one is."""
    kinds = (("", model.keys, other.keys), ("parameter ", model.shapes, other.shapes))
    for kind, ours, theirs in kinds:
        for name in sorted(ours.keys() | theirs.keys()):
            own, there = (_format(values.get(name, "absent")) for values in (ours, theirs))
            if own != there:
                return f"{kind}{name} is {own} here and {there} {where}"
    return ""


def _format(value: object) -> str:
    if isinstance(value, (list, tuple)):
        *sizes, dtype = value
        return f"{dtype} {' x '.join(map(str, sizes))}"
    return str(value)
