"""NCCL's and CUDA's rules, applied to the calls that the hosts of all ranks make.

`simulate(programs)` runs the calls of all ranks without a clock: whatever may happen happens, and
nothing that has happened ever keeps something else from happening. So the outcome depends neither
on speed nor on the order in which ranks are looked at, and fewer rules never stop a program that
more rules let through. docs/guides/gpu.md lists the rules with their sources.

host         making a communicator takes all ranks of the world, one communicator at a time; the
             first message from one rank to another and the first collective of a form also take
             the hosts of all who take part, because NCCL connects them then
group        the messages of a group start together and connect together, near ranks first
stream       work runs in order, within a stream and within a communicator
queue        streams take turns at a limited number of hardware queues; work that waits keeps back
             whatever is behind it in its queue
collectives  a rank's collectives run in the order in which its host starts them, whatever their
             communicator, because a device may not have room for two
"""

import sys
from collections import defaultdict, deque
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

QUEUES = 8
"""Hardware queues of a device unless CUDA_DEVICE_MAX_CONNECTIONS says otherwise."""


_HERE = Path(__file__).resolve().parent
_PROJECT = [_HERE.parents[2] / name for name in ("megaframe", "tests")]
_OWN = ("nccl_rules.py", "recorder.py", "machine.py", "collectives.py", "cuda.py")


def find_line():
    """Return where the project makes a call: its innermost line, such as `executor.py:320`, outside
    of what communicates (`distributed`) if there is one."""
    frame, caller = sys._getframe(1), ""
    while frame is not None:
        folder, name = _file(frame.f_code.co_filename)
        if name and folder != "distributed":
            return f"{name}:{frame.f_lineno}"
        caller = caller or f"{name}:{frame.f_lineno}" * bool(name)
        frame = frame.f_back
    return caller


@cache
def _file(path):
    """Return folder and name of a file of the project; empty for others, and for those that make
    calls in its name."""
    path = Path(path)
    own = path.parent == _HERE and path.name in _OWN
    if own or not any(folder in path.parents for folder in _PROJECT):
        return "", ""
    return path.parent.name, path.name


@dataclass(frozen=True)
class CreateCommunicator:
    """A communicator is made. All ranks of the world call this, in one order."""

    communicator: str
    ranks: tuple[int, ...]
    where: str = ""

    def __str__(self):
        return f"making communicator {self.communicator} of ranks {list(self.ranks)}"


@dataclass(frozen=True)
class LaunchKernel:
    """Work of a stream that needs nobody else."""

    stream: int
    where: str = ""

    def __str__(self):
        return f"a kernel on stream {self.stream}"


@dataclass(frozen=True)
class RecordEvent:
    """An event is recorded: it has happened when the stream's work so far is done."""

    stream: int
    event: int


@dataclass(frozen=True)
class WaitEvent:
    """A stream waits for an event."""

    stream: int
    event: int
    where: str = ""

    def __str__(self):
        return f"stream {self.stream} waiting"


@dataclass(frozen=True)
class Synchronize:
    """The host waits for an event, or for all work so far if it is None."""

    event: int | None
    where: str = ""

    def __str__(self):
        return "the host waiting for its device"


@dataclass(frozen=True)
class CollectiveCall:
    """form: operation, type and shape, which must be the same on all ranks. uneven: ranks may send
    each other nothing in one call and something in the next, so every call may connect."""

    communicator: str
    stream: int
    form: str
    uneven: bool = False
    where: str = ""

    def __str__(self):
        return f"{self.form} over {self.communicator}"


@dataclass(frozen=True)
class Message:
    """A message to a rank (`send`) or from one (`receive`). size: type and number of elements."""

    kind: str
    peer: int
    size: str = ""

    def __str__(self):
        return f"{self.kind} {self.size} ".replace("  ", " ") + (
            f"to rank {self.peer}" if self.kind == "send" else f"from rank {self.peer}"
        )


@dataclass(frozen=True)
class MessageGroup:
    """Messages that NCCL starts as one operation; a single message is a group of one."""

    communicator: str
    stream: int
    transfers: tuple[Message, ...]
    where: str = ""

    def __str__(self):
        return f"{' and '.join(map(str, self.transfers))} over {self.communicator}"


def describe_size(tensor):
    """Return type and number of elements, such as `float32 8`."""
    return f"{tensor.dtype} {tensor.numel()}".removeprefix("torch.")


def make_collective(communicator, stream, kind, tensor, uneven):
    """Return the call that starts a collective. tensor: has the same type on all ranks, and unless
    it is uneven the same size."""
    form = describe_size(tensor).split()[0] if uneven else describe_size(tensor)
    return CollectiveCall(communicator, stream, f"{kind} {form}", uneven, find_line())


def end_of(rank, transfer):
    """Return which end of a message a rank has: source, target, whether it sends."""
    sends = transfer.kind == "send"
    return (rank, transfer.peer, True) if sends else (transfer.peer, rank, False)


def find_other_end(rank, transfer):
    source, target, sends = end_of(rank, transfer)
    return source, target, not sends


