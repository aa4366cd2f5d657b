"""A parameter server as actors of Ray: one for the coordinator, and one for each shard.

They only wrap `Coordinator` and `OuterShard`. Ray starts an actor again that dies, which then
continues from its files, and repeats calls that it has not answered. Texts of errors are results,
because Ray would show them with a trace. Ray itself pickles what it sends, so its cluster must be
one that nobody else can reach."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from megaframe.config import RunConfig
from megaframe.config.sync import SyncConfig
from megaframe.distributed.ray_cluster import connect_to_ray
from megaframe.errors import LostRanks, UserError
from megaframe.optim.parameter_server.coordinator import Coordinator, SyncedModel, describe_model
from megaframe.optim.parameter_server.rounds import (
    HEARD_EVERY,
    Answer,
    Commit,
    Contribution,
    Joined,
    PushKind,
    RoundRules,
)
from megaframe.optim.parameter_server.shard import OuterShard, ParameterBox

if TYPE_CHECKING:
    from megaframe.optim.parameter_server.server_outer_step import Call, Values

NAMESPACE = "megaframe"
_RETRY_SECONDS = 0.2
T = TypeVar("T")


class _CoordinatorActor:
    """Runs a `Coordinator` in a process of its own."""

    def __init__(
        self, folder: str, name: str, model: SyncedModel, rules: RoundRules, shards: int
    ) -> None:
        self._shards = shards
        self._coordinator = Coordinator(Path(folder), name, model, rules, shards)

    def ask(self, method: str, *arguments: Any) -> tuple[Any, str, bool]:
        """Return what a method of the coordinator returns, the text of its error, and whether that
        is a mistake of the user."""
        try:
            return getattr(self._coordinator, method)(*arguments), "", False
        except (UserError, LostRanks) as error:
            return None, str(error), isinstance(error, UserError)

    def count_shards(self) -> int:
        """Return the number of shards."""
        return self._shards


class _ShardActor:
    """Runs an `OuterShard` in a process of its own."""

    def __init__(
        self, folder: str, shard: int, shards: int, keys: dict[str, Any], timeout: float
    ) -> None:
        sync = SyncConfig(**keys)
        coordinator = _Actor(_name_coordinator(sync.server or ""), timeout)

        def list_commits(version: int) -> list[Commit]:
            commits: list[Commit] = coordinator.call("ask", "list_commits", shard, version)[0]
            return commits

        self._shard = OuterShard(Path(folder), shard, shards, sync, list_commits)

    def push(
        self, contribution: Contribution, rank: int, parts: Sequence[tuple[ParameterBox, Values]]
    ) -> None:
        """As `OuterShard.push`."""
        self._shard.push(contribution, rank, parts)

    def pull(self, version: int, parts: Sequence[ParameterBox]) -> list[Values]:
        """As `OuterShard.pull`."""
        return self._shard.pull(version, parts)


class _Actor:
    """An actor by its name, also of a server that was started again meanwhile.

    Args:
        name: Its name.
        timeout: Seconds for which a call waits: `parallel.timeout`.
        while_waiting: Called while a call waits, each time after so many seconds.
    """

    def __init__(
        self,
        name: str,
        timeout: float,
        while_waiting: tuple[Callable[[], object], float] | None = None,
    ) -> None:
        self._name, self._timeout = name, timeout
        self._say_alive, self._interval = while_waiting or (lambda: None, timeout)
        self._handle: Any = None

    def call(self, method: str, *arguments: Any) -> Any:
        """Call, and wait for the result."""
        return self.start(method, *arguments).result()

    def start(
        self, method: str, *arguments: Any, read: Callable[[Any], Any] | None = None
    ) -> _Call:
        """Start a call. read: makes the result of what the actor returns."""
        return _Call(self, method, arguments, read or (lambda value: value))

    def send(self, method: str, arguments: Sequence[Any]) -> Any:
        """Send a call and return what Ray knows it by; None if there is no such actor."""
        import ray

        try:
            if self._handle is None:
                self._handle = ray.get_actor(self._name, NAMESPACE)
            return getattr(self._handle, method).remote(*arguments)
        except (ray.exceptions.RayActorError, ValueError):
            self._handle = None
            return None

    def wait(self, pending: Any, method: str, arguments: Sequence[Any]) -> Any:
        """Return the result of what `send` has returned; send again if the actor has died."""
        import ray

        end = time.monotonic() + self._timeout
        while True:
            try:
                if pending is not None:
                    return ray.get(pending, timeout=self._interval)
            except ray.exceptions.GetTimeoutError:
                pass
            except ray.exceptions.RayActorError:
                self._handle = pending = None
            if time.monotonic() > end:
                raise LostRanks(
                    f"there was no answer from {self._name} for parallel.timeout="
                    f"{self._timeout:g} seconds; is tools/launch/ray_server.py running?",
                    (),
                )
            self._say_alive()
            if pending is None:
                time.sleep(_RETRY_SECONDS)
                pending = self.send(method, arguments)


class _Call:
    """A call that has been sent to an actor (`server_outer_step.Call`)."""

    def __init__(
        self, actor: _Actor, method: str, arguments: Sequence[Any], read: Callable[[Any], Any]
    ) -> None:
        self._actor, self._method, self._arguments, self._read = actor, method, arguments, read
        self._pending = actor.send(method, arguments)

    def done(self) -> bool:
        import ray

        return self._pending is None or bool(ray.wait([self._pending], timeout=0)[0])

    def result(self) -> Any:
        return self._read(self._actor.wait(self._pending, self._method, self._arguments))


class RayServer:
    """A server of Ray actors, as an island reaches it.

    Args:
        sync: Names it.
        timeout: Seconds for which a call waits: `parallel.timeout`.
    """

    def __init__(self, sync: SyncConfig, timeout: float) -> None:
        assert sync.server is not None, "there is a server"
        self._sync, self._name = sync, sync.server
        self._coordinator = _Actor(_name_coordinator(self._name), timeout)
        self._timeout = timeout
        self._actors: list[_Actor] = []
        self._joined: tuple[int, int] | None = None
        self.shards = 0

    def connect(self) -> None:
        """Find the server.

        Raises:
            UserError: Ray is not installed, there is no cluster, or none of its servers has this
                name.
        """
        connect_to_ray("auto", NAMESPACE)
        import ray

        try:
            ray.get_actor(_name_coordinator(self._name), NAMESPACE)
        except ValueError:
            raise UserError(
                f"there is no server sync.server={self._name} on this Ray cluster; start it with "
                f"tools/launch/ray_server.py ... -- ... sync.server={self._name}"
            ) from None
        self.shards = self._coordinator.call("count_shards")
        saying = self._say_alive, HEARD_EVERY * self._sync.timeout
        self._actors = [
            _Actor(_name_shard(self._name, shard), self._timeout, saying)
            for shard in range(self.shards)
        ]

    def join(self, island: int, clock: int, model: SyncedModel) -> Joined | None:
        joined: Joined | None = self._ask("join", island, clock, model)
        self._joined = None if joined is None else (island, joined.session)
        return joined

    def finish_push(self, island: int, session: int, clock: int, kind: PushKind) -> Call[Answer]:
        return self._start_to_ask("push", island, session, clock, kind)

    def poll(self, island: int, session: int) -> Call[Answer]:
        return self._start_to_ask("poll", island, session)

    def hear(self, island: int, session: int) -> None:
        self._coordinator.start("ask", "hear", island, session)

    def leave(self, island: int, session: int) -> None:
        self._ask("leave", island, session)

    def start_push(
        self,
        shard: int,
        contribution: Contribution,
        rank: int,
        parts: Sequence[tuple[ParameterBox, Values]],
    ) -> Call[object]:
        return self._actors[shard].start("push", contribution, rank, parts)

    def start_pull(
        self, shard: int, version: int, parts: Sequence[ParameterBox]
    ) -> Call[Sequence[Values]]:
        return self._actors[shard].start("pull", version, parts)

    def _say_alive(self) -> None:
        if self._joined is not None:
            self.hear(*self._joined)

    def _ask(self, method: str, *arguments: Any) -> Any:
        return self._start_to_ask(method, *arguments).result()

    def _start_to_ask(self, method: str, *arguments: Any) -> _Call:
        return self._coordinator.start("ask", method, *arguments, read=_read_answer)


def start_actors(config: RunConfig, folder: Path, shards: int) -> Callable[[], list[str]]:
    """Start the actors of a server, which end with this process.

    Args:
        config: What its islands train; `sync` has its name and rules.
        folder: Of its files.
        shards: How many.

    Returns:
        A function that returns lines about islands that came or went since the last call.

    Raises:
        UserError: If the folder is of another server.
    """
    import ray

    sync, path, model = config.sync, folder.absolute(), describe_model(config)
    assert sync.server is not None, "it has a name"
    rules = RoundRules(sync.islands, sync.consistency, sync.staleness or 0, sync.timeout)
    Coordinator(path, sync.server, model, rules, shards)  # says here what is wrong with the folder
    # They wait for islands more than they compute, so Ray reserves no processor for them.
    options = {"max_restarts": -1, "max_task_retries": -1, "num_cpus": 0}
    coordinator = _name_coordinator(sync.server)
    actors = [
        ray.remote(_CoordinatorActor)
        .options(name=coordinator, **options)
        .remote(str(path), sync.server, model, rules, shards)
    ]
    for shard in range(shards):
        part = str(path / f"shard-{shard}"), shard, shards
        actors.append(
            ray.remote(_ShardActor)
            .options(name=_name_shard(sync.server, shard), **options)
            .remote(*part, sync.model_dump(exclude_none=True), config.parallel.timeout)
        )
    client = _Actor(coordinator, config.parallel.timeout)

    def take_notes(_: object = actors) -> list[str]:
        notes: list[str] = client.call("ask", "take_notes")[0]
        return notes

    return take_notes


def _read_answer(answer: tuple[Any, str, bool]) -> Any:
    """Return what `_CoordinatorActor.ask` returns, or raise the error that it names."""
    result, error, is_mistake = answer
    if error:
        raise UserError(error) if is_mistake else LostRanks(error, ())
    return result


def _name_coordinator(name: str) -> str:
    return f"{name}-coordinator"


def _name_shard(name: str, shard: int) -> str:
    return f"{name}-shard-{shard}"
