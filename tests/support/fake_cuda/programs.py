"""Small programs for the stand-in: those with a fault of each kind, and those that use the
project's own code for streams, of which any wait can be left out."""

import sys
import threading

import torch
import triton
import triton.language as tl
from patience import PATIENCE
from torch import Tensor
from torch.cuda import Event, Stream, current_stream

import pretrain_gpt
from fake_cuda import collectives
from fake_cuda.collectives import FakeNcclWork
from fake_cuda.cuda import DeviceProperties
from fake_cuda.nccl_layouts import LAYOUTS, make_config, make_training
from megaframe.checkpoint.background import BackgroundCopier
from megaframe.checkpoint.slices import Slice
from megaframe.distributed import process_groups
from megaframe.distributed.collectives import Pending, Ring, all_reduce, receive, send, shift_ring
from megaframe.distributed.mesh import Mesh, read_world_size
from megaframe.distributed.nccl_settings import LINK_CTAS
from megaframe.distributed.pending import copy_to_host
from megaframe.layout import Layout
from megaframe.metrics import metrics_logger
from megaframe.metrics.timers import DeviceClock
from megaframe.optim.state_offload import GpuHostOffload
from megaframe.pipeline_parallel.activation_offload import ActivationOffload
from megaframe.training.cuda_graph import record_cuda


def pretrain_on():
    """Pretrain on another device than an H200: the command line begins with its name, compute
    capability and GiB."""
    name, capability, memory, *sys.argv[1:] = sys.argv[1:]
    DeviceProperties.name, DeviceProperties.total_memory = name, int(float(memory) * 2**30)
    DeviceProperties.major, DeviceProperties.minor = map(int, capability.split("."))
    pretrain_gpt.main()


def device():
    return torch.device("cuda", torch.cuda.current_device())


def main():
    """Run the program that the command line names."""
    globals()[sys.argv[1]]()


def without():
    """Run the program that the command line names first, in which one function does not make one
    call to a stream, an event or a transfer."""
    program, function, method = sys.argv[1:]
    for owner in (Stream, Event, Tensor, torch.cuda, FakeNcclWork):
        if method in vars(owner):
            _leave_out(owner, method, function)
    globals()[program]()


def _leave_out(owner, method, function):
    real = getattr(owner, method)

    def maybe(*arguments):
        if sys._getframe(1).f_code.co_name != function:
            return real(*arguments)

    setattr(owner, method, maybe)


# ---------------------------------------------------------------------------------------- faults


def unordered_streams():
    x, side = torch.zeros(100, device="cuda"), Stream()
    with torch.cuda.stream(side):
        x.add_(1)
    current_stream().wait_stream(side)


def ordered_streams():
    x, side = torch.zeros(100, device="cuda"), Stream()
    side.wait_stream(current_stream())
    with torch.cuda.stream(side):
        x.add_(1)
    current_stream().wait_stream(side)
    assert x.add_(1).sum().item() == 200


def reads_of_two_streams():
    x, side = torch.zeros(100, device="cuda"), Stream()
    side.wait_stream(current_stream())
    with torch.cuda.stream(side):
        x + 1
    x + 1
    current_stream().wait_stream(side)


def used_on_a_side_stream(after):
    """Free memory while a side stream may read it, unless after(x, side) prevents that."""
    x, side = torch.zeros(100, device="cuda"), Stream()
    side.wait_stream(current_stream())
    with torch.cuda.stream(side):
        x + 1
    after(x, side)


def freed_in_use():
    used_on_a_side_stream(lambda x, side: None)


def freed_but_recorded():
    used_on_a_side_stream(Tensor.record_stream)


def freed_after_a_wait():
    used_on_a_side_stream(lambda x, side: current_stream().wait_stream(side))


def pinned_memory_read_too_early():
    x, pinned = torch.ones(100, device="cuda"), torch.zeros(100, pin_memory=True)
    pinned.copy_(x, non_blocking=True)
    assert pinned.isnan().all()
    torch.cuda.synchronize()
    assert (pinned == 1).all()


