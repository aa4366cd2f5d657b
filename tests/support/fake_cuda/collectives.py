"""NCCL's process groups: gloo on the host's view of memory, in the order of the device's streams.

Each group has a stream of its own, as with NCCL: a transfer follows the work of the stream that
starts it, and `wait` lets the current stream follow the transfer. Data really moves when somebody
waits, at the latest.

As with NCCL, the host that starts the first message from one rank to another, or the first
collective of a form, waits until the others have started it too: here for `PATIENCE` seconds, after
which it says what it has waited for. What the device's queues may hold up is left to
`nccl_rules.py`, for which every call is noted.
"""

from datetime import timedelta
from itertools import count
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from fake_cuda import flight_records
from fake_cuda.aborts import AbortableCommunicator, GlooSockets, destroy
from fake_cuda.machine import (
    count_as_work,
    host_waits,
    library,
    note,
    note_event,
    note_wait,
    repeat_in_graph,
    report,
)
from fake_cuda.nccl_rules import (
    CollectiveCall,
    CreateCommunicator,
    Message,
    MessageGroup,
    describe_size,
    end_of,
    find_line,
    find_other_end,
    list_connections,
    make_collective,
)

host = torch.ops.fake_cuda.host
_init_process_group, _new_group = dist.init_process_group, dist.new_group
_destroy_process_group = dist.destroy_process_group
PATIENCE = 30.0
"""Seconds that a host waits for others in a call that NCCL would not return from."""
_store, _numbers = None, count(1)
"""What all ranks can read, and the numbers of communicators."""
_ASKED = 2
"""A transfer that gloo has done is not said to be done before it was asked for this many times."""


class ProcessGroupNCCL:
    class Options:
        def __init__(self, is_high_priority_stream=False):
            self._timeout, self.config = None, SimpleNamespace()
            self.is_high_priority_stream = is_high_priority_stream


def init_process_group(backend, pg_options=None, device_id=None, **options):
    global _store, _numbers
    _init_process_group("gloo" if backend == "nccl" else backend, **options)
    dist.group.WORLD.bound_device_id = device_id
    _store = dist.PrefixStore("fake_cuda", options["store"].clone())
    _numbers = count(1)


def new_group(ranks, timeout=None, backend=None, pg_options=None, group_desc=None, device_id=None):
    """Make a group of gloo, or one of NCCL if it is asked for with NCCL's options."""
    if dist.group.WORLD.bound_device_id is not None:
        raise RuntimeError("torch splits the default group, which is bound, and ranks wait forever")
    if pg_options is None:
        return _new_group(ranks, timeout=timeout, backend=backend or "gloo")
    assert device_id == torch.device("cuda", library.get_device())
    created = CreateCommunicator(f"communicator {next(_numbers)}", tuple(ranks), find_line())
    note(created)
    rank = dist.get_rank()
    own_call = f"rank {rank}: {created} [{created.where}]"
    text = _store.compare_set(
        f"made/{created.communicator}", "", f"{created.ranks}|{own_call}"
    ).decode()
    agreed_ranks, _, other_call = text.partition("|")
    if agreed_ranks != str(created.ranks):
        raise RuntimeError(
            f"ranks do not make communicators in one order: {own_call}, {other_call}"
        )
    sockets = GlooSockets()
    group = _new_group(ranks, timeout=timeout, backend="gloo")
    sockets.take()
    return FakeNcclGroup(group, created, pg_options, sockets) if rank in ranks else group


def destroy_process_group():
    destroy()
    _destroy_process_group()


def split_group(split_ranks, timeout, pg_options, group_desc):
    """Make the groups of a split, and return that of this rank. The default group must be bound to
    a device."""
    default = dist.group.WORLD
    device, default.bound_device_id = default.bound_device_id, None
    groups = [new_group(r, timeout, pg_options=pg_options, device_id=device) for r in split_ranks]
    default.bound_device_id = device
    return next((m for m, r in zip(groups, split_ranks, strict=True) if dist.get_rank() in r), None)


class StreamEvent:
    """What the stream of a group has come to."""

    def __init__(self, stream):
        self._event = library.new_event()
        library.event_record(self._event, stream)
        self._noted = note_event(stream)

    def not_before(self, time):
        library.event_not_before(self._event, time)

    def block(self, stream):
        library.event_wait(self._event, stream)
        note_wait(stream, self._noted)

    def __del__(self):
        library.delete_event(self._event)


