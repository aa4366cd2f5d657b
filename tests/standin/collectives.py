"""NCCL's process groups: gloo on the host's view of memory, in the order of the device's streams.

Each group has a stream of its own, as with NCCL: a transfer follows the work of the stream that
starts it, and `wait` lets the current stream follow the transfer. Data really moves when somebody
waits, at the latest.
"""

from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from standin import flight
from standin.aborts import Abortable, Sockets, destroy
from standin.machine import count_as_work, library, repeat_in_graph, report

host = torch.ops.standin.host
_init_process_group, _new_group = dist.init_process_group, dist.new_group
_destroy_process_group = dist.destroy_process_group
_ASKED = 2
"""A transfer that gloo has done is not said to be done before it was asked for this many times."""


class ProcessGroupNCCL:
    class Options:
        def __init__(self, is_high_priority_stream=False):
            self._timeout, self.config = None, SimpleNamespace()


def init_process_group(backend, pg_options=None, device_id=None, **options):
    return _init_process_group("gloo" if backend == "nccl" else backend, **options)


def new_group(ranks, timeout=None, backend=None, pg_options=None, group_desc=None, device_id=None):
    """Make a group of gloo, or one of NCCL if it is asked for with NCCL's options."""
    sockets = Sockets()
    made = _new_group(ranks, timeout=timeout, backend=backend or "gloo")
    if pg_options is None:
        return made
    sockets.take()
    assert device_id == torch.device("cuda", library.get_device())
    return Nccl(made, sockets) if dist.get_rank() in ranks else made


def destroy_process_group():
    destroy()
    _destroy_process_group()


def split_group(split_ranks, timeout, pg_options, group_desc):
    """Make the groups of a split, and return that of this rank. The default group must be bound to
    a device."""
    default = dist.group.WORLD
    device, default.bound_device_id = default.bound_device_id, None
    made = [new_group(r, timeout, pg_options=pg_options, device_id=device) for r in split_ranks]
    return next((m for m, r in zip(made, split_ranks, strict=True) if dist.get_rank() in r), None)


class Event:
    """What the stream of a group has come to."""

    def __init__(self, stream):
        self._event = library.new_event()
        library.event_record(self._event, stream)

    def not_before(self, time):
        library.event_not_before(self._event, time)

    def block(self, stream):
        library.event_wait(self._event, stream)

    def __del__(self):
        library.delete_event(self._event)


class Work(dist.Work):
    """A transfer. works: those of gloo. land: copies what has come to the device's memory. kept:
    tensors that live until somebody waits."""

    def __init__(self, works, land, event, kept):
        super().__init__()
        self._works, self._land, self._event, self._kept = works, land, event, kept
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


def _nothing():
    pass