def pinned_memory_changed_too_early():
    x, pinned = torch.ones(100, device="cuda"), torch.zeros(100, pin_memory=True)
    x.copy_(pinned, non_blocking=True)
    pinned.fill_(2)
    torch.cuda.synchronize()


def unrecorded_event():
    current_stream().wait_event(Event())


def nothing_written():
    assert torch.empty(100, device="cuda").isnan().all().item()


def captured(function, before=lambda: None):
    """Capture function(x) and replay it; return x, and what it returned."""
    x = torch.ones(100, device="cuda")
    before()
    result, replay = record_cuda(lambda: function(x))
    x.fill_(3)
    replay()
    return x, result


def a_graph():
    def work(x):
        side = Stream()
        side.wait_stream(current_stream())
        with torch.cuda.stream(side):
            y = 2 * x
        current_stream().wait_stream(side)
        y.record_stream(side)
        return y + x

    assert (captured(work)[1] == 9).all().item()


def a_graph_that_waits():
    captured(lambda x: x.sum().item())


def a_graph_that_copies_from_pageable_memory():
    captured(lambda x: x.copy_(torch.zeros(100), non_blocking=True))


def a_graph_with_an_event_from_outside():
    event = Event()
    captured(lambda x: current_stream().wait_event(event), event.record)


def a_graph_that_loses_a_stream():
    side = Stream()

    def work(x):
        side.wait_stream(current_stream())
        with torch.cuda.stream(side):
            torch.ones(1, device="cuda")

    captured(work)


def a_graph_and_another_stream():
    """Change what a graph reads, on a stream that it does not wait for."""
    x, _ = captured(lambda x: x + 1)
    with torch.cuda.stream(Stream()):
        x.zero_()


def a_mask():
    x = torch.ones(100, device="cuda")
    x[x > 0]


def raises(error, function, *arguments):
    try:
        function(*arguments)
    except error:
        return
    raise AssertionError(f"no {error.__name__}")


@triton.jit
def _copy(target, source):
    tl.store(target, tl.load(source))


def mixed_devices():
    on_host, on_device = torch.ones(2), torch.ones(2, device="cuda")
    raises(RuntimeError, torch.add, on_host, on_device)
    raises(RuntimeError, torch.add, on_device, on_host)
    raises(ValueError, _copy[(1,)], on_device, on_host)


def a_kernel_without_order():
    x, y = torch.zeros(2, device="cuda"), torch.ones(2, device="cuda")
    with torch.cuda.stream(Stream()):
        _copy[(1,)](x, y)


# --------------------------------------------------------------------------- the project's code


def activations():
    """Tensors go to the host and come back, while their memory is used again and again."""
    offload = ActivationOffload(device())
    for _ in range(2):
        stored = [offload.store(torch.full((1000,), float(i), device="cuda")) for i in range(4)]
        for i in reversed(range(4)):
            if i:
                stored[i - 1].fetch()
            assert (stored[i].take() == i).all().item()
    offload._free_outgoing(0)
    current_stream().wait_stream(offload._in)


def landing():
    """What a step computed reaches the host while the device goes on."""
    x = torch.ones(100, device="cuda")
    landed = copy_to_host([Pending(x.mul_(2))], device())
    del x
    (landed_tensor,) = landed()
    assert (landed_tensor == 2).all()


def optimizer_state():
    """Chunks of optimizer state come, are computed with and go back."""
    offload = GpuHostOffload(device())
    home = [{"m": offload.store((torch.full((size,), 1.0),))} for size in (100, 100, 200, 200, 100)]
    after = [None] * len(home)
    for _ in range(2):
        for i, parts in enumerate(home):
            chunk = offload.fetch(parts, after[i])
            offload.wait_for_fetched()
            chunk.parts["m"][0].mul_(2)
            after[i] = offload.write_back(chunk, parts)
    offload.synchronize()
    assert all((parts["m"][0] == 4).all() for parts in home)


def background():
    """Tensors are saved while the next step is computed, which waits before it changes them."""
    saved_in_background(lambda: None)