class FakeNcclWork(dist.Work):
    """A transfer. works: those of gloo. land: copies what has come to the device's memory. kept:
    tensors that live until somebody waits."""

    def __init__(self, works, on_done, event, keep_alive):
        super().__init__()
        self._works, self._land, self._event, self._kept = works, on_done, event, keep_alive
        self._asked = 0

    def _finish(self):
        for work in self._works:
            work.wait()
            self._event.not_before(work.began)
        self._land()
        self._works, self._land = [], lambda: None

    def wait(self, timeout=None):
        self._finish()
        self._event.block(library.get_stream())
        self._kept = None
        return True

    def is_completed(self):
        if library.is_capturing():
            report("capture", "a transfer is asked whether it is done during a capture")
        self._asked += 1
        done = self._asked > _ASKED and all(work.is_completed() for work in self._works)
        if done:
            self._finish()
        return done


class FakeNcclGroup(AbortableCommunicator, dist.ProcessGroup):
    """One communicator. created: the call that made it. options: what was asked for. sockets: those
    of its gloo group."""

    def __init__(self, gloo, created, options, sockets):
        dist.ProcessGroup.__init__(self, gloo.rank(), gloo.size())
        self.start_life(sockets)
        self.gloo, self._stream = gloo, library.new_stream()
        self._name, self._ranks = created.communicator, created.ranks
        self._me, self.options = dist.get_rank(), options
        self._connected, self._group = set(), None

    @property
    def group_name(self):
        return self.gloo.group_name

    def _start(self, call, reads, writes, launch):
        """Start a transfer. launch: is given copies of what is read and the memory of what is
        written, both of the host; returns gloo's works and what copies their result there."""
        for x in (*reads, *writes):
            assert x.is_cuda, "No backend type associated with device type cpu"
            assert x.is_contiguous(), "Tensors must be contiguous"
        self.check_alive()
        launch = self.wrap_launch(_parts_of(call, self._ranks), launch)
        current_stream = library.get_stream()
        StreamEvent(current_stream).block(self._stream)
        library.set_stream(self._stream)
        read, written = [host(x.detach()) for x in reads], [host(x.detach()) for x in writes]
        count_as_work(_name_of(call), read, written)
        library.set_stream(current_stream)
        note(call)
        event = StreamEvent(self._stream)

        def again():
            works, on_done = launch([x.clone() for x in read], written)
            FakeNcclWork(works, on_done, event, None)._finish()

        repeat_in_graph(again)
        works, land = launch([x.clone() for x in read], written)
        return FakeNcclWork(works, land, event, (reads, writes))

    def _collective(self, kind, x, reads, writes, launch, uneven=False):
        """Start a collective. x: a tensor of the same shape on all ranks, if it is not uneven."""
        call = make_collective(self._name, self._stream, kind, x, uneven)
        form = call.form
        if form not in self._connected:
            self._connected.add(form)
            others = [rank for rank in self._ranks if rank != self._me]
            _store.set(self._key(form, self._me), "")
            self._meet([self._key(form, rank) for rank in others], call, f"ranks {others}")

        def one(reads, writes):
            work, on_done = launch(reads, writes)
            return [work], on_done

        return self._start(call, reads, writes, one)

    def _messages(self, parts):
        """Start messages as one operation. parts: (transfer, tensor, peer in the group)."""
        transfers = tuple(transfer for transfer, _, _ in parts)
        call = MessageGroup(self._name, self._stream, transfers, find_line())
        known = [
            transfer for transfer in transfers if end_of(self._me, transfer) in self._connected
        ]
        for batch in list_connections(self._me, self._ranks, transfers, known):
            for one in batch:
                self._connected.add(end_of(self._me, one))
                _store.set(self._key(*end_of(self._me, one)), "")
            for one in batch:
                self._meet([self._key(*find_other_end(self._me, one))], call, f"rank {one.peer}")
        sends = [(x, peer) for transfer, x, peer in parts if transfer.kind == "send"]
        receives = [(x, peer) for transfer, x, peer in parts if transfer.kind == "receive"]

        def launch(reads, writes):
            received = [torch.empty_like(x) for x in writes]
            works = [
                dist.irecv(x, group=self.gloo, group_src=peer)
                for x, (_, peer) in zip(received, receives, strict=True)
            ]
            works += [
                dist.isend(x, group=self.gloo, group_dst=peer)
                for x, (_, peer) in zip(reads, sends, strict=True)
            ]

            def land():
                for x, tensor in zip(writes, received, strict=True):
                    x.copy_(tensor)

            return works, land

        return self._start(call, [x for x, _ in sends], [x for x, _ in receives], launch)

    def _key(self, *parts):
        return "/".join(map(str, (self._name, *parts)))

    def _meet(self, keys, call, others):
        """Wait until others have come to the same call, as the host does where NCCL connects."""
        doing = f"{call} [{call.where}]"
        _store.set(f"doing/{self._me}", doing)
        try:
            _store.wait(keys, timedelta(seconds=PATIENCE))
        except RuntimeError:
            connected_ranks = [r for r in self._ranks if _store.check([f"doing/{r}"])]
            last_calls = [f"rank {r}: {_store.get(f'doing/{r}').decode()}" for r in connected_ranks]
            raise RuntimeError(
                f"rank {self._me} waits forever for {others} to connect: NCCL connects ranks when "
                f"both make the call. Last connected by: {'; '.join(last_calls)}"
            ) from None

    def allreduce(self, tensors, options):
        def launch(reads, writes):
            (x,), (output,) = reads, writes
            work = dist.all_reduce(x, options.reduceOp, self.gloo, async_op=True)
            return work, lambda: output.copy_(x)

        return self._collective("all_reduce", tensors[0], tensors, tensors, launch)

    def all_gather_single(self, output, x, options=None):
        def launch(reads, writes):
            gathered = torch.empty_like(writes[0])
            flat = gathered.view(-1), reads[0].view(-1)
            work = dist.all_gather_into_tensor(*flat, self.gloo, async_op=True)
            return work, lambda: writes[0].copy_(gathered)

        return self._collective("all_gather", x, [x], [output], launch)

    def allgather(self, outputs, x, options=None):
        (parts,), (tensor,) = outputs, x

        def launch(reads, writes):
            sizes, flat = [part.numel() for part in writes], reads[0].view(-1)
            gathered = flat.new_empty(sum(sizes))
            leaving = [flat.numel()] * self.size()
            work = dist.all_to_all_single(
                gathered, flat.repeat(self.size()), sizes, leaving, self.gloo, async_op=True
            )

            def land():
                for part, tensor in zip(writes, gathered.split(sizes), strict=True):
                    part.copy_(tensor.view_as(part))

            return work, land

        return self._collective("all_gather", tensor, [tensor], parts, launch, uneven=True)

    def all_to_all_single(self, output, x, coming, leaving, options=None):
        def launch(reads, writes):
            received, sizes = torch.empty_like(writes[0]), (coming or None, leaving or None)
            work = dist.all_to_all_single(received, reads[0], *sizes, self.gloo, async_op=True)
            return work, lambda: writes[0].copy_(received)

        return self._collective("all_to_all", x, [x], [output], launch, uneven=bool(coming))

    def reduce_scatter_single(self, output, x, options):
        def launch(reads, writes):
            work = dist.all_reduce(reads[0], options.reduceOp, self.gloo, async_op=True)
            own_chunk = reads[0].view(-1).chunk(self.size())[self.rank()]
            return work, lambda: writes[0].copy_(own_chunk.view_as(writes[0]))

        return self._collective("reduce_scatter", output, [x], [output], launch)

    def reduce_scatter(self, outputs, parts, options):
        (leaving,), (output,), sizes = parts, outputs, [part.numel() for part in parts[0]]

        def launch(reads, writes):
            summed = torch.cat([x.reshape(-1) for x in reads])
            work = dist.all_reduce(summed, options.reduceOp, self.gloo, async_op=True)
            own_chunk = summed.split(sizes)[self.rank()]
            return work, lambda: writes[0].copy_(own_chunk.view_as(writes[0]))

        return self._collective("reduce_scatter", output, leaving, outputs, launch, uneven=True)

    def send(self, tensors, target, tag):
        return self._message("send", tensors[0], target)

    def recv(self, tensors, source, tag):
        return self._message("receive", tensors[0], source)

    def _message(self, kind, x, peer):
        part = Message(kind, self._ranks[peer], describe_size(x)), x, peer
        if self._group is None:
            return self._messages([part])
        self._group.append(part)
        return None

    def _start_coalescing(self, device):
        self._group = []

    def _end_coalescing(self, device):
        parts, self._group = self._group, None
        return self._messages(parts)

    # What torch 2.11 calls them.
    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single
    alltoall_base = all_to_all_single

    def barrier(self, opts=None):
        def launch(reads, writes):
            return [dist.barrier(self.gloo, async_op=True)], lambda: host_waits(self._stream)

        self.check_alive()
        note(CollectiveCall(self._name, self._stream, "barrier", where=find_line()))
        works, on_done = self.wrap_launch([("barrier", None)], launch)([], [])
        return FakeNcclWork(works, on_done, StreamEvent(self._stream), None)


def _parts_of(call, ranks):
    """Yield kind and peer, which collectives do not have, of each transfer of a call."""
    if isinstance(call, CollectiveCall):
        return [(call.form.partition(" ")[0], None)]
    return [(transfer.kind, ranks.index(transfer.peer)) for transfer in call.transfers]


def _name_of(call):
    """Return what the work of a call is called in reports."""
    return (
        call.form
        if isinstance(call, CollectiveCall)
        else " and ".join(t.kind for t in call.transfers)
    )


def install():
    for module in (dist, distributed_c10d):
        module.ProcessGroupNCCL = ProcessGroupNCCL
    distributed_c10d._NCCL_AVAILABLE = True
    dist.init_process_group, dist.new_group = init_process_group, new_group
    dist.destroy_process_group = destroy_process_group
    flight_records.install()
    dist.split_group = split_group
