"""Rounds: which islands take part on a parameter server, how far each is, and who may go on.

It has no tensors and no clock of its own: every call is given the time, so its rules can be tested
over a simulated one. What it decides is a numbered list of commits, each of which says whose
differences the shards apply next. An island that asks is told the version (how many commits) with
which it trains on, or for whom it waits.

- Bulk-synchronous: a round is committed once all members have pushed it. An island pulls what
  follows from the rounds that it has pushed and nothing later.
- Bounded staleness (SSP, Ho et al. 2013): each push is committed at once, and an island trains on
  as long as it is at most `staleness` rounds ahead of the slowest member.
- Asynchronous: the same without a bound.

A member is an island that has been heard within `timeout`. Nobody waits for others. In the last two
forms momentum moves only once for as many pushes as there are members (delayed Nesterov, Liu et al.
2024, "Asynchronous Local-SGD Training for Language Modeling", algorithm 3), because momentum that
moves with every push multiplies stale directions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from megaframe.errors import LostRanks, UserError

Consistency = Literal["bulk_synchronous", "bounded_staleness", "asynchronous"]
PushKind = Literal["differences", "weights"]
HEARD_EVERY = 0.1
"""Share of the timeout after which an island that works or waits says so again."""


@dataclass(frozen=True)
class RoundRules:
    """What is the same for all islands of a server.

    Attributes:
        islands: How many there can be; they have the numbers from 0.
        consistency: Who waits for whom.
        staleness: Rounds that an island may be ahead of the slowest, for bounded staleness.
        timeout: Seconds after which an island that is not heard is no member any more.
    """

    islands: int
    consistency: Consistency = "bulk_synchronous"
    staleness: int = 0
    timeout: float = 600.0


@dataclass(frozen=True, order=True)
class Contribution:
    """What an island has pushed to all shards.

    Attributes:
        island: Its number.
        session: How often an island of this number had joined.
        clock: How many rounds it had pushed before.
    """

    island: int
    session: int
    clock: int


@dataclass(frozen=True)
class Commit:
    """What the shards do next.

    Attributes:
        kind: With differences they take an outer step, weights replace their own.
        contributions: Whose tensors are summed, in the order of islands.
        divisor: The sum is divided by this.
        momentum: Whether the outer momentum moves.
    """

    kind: PushKind
    contributions: tuple[Contribution, ...]
    divisor: int
    momentum: bool


@dataclass(frozen=True)
class Joined:
    """What an island is told that joins.

    Attributes:
        session: Identifies it from now on.
        clock: The round that it trains next.
        brings_weights: The server has no weights yet, and takes those of this island.
    """

    session: int
    clock: int
    brings_weights: bool


@dataclass(frozen=True)
class Answer:
    """Whether an island may train on.

    Attributes:
        version: Commits to train on with; None to ask again later.
        waits_for: The islands that it waits for, each with the seconds since it was heard.
    """

    version: int | None
    waits_for: Mapping[int, float] = field(default_factory=dict)


@dataclass
class _Member:
    session: int
    heard: float


class Rounds:
    """The membership and the rounds of all islands.

    Args:
        rules: Of the server.

    Attributes:
        version: Number of commits.
        clocks: The rounds that each island has pushed, by number, also of those that are gone.
        notes: Lines about islands that came or went, to be taken by who shows them.
    """

    def __init__(self, rules: RoundRules) -> None:
        self._rules = rules
        self.version, self._round, self._pushes_since_momentum = 0, 0, 0
        self.clocks = dict.fromkeys(range(rules.islands), 0)
        self._sessions = dict.fromkeys(range(rules.islands), 0)
        self._members: dict[int, _Member] = {}
        self._founder: int | None = None
        self._pushed: dict[int, tuple[Contribution, PushKind]] = {}
        self._commits: dict[int, Commit] = {}
        self._applied: dict[int, int] = {}
        self.notes: list[str] = []

    @property
    def members(self) -> frozenset[int]:
        """The islands that take part."""
        return frozenset(self._members)

    def join(self, island: int, clock: int, now: float) -> Joined | None:
        """Let an island take part, in place of an earlier one of this number.

        Args:
            island: Its number.
            clock: The rounds that it has trained, as far as it knows.
            now: Seconds.

        Returns:
            None to ask again: another island is bringing weights.
        """
        if not 0 <= island < self._rules.islands:
            raise UserError(
                f"sync.island={island} is none of the sync.islands={self._rules.islands} of the "
                f"server, which count from 0; use {self._rules.islands - 1} or less"
            )
        self._leave_out_silent(now)
        if not self.version:
            if self._founder not in (None, island) and self._founder in self._members:
                return None
            self._found(island, clock, now)
        elif island not in self._members:
            self.clocks[island] = self._choose_first_round(island)
        self._sessions[island] += 1
        self._members[island] = _Member(self._sessions[island], now)
        self._end_round()
        self.notes.append(f"island {island} joins at round {self.clocks[island]}")
        return Joined(self._sessions[island], self.clocks[island], not self.version)

    def push(
        self, island: int, session: int, clock: int, now: float, kind: PushKind = "differences"
    ) -> None:
        """Take in that an island has pushed a round to all shards. A repeated call does nothing."""
        self._hear(island, session, now)
        if clock < self.clocks[island] and self.version:
            return
        contribution = Contribution(island, session, clock)
        if not self.version:  # the weights that the server begins with
            self._commit("weights", (contribution,), 1, momentum=False)
            return
        self.clocks[island] = clock + 1
        if self._rules.consistency == "bulk_synchronous":
            self._pushed[island] = contribution, kind
            self._end_round()
            return
        members = len(self._members)
        self._pushes_since_momentum += 1
        is_due = self._pushes_since_momentum >= members
        if is_due:
            self._pushes_since_momentum = 0
        self._commit(kind, (contribution,), members, momentum=is_due)

    def poll(self, island: int, session: int, now: float) -> Answer:
        """Answer whether an island may train the round after those that it has pushed."""
        self._hear(island, session, now)
        self._leave_out_silent(now)
        if not self.version:
            return Answer(None)
        own, ahead = self.clocks[island], 0
        if self._rules.consistency == "bulk_synchronous":
            if self._round >= own:
                return Answer(self.version)
        else:
            ahead = self._rules.staleness
            is_free = self._rules.consistency == "asynchronous"
            if is_free or own - min(self.clocks[each] for each in self._members) <= ahead:
                return Answer(self.version)
        slower = (each for each in self._members if self.clocks[each] < own - ahead)
        return Answer(None, {each: now - self._members[each].heard for each in slower})

    def hear(self, island: int, session: int, now: float) -> None:
        """Take in that an island is at work."""
        self._hear(island, session, now)

    def leave(self, island: int, session: int, now: float) -> None:
        """Let an island go that has nothing left to do."""
        if island in self._members and self._members[island].session == session:
            self._remove(island, f"leaves after round {self.clocks[island]}")
        self._leave_out_silent(now)

    def list_commits(self, shard: int, version: int, shards: int) -> list[Commit]:
        """Return the commits from `version` on, which a shard has not applied. Those that all of
        `shards` have applied are forgotten."""
        self._applied[shard] = version
        if len(self._applied) == shards:
            for number in [n for n in self._commits if n < min(self._applied.values())]:
                del self._commits[number]
        return [self._commits[number] for number in range(version, self.version)]

    # Rules.

    def _found(self, island: int, clock: int, now: float) -> None:
        """Begin the run: every number is expected, and has `timeout` to join."""
        self._founder, self._round = island, clock
        self.clocks = dict.fromkeys(self.clocks, clock)
        for each in self.clocks:
            self._members.setdefault(each, _Member(0, now))

    def _choose_first_round(self, island: int) -> int:
        """Return where a new member begins: never with a round that it has pushed. The open round
        of a bulk-synchronous server ends without it, because the others would wait."""
        if not self._members:
            first = max(self.clocks.values())
            if self._rules.consistency == "bulk_synchronous":
                first = self._round
        elif self._rules.consistency == "bulk_synchronous":
            first = self._round + 1
        else:
            first = min(self.clocks[each] for each in self._members)
        return max(first, self.clocks[island])

    def _hear(self, island: int, session: int, now: float) -> None:
        member = self._members.get(island)
        if member is None:
            raise LostRanks(
                f"island {island} was not heard for more than sync.timeout={self._rules.timeout:g} "
                f"seconds, and the other islands go on without it (rounds: {self._describe()}); "
                "start it again, and it joins them, or use a larger sync.timeout",
                (),
            )
        if member.session != session:
            raise UserError(
                f"another run has joined as island {island}; each needs its own sync.island"
            )
        member.heard = now

    def _leave_out_silent(self, now: float) -> None:
        for island, member in [*self._members.items()]:
            silent = now - member.heard
            if silent > self._rules.timeout:
                self._remove(
                    island,
                    f"was not heard for {silent:.1f} s (sync.timeout={self._rules.timeout:g}) and "
                    f"is left out after round {self.clocks[island]}",
                )

    def _remove(self, island: int, why: str) -> None:
        del self._members[island]
        self.notes.append(f"island {island} {why}")
        self._end_round()

    def _end_round(self) -> None:
        """Commit the open round of a bulk-synchronous server if no member is missing; those who
        pushed and left count."""
        if not self.version or self._rules.consistency != "bulk_synchronous":
            return
        while self._members and all(self.clocks[each] > self._round for each in self._members):
            if self._pushed:
                contributions = tuple(sorted(each for each, _ in self._pushed.values()))
                kind = next(iter(self._pushed.values()))[1]
                self._commit(kind, contributions, len(contributions), momentum=True)
            self._pushed.clear()
            self._round += 1

    def _commit(
        self,
        kind: PushKind,
        contributions: tuple[Contribution, ...],
        divisor: int,
        *,
        momentum: bool,
    ) -> None:
        self._commits[self.version] = Commit(kind, contributions, divisor, momentum)
        self.version += 1

    def _describe(self) -> str:
        return ", ".join(f"island {each} {self.clocks[each]}" for each in sorted(self._members))

    # Files.

    def save(self) -> dict[str, Any]:
        """Return the state as JSON values, without times."""
        return {
            "version": self.version,
            "round": self._round,
            "pushes_since_momentum": self._pushes_since_momentum,
            "clocks": [*self.clocks.values()],
            "sessions": [*self._sessions.values()],
            "members": {each: member.session for each, member in self._members.items()},
            "pushed": [[asdict(each), kind] for each, kind in self._pushed.values()],
            "commits": {number: asdict(commit) for number, commit in self._commits.items()},
        }

    @staticmethod
    def load(rules: RoundRules, state: Mapping[str, Any], now: float) -> Rounds:
        """Return what `save` has saved; all members are heard now."""
        rounds = Rounds(rules)
        rounds.version, rounds._round = state["version"], state["round"]
        rounds._pushes_since_momentum = state["pushes_since_momentum"]
        rounds.clocks = dict(enumerate(state["clocks"]))
        rounds._sessions = dict(enumerate(state["sessions"]))
        for each, session in state["members"].items():
            rounds._members[int(each)] = _Member(session, now)
        for saved, kind in state["pushed"]:
            contribution = Contribution(**saved)
            rounds._pushed[contribution.island] = contribution, kind
        for number, commit in state["commits"].items():
            saved = tuple(Contribution(**each) for each in commit["contributions"])
            rounds._commits[int(number)] = Commit(**{**commit, "contributions": saved})
        return rounds