class Nccl(Abortable, dist.ProcessGroup):
    """One communicator. sockets: those of its gloo group."""

    def __init__(self, gloo, sockets):
        dist.ProcessGroup.__init__(self, gloo.rank(), gloo.size())
        self.begin_life(sockets)
        self.gloo, self._stream = gloo, library.new_stream()
        self._together = None
        """The messages of the group of calls that is being made."""

    @property
    def group_name(self):
        return self.gloo.group_name

    def _start(self, name, reads, writes, launch):
        """Start a transfer. launch: is given copies of what is read and the memory of what is
        written, both of the host; returns gloo's work and what copies its result there."""
        for x in (*reads, *writes):
            assert x.is_cuda, "No backend type associated with device type cpu"
            assert x.is_contiguous(), "Tensors must be contiguous"
        self.check_alive()
        launch = self.flying(name, launch)
        here = library.get_stream()
        Event(here).block(self._stream)
        library.set_stream(self._stream)
        read, written = [host(x.detach()) for x in reads], [host(x.detach()) for x in writes]
        count_as_work(name, read, written)
        library.set_stream(here)
        event = Event(self._stream)

        def again():
            works, land = launch([x.clone() for x in read], written)
            Work([works], land, event, None)._finish()

        repeat_in_graph(again)
        work, land = launch([x.clone() for x in read], written)
        return Work([work], land, event, (reads, writes))

    def allreduce(self, tensors, options):
        def launch(reads, writes):
            (x,), (into,) = reads, writes
            work = dist.all_reduce(x, options.reduceOp, self.gloo, async_op=True)
            return work, lambda: into.copy_(x)

        return self._start("all_reduce", tensors, tensors, launch)

    def all_gather_single(self, into, x, options=None):
        def launch(reads, writes):
            found = torch.empty_like(writes[0])
            flat = found.view(-1), reads[0].view(-1)
            work = dist.all_gather_into_tensor(*flat, self.gloo, async_op=True)
            return work, lambda: writes[0].copy_(found)

        return self._start("all_gather", [x], [into], launch)

    def allgather(self, into, x, options=None):
        (parts,), (own,) = into, x

        def launch(reads, writes):
            sizes, flat = [part.numel() for part in writes], reads[0].view(-1)
            found = flat.new_empty(sum(sizes))
            leaving = [flat.numel()] * self.size()
            work = dist.all_to_all_single(
                found, flat.repeat(self.size()), sizes, leaving, self.gloo, async_op=True
            )

            def land():
                for part, came in zip(writes, found.split(sizes), strict=True):
                    part.copy_(came.view_as(part))

            return work, land

        return self._start("all_gather", [own], parts, launch)

    def all_to_all_single(self, into, x, coming, leaving, options=None):
        def launch(reads, writes):
            found, sizes = torch.empty_like(writes[0]), (coming or None, leaving or None)
            work = dist.all_to_all_single(found, reads[0], *sizes, self.gloo, async_op=True)
            return work, lambda: writes[0].copy_(found)

        return self._start("all_to_all", [x], [into], launch)

    def reduce_scatter_single(self, into, x, options):
        def launch(reads, writes):
            work = dist.all_reduce(reads[0], options.reduceOp, self.gloo, async_op=True)
            mine = reads[0].view(-1).chunk(self.size())[self.rank()]
            return work, lambda: writes[0].copy_(mine.view_as(writes[0]))

        return self._start("reduce_scatter", [x], [into], launch)

    def reduce_scatter(self, into, parts, options):
        (leaving,), sizes = parts, [part.numel() for part in parts[0]]

        def launch(reads, writes):
            whole = torch.cat([x.reshape(-1) for x in reads])
            work = dist.all_reduce(whole, options.reduceOp, self.gloo, async_op=True)
            mine = whole.split(sizes)[self.rank()]
            return work, lambda: writes[0].copy_(mine.view_as(writes[0]))

        return self._start("reduce_scatter", leaving, into, launch)

    def _start_coalescing(self, device):
        self._together = []

    def _end_coalescing(self, device):
        works, self._together = self._together, None
        started = [one for work in works for one in work._works]
        kept = [work._kept for work in works]
        return Work(started, lambda: [work._land() for work in works], Event(self._stream), kept)

    def _message(self, name, reads, writes, launch):
        work = self._start(name, reads, writes, launch)
        if self._together is not None:
            self._together.append(work)
        return work

    def send(self, tensors, target, tag):
        def launch(reads, writes):
            work = dist.isend(reads[0], group=self.gloo, group_dst=target, tag=tag)
            return work, _nothing

        return self._message("send", tensors, [], launch)

    def recv(self, tensors, source, tag):
        def launch(reads, writes):
            found = torch.empty_like(writes[0])
            work = dist.irecv(found, group=self.gloo, group_src=source, tag=tag)
            return work, lambda: writes[0].copy_(found)

        return self._message("receive", [], tensors, launch)

    def barrier(self, opts=None):
        self.check_alive()
        work = self.flight("barrier", dist.barrier(self.gloo, async_op=True))
        return Work([work], _nothing, Event(self._stream), None)


def install():
    for module in (dist, distributed_c10d):
        module.ProcessGroupNCCL = ProcessGroupNCCL
    distributed_c10d._NCCL_AVAILABLE = True
    dist.init_process_group, dist.new_group = init_process_group, new_group
    dist.destroy_process_group = destroy_process_group
    flight.install()
    dist.split_group = split_group