def list_connections(rank, ranks, transfers, known):
    """Return the messages of a group that NCCL has to connect first, in the rounds in which it does
    so: it goes on to the next round when all of one are connected. In round i a rank sends to the
    i-th rank after it.

    ranks: of the communicator. known: messages that are connected.
    """
    rounds = defaultdict(dict)
    for transfer in transfers:
        source, target, _ = which = end_of(rank, transfer)
        if transfer.peer != rank and transfer not in known:
            rounds[(ranks.index(target) - ranks.index(source)) % len(ranks)][which] = transfer
    return [[*group.values()] for _, group in sorted(rounds.items())]


class RuleViolation(Exception):
    """Calls that NCCL does not bring to an end. ranks: whose calls they are."""

    def __init__(self, text, ranks):
        super().__init__(text)
        self.ranks = tuple(dict.fromkeys(ranks))


class CallMismatch(RuleViolation):
    """Ranks call different things where they must call the same."""


class Deadlock(RuleViolation):
    """Ranks wait for each other forever, or for a call that a rank never makes."""


@dataclass(eq=False)
class _DeviceTask:
    """A call for the device. fifos: those of its rank that it must be first in, none while the host
    has not started it. after: what a wait is for. sides: what it is matched with, and its number
    there. started: it has been first in all fifos."""

    rank: int
    call: object
    after: object = None
    sides: list = field(default_factory=list)
    fifos: list = field(default_factory=list)
    started: bool = False
    done: bool = False


@dataclass
class _SimulatedRank:
    host: object
    call: object = None
    blocked_by: list = field(default_factory=list)
    ended: bool = False
    fifos: dict = field(default_factory=dict)
    last: dict = field(default_factory=dict)
    events: dict = field(default_factory=dict)
    queues: dict = field(default_factory=dict)
    created: int = 0


def simulate(programs, queues=QUEUES):
    """Run the calls of each rank. Raises `CallMismatch` or `Deadlock` if they do not come to an
    end."""
    _Simulation(programs, queues).run()