def background_far_behind():
    """The same, where the thread that saves knows nothing of the device before they change."""
    changed, synchronize = threading.Event(), Event.synchronize

    def late(event):
        changed.wait()
        synchronize(event)

    Event.synchronize = late
    saved_in_background(changed.set)


def saved_in_background(changed):
    x, shards = torch.zeros(1000, device="cuda").add_(5), []

    def work(entries, copy):
        shards.extend(bytes(copy.wait_for_entry(entry)) for entry in entries)

    copier = BackgroundCopier()
    copier.start([Slice("x", (1000,), (0,), x)], work)
    copier.wait_for_copy()
    x.zero_()
    changed()
    copier.wait()
    assert b"".join(shards)[:4000] == bytes(torch.full((1000,), 5.0).numpy())


def clock():
    """A graph of work whose time is taken."""
    clock_now = DeviceClock(device())
    clock_now()

    def work(x):
        clock_now()
        return x + 1

    captured(work)


def settings():
    """Two ranks of a pipeline make their groups and links."""
    mesh = Mesh(Layout(pipeline=2), device="cuda", timeout=30)
    mesh.connect([(0, 1), (1, 0)])
    handles = [mesh.world.handle, mesh.link(0, 1).handle, mesh.link(1, 0).handle]
    ctas = [vars(handle.options.config).get("max_ctas") for handle in handles]
    assert ctas == [None, LINK_CTAS, LINK_CTAS], ctas
    assert all(handle.options.is_high_priority_stream for handle in handles)
    assert not any(mesh.take_traffic().values())
    mesh.close()


def transfer():
    """Two ranks sum their gradients while they compute something else."""
    mesh = Mesh(Layout(data=2), device="cuda", timeout=30)
    x = torch.ones(100, device="cuda")
    pending = all_reduce(x, mesh.group("data"))
    y = torch.ones(100, device="cuda")
    assert (y + pending.wait() == 3).all().item()
    mesh.close()


# ------------------------------------------------------- what NCCL would wait for, on several ranks


def layout_of_a_test():
    """Do with real ranks what is recorded of ranks that run alone."""
    config = make_config(*LAYOUTS[int(sys.argv[2])])
    mesh = Mesh(
        Layout.from_parallel(config.parallel, read_world_size()), device="cuda", timeout=PATIENCE
    )
    make_training(config)(mesh)
    mesh.close()


def two_ranks():
    """Return a group of two ranks, what this one has, and where it receives."""
    collectives.PATIENCE = 3.0
    mesh = Mesh(Layout(data=2), device="cuda", timeout=30)
    return mesh, torch.full((4,), float(mesh.rank), device="cuda"), torch.empty(4, device="cuda")


def messages_both_ways_as_one():
    mesh, x, received = two_ranks()
    group = mesh.group("data")
    for _ in range(2):
        shift_ring(x, received, Ring(group.index, 2, group)).wait()
        assert (received == 1 - mesh.rank).all().item()
    mesh.close()


def messages_both_ways_one_by_one():
    mesh, x, received = two_ranks()
    leaving = send(x, mesh.group("data"))
    receive(received, mesh.group("data")).wait()
    leaving.wait()


def collectives_in_opposite_orders():
    mesh, x, _ = two_ranks()
    groups = [mesh._make_group(("data",), [(0, 1)]) for _ in range(2)]
    for group in groups[:: 1 if mesh.rank else -1]:
        all_reduce(x, group).wait()


def communicators_in_another_order():
    mesh, _, _ = two_ranks()
    members = [(0,), (0, 1)] if mesh.rank else [(0, 1), (0,)]
    for ranks in members:
        mesh._make_handles([ranks], None, "data", link=True)


def a_collective_without_a_rank():
    mesh, x, _ = two_ranks()
    if mesh.rank == 0:
        all_reduce(x, mesh.group("data")).wait()


def pretrain_without_connecting():
    """Pretrain with links that nothing connects before a step."""
    collectives.PATIENCE = 3.0
    process_groups.connect_link = lambda *arguments, **options: None
    metrics_logger.measure_idle_links = lambda *arguments: {}
    pretrain_gpt.main()
