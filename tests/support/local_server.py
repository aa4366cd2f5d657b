"""A parameter server in this process, for islands that are threads: the coordinator and the shards
that Ray's actors wrap, called directly."""

from concurrent.futures import Future
from threading import Lock

from megaframe.optim.parameter_server.coordinator import Coordinator
from megaframe.optim.parameter_server.rounds import RoundRules
from megaframe.optim.parameter_server.shard import OuterShard


class LocalServer:
    """A server whose actors may be ended at any time: they continue from their files.

    folder: Of the files. model: As `describe_model` returns it. clock: Returns seconds. commits:
    What the first shard has applied.
    """

    def __init__(self, folder, model, sync, shards, **clock):
        self._folder, self._model, self._sync = folder, model, sync
        self._rules = RoundRules(sync.islands, sync.consistency, sync.staleness or 0, sync.timeout)
        self.lock, self._clock, self.commits = Lock(), clock, []
        self.shards, self.actors = shards, [None] * shards
        self.restart_coordinator()
        for shard in range(shards):
            self.restart_shard(shard)

    def restart_coordinator(self):
        rules = self._model, self._rules, self.shards
        self.coordinator = Coordinator(self._folder, "local", *rules, **self._clock)

    def restart_shard(self, shard):
        self.actors[shard] = OuterShard(
            self._folder / f"shard-{shard}",
            shard,
            self.shards,
            self._sync,
            lambda version: self._list_commits(shard, version),
        )

    def _list_commits(self, shard, version):
        commits = self.coordinator.list_commits(shard, version)
        self.commits.extend(commits if shard == 0 else ())
        return commits

    def connect(self):
        pass

    def join(self, island, clock, model):
        with self.lock:
            return self.coordinator.join(island, clock, model)

    def finish_push(self, island, session, clock, kind):
        with self.lock:
            return _finish(self.coordinator.push(island, session, clock, kind))

    def poll(self, island, session):
        with self.lock:
            return _finish(self.coordinator.poll(island, session))

    def hear(self, island, session):
        with self.lock:
            self.coordinator.hear(island, session)

    def leave(self, island, session):
        with self.lock:
            self.coordinator.leave(island, session)

    def start_push(self, shard, contribution, rank, parts):
        with self.lock:
            return _finish(self.actors[shard].push(contribution, rank, parts))

    def start_pull(self, shard, version, parts):
        with self.lock:
            # A copy: what another island pulls later changes the shard's own.
            values = [value.copy() for value in self.actors[shard].pull(version, parts)]
        return _finish(values)


def _finish(result):
    """Return a call that is done."""
    call = Future()
    call.set_result(result)
    return call
