"""Records the calls of one rank of any world, which runs alone: the real executor, on meta tensors
(`megaframe.training.meta_step`), with process groups that write down what they are asked to start.

What kernels would run is not written down: one stands for all between two transfers. Numbers that
are real because the host needs them, such as how many rows go to each expert, are waited for by the
host.
"""

from contextlib import contextmanager

import torch

from fake_cuda.nccl_rules import (
    CreateCommunicator,
    LaunchKernel,
    Message,
    MessageGroup,
    RecordEvent,
    Synchronize,
    WaitEvent,
    describe_size,
    find_line,
    make_collective,
)
from megaframe.distributed import collectives
from megaframe.distributed.fake_group import FakeGroup, FinishedWork
from megaframe.distributed.mesh import Mesh
from megaframe.ops.meta_tensors import MetaTensorMode

COMPUTE, POOL = 0, 32
"""The stream of kernels; and the number of torch's streams, which communicators take in turn."""


class RecordedCalls(list):
    """The calls of one rank."""

    def __init__(self):
        super().__init__()
        self._events = self.communicators = 0

    def event(self, stream):
        """Record an event."""
        self._events += 1
        self.append(RecordEvent(stream, self._events))
        return self._events

    def transfer(self, call, real):
        """Start a transfer that follows what the rank has computed. real: the host needs what it
        brings."""
        where = find_line()
        self.append(LaunchKernel(COMPUTE, where))
        self.append(WaitEvent(call.stream, self.event(COMPUTE), where))
        self.append(call)
        return _RecordedWork(self, self.event(call.stream), real)


class _RecordedWork(FinishedWork):
    def __init__(self, calls, event, real):
        super().__init__()
        self._calls, self._event, self._real = calls, event, real

    def wait(self, timeout=None):
        self._calls.append(WaitEvent(COMPUTE, self._event, find_line()))
        if self._real:
            self._calls.append(Synchronize(self._event, find_line()))
        return True


class RecordedGroup(FakeGroup):
    """The communicator `name`, as rank ranks[index]."""

    def __init__(self, calls, name, ranks, index):
        super().__init__(index, len(ranks))
        self._calls, self._name, self._ranks = calls, name, ranks
        self._stream = 1 + calls.communicators % POOL
        calls.communicators += 1
        self._grouped = None

    def _collective(self, kind, tensor, uneven):
        call = make_collective(self._name, self._stream, kind, tensor, uneven)
        return self._calls.transfer(call, not tensor.is_meta)

    def _message(self, kind, tensor, peer):
        transfer = Message(kind, self._ranks[peer], describe_size(tensor))
        if self._grouped is None:
            return self._start([transfer], not tensor.is_meta)
        self._grouped.append(transfer)
        return None

    def _start(self, transfers, real=False):
        call = MessageGroup(self._name, self._stream, tuple(transfers), find_line())
        return self._calls.transfer(call, real)

    def _start_coalescing(self, device):
        self._grouped = []

    def _end_coalescing(self, device):
        transfers, self._grouped = self._grouped, None
        return self._start(transfers)

    def allreduce(self, tensors, options):
        super().allreduce(tensors, options)
        return self._collective("all_reduce", tensors[0], False)

    def _allgather_base(self, out, tensor, opts=None):
        super()._allgather_base(out, tensor, opts)
        return self._collective("all_gather", tensor, False)

    def allgather(self, *arguments, **options):
        super().allgather(*arguments, **options)
        return self._collective("all_gather", arguments[1][0], True)

    def _reduce_scatter_base(self, out, tensor, opts=None):
        super()._reduce_scatter_base(out, tensor, opts)
        return self._collective("reduce_scatter", out, False)

    def reduce_scatter(self, *arguments):
        super().reduce_scatter(*arguments)
        return self._collective("reduce_scatter", arguments[0][0], True)

    def alltoall_base(self, out, tensor, coming, leaving, opts=None):
        super().alltoall_base(out, tensor, coming, leaving, opts)
        return self._collective("all_to_all", tensor, bool(coming))

    def recv(self, tensors, source, tag):
        super().recv(tensors, source, tag)
        return self._message("receive", tensors[0], source)

    def send(self, tensors, target, tag):
        super().send(tensors, target, tag)
        return self._message("send", tensors[0], target)

    # For tensors on the host torch calls these, and for those without content the names before.
    all_gather_single, reduce_scatter_single = _allgather_base, _reduce_scatter_base
    all_to_all_single = alltoall_base


class RecordingMesh(Mesh):
    """The mesh of a rank that runs alone and writes down its calls."""

    def __init__(self, layout, rank, calls):
        self.calls, self._made = calls, 0
        super().__init__(layout, alone=rank)

    def _make_handle(self, ranks, backend, **options):
        if backend == "gloo":
            return super()._make_handle(ranks, backend, **options)
        self._made += 1
        name = f"communicator {self._made}"
        self.calls.append(CreateCommunicator(name, ranks, find_line()))
        if self.rank not in ranks:
            return None
        return RecordedGroup(self.calls, name, ranks, ranks.index(self.rank))


_SHAPES = {}
"""Results of operators by their arguments: all ranks have the same."""


class _RecordedMetaTensors(MetaTensorMode):
    """A number without content that the host asks for is one, and the host waits for it."""

    def __init__(self, calls):
        super().__init__()
        self._calls, self._shapes = calls, _SHAPES

    def run(self, func, args, kwargs):
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            self._calls.append(Synchronize(self._calls.event(COMPUTE), find_line()))
            return 1
        return super().run(func, args, kwargs)


@contextmanager
def _as_on_a_gpu():
    """Start what a GPU would, although tensors are on the host or have no content."""
    methods = {
        "should_send_pairwise": lambda self, tensor: False,
        "should_batch_messages": lambda self, tensor: isinstance(self.handle, RecordedGroup),
    }
    before = {name: vars(collectives.Group)[name] for name in methods}
    _set(methods)
    try:
        yield
    finally:
        _set(before)


def _set(methods):
    for name, method in methods.items():
        setattr(collectives.Group, name, method)


def record_calls(layout, rank, work):
    """Return the calls of a rank that does work(mesh) alone."""
    calls = RecordedCalls()
    with _RecordedMetaTensors(calls), _as_on_a_gpu():
        work(RecordingMesh(layout, rank, calls))
    return calls
