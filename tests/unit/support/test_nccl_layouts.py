"""Every kind of layout comes to an end by NCCL's and CUDA's rules, from 2 to 16 ranks: steps and an
evaluation, of which each rank's calls are recorded and then simulated together. And each mistake
that the rules are there for is found, such as a link without its first message
(`megaframe.distributed.connections`).
"""

from functools import partial
from typing import get_args

import pytest
import torch
import torch.distributed as dist
from fake_cuda.nccl_layouts import (
    LAYOUTS,
    LLAMA,
    make_config,
    name_layout,
    record_each,
    record_layout,
    schedule_model,
)
from fake_cuda.nccl_rules import CallMismatch, Deadlock, simulate
from slow_cases import mark_slow, slow

from megaframe.architecture.cuda_streams import count_streams
from megaframe.config.parallel import ParallelConfig
from megaframe.distributed import point_to_point, process_groups
from megaframe.distributed.collectives import all_reduce, receive, send
from megaframe.distributed.pending import start_pending
from megaframe.layout import EXPERT_SETS, Layout
from megaframe.schedule import SCHEDULE_NAMES

QUICK = [
    i
    for i, (world, _, axes) in enumerate(LAYOUTS)
    if (world == 2 and axes.keys() & {"pipeline", "context", "expert"}) or axes == {"zero": 3}
]
"""Every schedule, a ring, experts and ZeRO."""


def list_streams(calls):
    return {call.stream for call in calls if hasattr(call, "stream")}


@pytest.mark.parametrize(
    "layout",
    mark_slow(range(len(LAYOUTS)), except_for=QUICK),
    ids=[name_layout(*case) for case in LAYOUTS],
)
def test_every_layout_comes_to_an_end(layout):
    """With the number of hardware queues that a run asks for, one for each stream."""
    world, model, parallel = LAYOUTS[layout]
    config = make_config(world, model, parallel)
    calls, queues = record_layout(config, world), count_streams(config, world)
    assert max(len(list_streams(recorded_call)) for recorded_call in calls) <= queues
    simulate(calls, queues)


@pytest.mark.parametrize("key", ["schedule", "context_kind", "dispatch", "zero"])
def test_every_value_has_a_layout(key):
    """A layout that does not name one has the default, if there is one."""
    field = ParallelConfig.model_fields[key]
    values = {"schedule": SCHEDULE_NAMES, "zero": range(4)}.get(key) or get_args(field.annotation)
    assert {layout.get(key, field.default) for _, _, layout in LAYOUTS} >= {*values}


# ------------------------------------------------------------------------------------ the mistakes


def shift_one_by_one(out, group, receives, sends, kind):
    """Start the messages of `shift_ring` as they were before: first the send, each on its own."""
    pending = None
    for call, key, messages in ((dist.isend, "dst", sends), (dist.irecv, "src", receives)):
        for rank, x in messages:
            start = partial(call, x, group=group.handle, **{f"group_{key}": rank})
            pending = start_pending(out, group, start, kind, pending)
    return pending


@pytest.mark.parametrize("ranks", [2, slow(4)])
def test_a_ring_that_sends_first_is_found(ranks, monkeypatch):
    monkeypatch.setattr(point_to_point, "_start_batched", shift_one_by_one)
    with pytest.raises(Deadlock, match=r"rank 0, host: send .* over .* \[.*\.py:\d+\]") as raised:
        simulate(record_layout(make_config(ranks, LLAMA, {"context": ranks}), ranks))
    assert {*raised.value.ranks} == {*range(ranks)}


@pytest.mark.parametrize(
    ("schedule", "ranks"),
    [
        *(("1f1b", 2), slow("1f1b", 4), slow("zb-h1", 2), slow("zb-h1", 4)),
        *(slow("v-half", 2), slow("v-half", 4), slow("1f1b", 8)),
    ],
)
def test_links_that_a_step_has_to_connect_are_found(schedule, ranks, monkeypatch):
    monkeypatch.setattr(process_groups, "connect_link", lambda *arguments, **options: None)
    with pytest.raises(Deadlock, match=r"rank \d, host: receive .* \[executor\.py:\d+\]"):
        simulate(record_layout(make_config(ranks, LLAMA, schedule_model(schedule, ranks)), ranks))


@pytest.mark.parametrize("schedule", ["1f1b", slow("interleaved"), slow("v-half")])
def test_receives_on_more_streams_than_queues_are_found(schedule):
    """Each rank computes behind a receive of what the other would send later."""
    config = make_config(2, LLAMA, schedule_model(schedule, 2))
    calls = record_layout(config, 2)
    count = max(len(list_streams(recorded_call)) for recorded_call in calls)
    simulate(calls, count)
    for queues in (1, 2):
        assert queues < count
        with pytest.raises(Deadlock, match=r"device: receive .* \[executor\.py:\d+\]"):
            simulate(calls, queues)


def test_what_is_computed_behind_a_receive_is_sent_after_it():
    """Rank 0 has three streams. With two queues, the receive shares one with what is computed."""

    def work(mesh):
        mesh.connect([(0, 1), (1, 0)])
        x, out, home = torch.ones(4, device=mesh.device), mesh.link(0, 1), mesh.link(1, 0)
        if mesh.rank:
            receive(x, out).wait()
            send(x, home).wait()
        else:
            coming = receive(x, home)
            send(x, out).wait()
            coming.wait()

    calls = record_each(Layout(pipeline=2), work)
    simulate(calls, 3)
    with pytest.raises(Deadlock, match=r"rank 0, device: a kernel"):
        simulate(calls, 2)


def test_communicators_made_in_another_order_are_found():
    def work(mesh):
        mesh.add_groups(EXPERT_SETS if mesh.rank else EXPERT_SETS[::-1])

    layout = Layout(data=4, expert=2, expert_tensor=2)
    with pytest.raises(CallMismatch, match=r"rank 0: making .* \[test_.*\], rank \d: making"):
        simulate(record_each(layout, work))


def test_collectives_of_two_communicators_in_opposite_orders_are_found():
    """Also when both have been used before, so that no host waits."""

    def work(backwards):
        def start(mesh):
            groups = [mesh.group("tensor"), mesh.group("data")]
            order = groups[::-1] if mesh.rank in backwards else groups
            for several in (groups, order):
                ones = [torch.ones(4, device=mesh.device) for _ in several]
                pending = [all_reduce(*pair) for pair in zip(ones, several, strict=True)]
                for transfer in pending:
                    transfer.wait()

        return start

    layout = Layout(tensor=2, data=2)
    simulate(record_each(layout, work({0, 1, 2, 3})))
    waits = r"rank \d, device: all_reduce .* \[test_nccl_layouts.py:\d+\]"
    with pytest.raises(Deadlock, match=waits):
        simulate(record_each(layout, work({1, 2})))


@pytest.mark.parametrize("kind", ["collective", "message"])
def test_another_size_on_one_rank_is_found(kind):
    def work(mesh):
        x, group = torch.ones(4 + mesh.rank, device=mesh.device), mesh.group("data")
        if kind == "collective":
            all_reduce(x, group).wait()
        else:
            (receive if mesh.rank else send)(x, group).wait()

    messages = {
        "collective": r"rank 0: all_reduce float32 4 .*, rank 1: all_reduce float32 5 ",
        "message": r"rank 0: send float32 4 to rank 1 .*, rank 1: receive float32 5 from rank 0 ",
    }
    with pytest.raises(CallMismatch, match=messages[kind] + r".*\[test_nccl_layouts.py:\d+\]"):
        simulate(record_each(Layout(data=2), work))