class _Simulation:
    def __init__(self, programs, queues):
        self._queues, self._world = queues, range(len(programs))
        self._ranks = [
            _SimulatedRank(self._host(rank, calls)) for rank, calls in enumerate(programs)
        ]
        self._members, self._created = {}, []
        self._met = defaultdict(set)
        """The ranks that have come to what needs several hosts."""
        self._works = defaultdict(list)
        """The work of each side of what is matched, in order, with what must be the same. Sides are
        (communicator, rank) of collectives, and (communicator, *end_of(...)) of messages."""
        self._woken = deque(self._world)

    def run(self):
        while self._woken:
            rank = self._woken.popleft()
            self._go_on(rank)
            self._run_device(rank)
        if not all(state.ended and not any(state.fifos.values()) for state in self._ranks):
            raise self._deadlock()

    def _wake(self, ranks):
        self._woken.extend(rank for rank in ranks if rank not in self._woken)

    # ------------------------------------------------------------------------------------- the host

    def _go_on(self, rank):
        state = self._ranks[rank]
        state.blocked_by = next(state.host, [])
        state.ended = not state.blocked_by

    def _host(self, rank, calls):
        """Make the calls of a rank; yield, while the host is blocked, what it waits for: ranks
        whose hosts must come, or work."""
        for call in calls:
            state = self._ranks[rank]
            state.call = call
            if isinstance(call, CreateCommunicator):
                yield from self._create(rank, call)
            elif isinstance(call, CollectiveCall):
                yield from self._collective(rank, call)
            elif isinstance(call, MessageGroup):
                yield from self._group(rank, call)
            elif isinstance(call, RecordEvent):
                state.events[call.event] = state.last.get(call.stream)
            elif isinstance(call, Synchronize):
                known = [state.events.get(call.event)]
                for work in [*state.last.values()] if call.event is None else known:
                    while work is not None and not work.done:
                        yield [work]
            elif isinstance(call, WaitEvent):
                self._start(_DeviceTask(rank, call, state.events.get(call.event)))
            else:
                self._start(_DeviceTask(rank, call))

    def _meet(self, rank, point, ranks):
        """Block the host until the hosts of all these ranks have come to the same."""
        self._met[point].add(rank)
        self._wake(ranks)
        while missing := [other for other in ranks if other not in self._met[point]]:
            yield missing

    def _create(self, rank, call):
        state = self._ranks[rank]
        if state.created == len(self._created):
            self._created.append((rank, call))
        other, first = self._created[state.created]
        if (call.communicator, call.ranks) != (first.communicator, first.ranks):
            raise _make_mismatch(rank, call, other, first)
        yield from self._meet(rank, ("create", state.created), self._world)
        state.created += 1
        self._members[call.communicator] = call.ranks

    def _collective(self, rank, call):
        name, ranks = call.communicator, self._members[call.communicator]
        work = _DeviceTask(rank, call)
        others = [(name, other) for other in ranks if other != rank]
        place = self._join(work, (name, rank), others, call.form)
        yield from self._meet(rank, (name, call.form, place if call.uneven else None), ranks)
        self._start(work)

    def _group(self, rank, call):
        name, ranks = call.communicator, self._members[call.communicator]
        work = _DeviceTask(rank, call)
        for transfer in call.transfers:
            self._join(
                work,
                (name, *end_of(rank, transfer)),
                [(name, *find_other_end(rank, transfer))],
                transfer.size,
            )
        known = [
            transfer for transfer in call.transfers if (name, *end_of(rank, transfer)) in self._met
        ]
        for batch in list_connections(rank, ranks, call.transfers, known):
            self._met.update({(name, *end_of(rank, transfer)): {rank} for transfer in batch})
            self._wake(transfer.peer for transfer in batch)
            for transfer in batch:
                while (name, *find_other_end(rank, transfer)) not in self._met:
                    yield [transfer.peer]
        self._start(work)

    def _join(self, work, mine, others, content):
        """Make work the next of its side, to be matched with the same of the other sides. Returns
        its number there."""
        place = len(self._works[mine])
        self._works[mine].append((work, content))
        for side in others:
            work.sides.append((side, place))
            for other_work, other_content in self._works[side][place : place + 1]:
                if other_content != content:
                    raise _make_mismatch(work.rank, work.call, other_work.rank, other_work.call)
        return place

    # ----------------------------------------------------------------------------------- the device

    def _start(self, work):
        """Put work into the queues of its rank."""
        state, call = self._ranks[work.rank], work.call
        # The order of a queue is also that of each of its streams.
        fifos = [("queue", state.queues.setdefault(call.stream, len(state.queues) % self._queues))]
        if isinstance(call, CollectiveCall | MessageGroup):
            fifos.append(("communicator", call.communicator))
        if isinstance(call, CollectiveCall):
            fifos.append(("collectives",))
        work.fifos = [state.fifos.setdefault(fifo, deque()) for fifo in fifos]
        for fifo in work.fifos:
            fifo.append(work)
        state.last[call.stream] = work
        self._wake([work.rank])

    def _run_device(self, rank):
        """Start and end work of a rank, until nothing more may."""
        fifos, moved = self._ranks[rank].fifos.values(), True
        while moved:
            moved = False
            for fifo in fifos:
                while fifo and self._run_first(fifo[0]):
                    moved = True

    def _run_first(self, work):
        """Return whether work that is first in one of its queues has ended."""
        if not work.started and all(fifo[0] is work for fifo in work.fifos):
            work.started = True
            if isinstance(work.call, CollectiveCall | MessageGroup):
                self._wake(self._members[work.call.communicator])
        if not work.started or [*self._missing(work)]:
            return False
        work.done = True
        for fifo in work.fifos:
            fifo.popleft()
        self._wake([work.rank])
        return True

    def _missing(self, work):
        """Yield what started work waits for: other work, or ranks whose hosts must start theirs."""
        if work.after is not None and not work.after.done:
            yield work.after
        for side, place in work.sides:
            begun = [other for other, _ in self._works[side][place : place + 1]]
            if not begun or not begun[0].fifos:
                yield _rank_of(side)
            elif not begun[0].started:
                yield begun[0]

    # --------------------------------------------------------------------------------- explanations

    def _deadlock(self):
        """Follow what waits for what, until it comes back to itself or to a rank that has ended."""
        rank = next(rank for rank in self._world if not self._has_ended(rank))
        state, path = self._ranks[rank], []
        node = next(fifo[0] for fifo in state.fifos.values() if fifo) if state.ended else rank
        while node not in path and (waits := self._waits_for(node)):
            path.append(node)
            node = waits[0]
        if node in path:
            path, last = path[path.index(node) :], "the last for the first"
        else:
            path, last = [*path, node], "the last never comes"
        text = "\n".join(f"  {self._describe_call(node)}" for node in path)
        ranks = [node if isinstance(node, int) else node.rank for node in path]
        return Deadlock(f"each waits for the next, and {last}:\n{text}", ranks)

    def _has_ended(self, rank):
        state = self._ranks[rank]
        return state.ended and not any(state.fifos.values())

    def _waits_for(self, node):
        """Return what a host (the number of its rank) or work waits for."""
        if isinstance(node, int):
            state = self._ranks[node]
            return state.blocked_by
        if node.started:
            return [*self._missing(node)]
        return [fifo[0] for fifo in node.fifos if fifo[0] is not node]

    def _describe_call(self, node):
        if isinstance(node, _DeviceTask):
            return f"rank {node.rank}, device: {_show(node.call)}"
        state = self._ranks[node]
        return f"rank {node}, host: " + ("has ended" if state.ended else _show(state.call))


def _rank_of(side):
    """Return the rank of a side: see `_Simulation`."""
    return side[2] if len(side) == 4 and not side[3] else side[1]


def _show(call):
    return f"{call} [{call.where}]" if call.where else str(call)


def _make_mismatch(rank, call, other, other_call):
    both = sorted([(rank, _show(call)), (other, _show(other_call))])
    calls = ", ".join(f"rank {number}: {text}" for number, text in both)
    return CallMismatch(f"ranks do not call the same: {calls}", (rank, other))
