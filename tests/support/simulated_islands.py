"""Islands of a parameter server over a simulated clock: they train for as long as they are told,
die, and come back, in an order that follows from these times alone."""

import heapq
from dataclasses import dataclass, field
from itertools import count

import numpy as np
import torch
from local_server import LocalServer

from megaframe.errors import LostRanks
from megaframe.optim.parameter_server.coordinator import SyncedModel
from megaframe.optim.parameter_server.rounds import Contribution
from megaframe.optim.parameter_server.shard import ParameterBox, find_shard_box

SHAPES = {"w": (5, 2), "b": (3,)}
MODEL = SyncedModel({name: [*shape, "float64"] for name, shape in SHAPES.items()}, {})
POLL, HEARD_EVERY = 0.25, 0.5


@dataclass
class Island:
    """How an island fares. seconds: of each of its rounds, again from the start when they are used
    up. dies: None, or when. returns: None, or how long after."""

    seconds: list[float]
    begins: float = 0.0
    dies: float | None = None
    returns: float | None = None


@dataclass(eq=False)
class Life:
    """An island between a start and its end."""

    island: int
    plan: Island
    session: int = 0
    clock: int = 0
    waits_since: float = 0.0


@dataclass
class Simulation:
    """Runs islands until each has trained `rounds` rounds or died.

    starts: (island, clock, least clock of all members) at each start of a round. waits: (island,
    {other: seconds that it was silent}) at each answer to wait. order: (island,
    clock) of pushes as they came.
    """

    folder: object
    sync: object
    plans: list[Island]
    rounds: int = 3
    shards: int = 2
    disturb: object = None
    now: float = 0.0
    starts: list = field(default_factory=list)
    waits: list = field(default_factory=list)
    order: list = field(default_factory=list)
    ended: dict = field(default_factory=dict)

    def run(self):
        self.server = LocalServer(
            self.folder, MODEL, self.sync, self.shards, clock=lambda: self.now
        )
        self._events, self._order, self._dead = [], count(), {}
        for island, plan in enumerate(self.plans):
            self._at(plan.begins, self._join, Life(island, plan))
            if plan.dies is not None:
                self._at(plan.begins + plan.dies, self._die, island)
        while self._events:
            self.now, _, call, arguments = heapq.heappop(self._events)
            if call == self._die or arguments[0] not in self._dead.get(arguments[0].island, ()):
                call(*arguments)
                if self.disturb is not None:
                    self.disturb(self)
            assert self.now < 200, "somebody waits for ever"
        return self

    def read(self):
        """Return the weights of the server, with everything that is committed."""
        return {name: self._pull_one(name, shape) for name, shape in SHAPES.items()}

    def _pull_one(self, name, shape):
        whole = np.zeros(shape)
        for shard in range(self.shards):
            box = find_shard_box(shape, shard, self.shards)
            if box.size:
                version = self.server.coordinator.rounds.version
                (values,) = self.server.start_pull(
                    shard, version, [ParameterBox(name, shape, box)]
                ).result()
                whole[box.slices] = values
        return torch.tensor(whole)

    def _at(self, time, call, *arguments):
        heapq.heappush(self._events, (time, next(self._order), call, arguments))

    def _die(self, island):
        self._dead.setdefault(island, []).extend(
            arguments[0]
            for *_, call, arguments in self._events
            if call != self._die and arguments[0].island == island
        )
        plan = self.plans[island]
        self.ended[island] = "died", self.now
        if plan.returns is not None:
            self._at(self.now + plan.returns, self._join, Life(island, plan))

    def _join(self, life):
        joined = self.server.join(life.island, 0, MODEL)
        if joined is None:
            self._at(self.now + POLL, self._join, life)
            return
        life.session, life.clock = joined.session, joined.clock
        if joined.brings_weights:
            self._push(life, life.clock - 1, "weights", 0.0)
        life.waits_since = self.now
        self._poll(life)

    def _poll(self, life):
        try:
            answer = self.server.poll(life.island, life.session).result()
        except LostRanks:
            self.ended[life.island] = "left out", self.now
            self._join(life)
            return
        if answer.version is None:
            self.waits.append((life.island, dict(answer.waits_for)))
            self._at(self.now + POLL, self._poll, life)
            return
        for shard in range(self.shards):
            self.server.start_pull(shard, answer.version, []).result()
        rounds = self.server.coordinator.rounds
        self.starts.append(
            (life.island, life.clock, min(rounds.clocks[each] for each in rounds.members))
        )
        if life.clock >= self.rounds:
            self.server.leave(life.island, life.session)
            self.ended[life.island] = "done", self.now
            return
        seconds = life.plan.seconds[life.clock % len(life.plan.seconds)]
        for number in range(1, int(seconds / HEARD_EVERY) + 1):
            self._at(self.now + number * HEARD_EVERY, self._say_alive, life)
        self._at(self.now + seconds, self._end_round, life)

    def _say_alive(self, life):
        self.server.hear(life.island, life.session)

    def _end_round(self, life):
        self._push(life, life.clock, "differences", make_difference(life.island, life.clock))
        self.order.append((life.island, life.clock))
        life.clock += 1
        self._poll(life)

    def _push(self, life, clock, kind, value):
        contribution = Contribution(life.island, life.session, clock)
        for shard in range(self.shards):
            boxes = {n: (s, find_shard_box(s, shard, self.shards)) for n, s in SHAPES.items()}
            parts = [
                (ParameterBox(name, shape, box), np.full(box.shape, value))
                for name, (shape, box) in boxes.items()
                if box.size
            ]
            self.server.start_push(shard, contribution, 0, parts)
        self.server.finish_push(life.island, life.session, clock, kind)


def make_difference(island, clock):
    """Return a number that does not sum exactly with others."""
    return 1 / (3 + 7 * island + 31 * clock)
