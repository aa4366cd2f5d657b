"""Every kind of layout comes to an end by NCCL's and CUDA's rules, from 2 to 16 ranks: steps and an
evaluation, of which each rank's calls are recorded and then simulated together. And each mistake
that the rules are there for is found.
"""

from contextlib import nullcontext
from functools import partial
from typing import get_args

import pytest
import torch
import torch.distributed as dist

from megaframe import comm, mesh
from megaframe.comm import all_reduce, receive, send
from megaframe.comm.pending import started
from megaframe.config import RunConfig
from megaframe.config.schema import Parallel
from megaframe.layout import EXPERT_SETS, Layout
from megaframe.microbatch import Microbatch
from megaframe.pipeline import Pipeline
from megaframe.plan.streams import streams
from megaframe.schedule import NAMES
from standin.recorder import calls_of
from standin.rules import Deadlock, Mismatch, simulate

GPT2 = {"position": "learned", "bias": True, "tie_embeddings": True}
LLAMA = {"norm": "rmsnorm", "activation": "swiglu", "kv_heads": 2}
EXPERTS = {**LLAMA, "moe": {"experts": 4, "ffn": 8, "top_k": 2, "balance": "global"}}
CHUNKS = dict.fromkeys(
    ("interleaved", "breadth-first", "zb-v", "v-half", "dualpipe-v", "search"), 2
)


def scheduled(name, stages, **others):
    return {"pipeline": stages, "schedule": name, "chunks": CHUNKS.get(name, 1), **others}


RING, HEADS = {"context_kind": "ring"}, {"context_kind": "all_to_all"}
NESTED = {"context_kind": "nested", "context_heads": 2}
LAYOUTS = [
    *((2, GPT2, scheduled(name, 2)) for name in NAMES),
    *((4, LLAMA, scheduled(name, 4)) for name in NAMES),
    (8, GPT2, scheduled("1f1b", 8)),
    (8, GPT2, scheduled("interleaved", 4, zero=2)),
    (16, LLAMA, scheduled("zb-v", 4, tensor=2, zero=1)),
    (2, LLAMA, {"context": 2, **RING}),
    (4, LLAMA, {"context": 4, **RING, "zero": 3}),
    (4, LLAMA, {"context": 4, **HEADS}),
    (4, LLAMA, {"context": 4, **NESTED}),
    (8, LLAMA, {"context": 8, **RING}),
    (8, LLAMA, {"context": 8, **NESTED}),
    (16, LLAMA, scheduled("zb-v", 2, context=4, tensor=2, **RING)),
    *((2, GPT2, {"zero": zero}) for zero in (0, 1, 2, 3)),
    (4, GPT2, {"zero": 3, "data_replicate": 2}),
    (2, LLAMA, {"tensor": 2, "tensor_chunks": 2}),
    (4, LLAMA, {"tensor": 4, "tensor_chunks": 3}),
    (8, LLAMA, {"tensor": 4, "zero": 3}),
    (2, EXPERTS, {"expert": 2}),
    (4, EXPERTS, {"expert": 4, "dispatch": "all_gather"}),
    (4, EXPERTS, {"expert": 2, "expert_tensor": 2, "zero": 3}),
    (4, EXPERTS, {"expert": 4, "dispatch": "hierarchical", "node_size": 2}),
    (4, EXPERTS, {"expert": 4, "dispatch": "deduplicated", "node_size": 2}),
    (4, EXPERTS, scheduled("dualpipe-v", 2, expert=2, expert_overlap=True)),
    (8, EXPERTS, {"tensor": 2, "context": 2, "expert": 4, "zero": 2}),
    (16, EXPERTS, scheduled("interleaved", 2, expert=4, tensor=2, context=2)),
]
QUICK = [
    *(i for i, (world, _, one) in enumerate(LAYOUTS) if world == 2 and one.get("tensor", 1) == 1),
    *(i for i, (world, _, one) in enumerate(LAYOUTS) if world == 4 and "context_heads" in one),
]
"""Every schedule, a ring, both exchanges of heads, every ZeRO stage and one dispatch."""


def named(world, model, parallel):
    return f"{world}: " + " ".join(f"{key}={value}" for key, value in parallel.items())


def trained(config):
    """Return a function that trains on a mesh, two steps on two ranks and one on more, and then
    evaluates."""

    def work(mesh):
        pipeline = Pipeline(config, mesh, lambda part: nullcontext())
        pipeline.optimizer.initialise(config.run.seed)
        train = config.train
        tokens = torch.arange(train.seq).repeat(train.microbatch, 1) % config.model.vocab
        one = Microbatch(tokens, tokens, torch.arange(train.microbatch))
        many = train.global_batch // (train.microbatch * mesh.layout.data)
        for step in range(2 if mesh.layout.world == 2 else 1):
            outcome = pipeline.train([one] * many, step, 1.0)
            all_reduce(outcome.loss, mesh.world).wait()
        pipeline.evaluate([one] * many)

    return work


def configured(world, model, parallel):
    """Return a config with as few microbatches as the layout allows."""
    ranks, chunks = parallel.get("pipeline", 1), parallel.get("chunks", 1)
    held = ranks * parallel.get("tensor", 1) * parallel.get("context", 1)
    return RunConfig(
        model={"layers": max(2, ranks * chunks), "hidden": 16, "heads": 8, "vocab": 64, **model},
        train={
            "seq": 32,
            "global_batch": max(2, ranks) * (world // held),
            "microbatch": 1,
            "precision": "bf16",
        },
        parallel=parallel,
    )


def recorded(config, world):
    """Return the calls of each rank that trains."""
    return calls_of_each(Layout.from_parallel(config.parallel, world), trained(config))


def calls_of_each(layout, work):
    return [calls_of(layout, rank, work) for rank in range(layout.world)]


def streams_of(calls):
    return {call.stream for call in calls if hasattr(call, "stream")}


@pytest.mark.quick(when=lambda layout: layout in QUICK)
@pytest.mark.parametrize("layout", range(len(LAYOUTS)), ids=[named(*one) for one in LAYOUTS])
def test_every_layout_comes_to_an_end(layout):
    """With the number of hardware queues that a run asks for, one for each stream."""
    world, model, parallel = LAYOUTS[layout]
    config = configured(world, model, parallel)
    calls, queues = recorded(config, world), streams(config, world)
    assert max(len(streams_of(one)) for one in calls) <= queues
    simulate(calls, queues)


@pytest.mark.parametrize("key", ["schedule", "context_kind", "dispatch", "zero"])
def test_every_value_has_a_layout(key):
    """A layout that does not name one has the default, if there is one."""
    field = Parallel.model_fields[key]
    values = {"schedule": NAMES, "zero": range(4)}.get(key) or get_args(field.annotation)
    assert {one.get(key, field.default) for _, _, one in LAYOUTS} >= {*values}


# ------------------------------------------------------------------------------------ the mistakes


def one_by_one(out, group, receives, sends, kind):
    """Start the messages of `pass_on` as they were before: first the send, each on its own."""
    pending = None
    for call, key, messages in ((dist.isend, "dst", sends), (dist.irecv, "src", receives)):
        for rank, x in messages:
            start = partial(call, x, group=group.handle, **{f"group_{key}": rank})
            pending = started(out, group, start, kind, pending)
    return pending


@pytest.mark.quick(when=lambda ranks: ranks == 2)
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_ring_that_sends_first_is_found(ranks, monkeypatch):
    monkeypatch.setattr(comm, "_started_as_one", one_by_one)
    with pytest.raises(Deadlock, match=r"rank 0, host: send .* over .* \[.*\.py:\d+\]") as raised:
        simulate(recorded(configured(ranks, LLAMA, {"context": ranks}), ranks))
    assert {*raised.value.ranks} == {*range(ranks)}


@pytest.mark.quick(when=lambda ranks: ranks == 2)
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "v-half"])
def test_links_that_a_step_has_to_connect_are_found(schedule, ranks, monkeypatch):
    monkeypatch.setattr(mesh, "connect_link", lambda *arguments, **options: None)
    with pytest.raises(Deadlock, match=r"rank \d, host: receive .* \[engine\.py:\d+\]"):
        simulate(recorded(configured(ranks, LLAMA, scheduled(schedule, ranks)), ranks))


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "v-half"])
def test_receives_on_more_streams_than_queues_are_found(schedule):
    """Each rank computes behind a receive of what the other would send later."""
    config = configured(2, LLAMA, scheduled(schedule, 2))
    calls = recorded(config, 2)
    count = max(len(streams_of(one)) for one in calls)
    simulate(calls, count)
    for queues in (1, 2):
        assert queues < count
        with pytest.raises(Deadlock, match=r"device: receive .* \[engine\.py:\d+\]"):
            simulate(calls, queues)


def test_communicators_made_in_another_order_are_found():
    def work(mesh):
        mesh.add_groups(EXPERT_SETS if mesh.rank else EXPERT_SETS[::-1])

    layout = Layout(data=4, expert=2, expert_tensor=2)
    with pytest.raises(Mismatch, match=r"rank 0: making .* \[test_.*\], rank \d: making"):
        simulate(calls_of_each(layout, work))


def test_collectives_of_two_communicators_in_opposite_orders_are_found():
    """Also when both have been used before, so that no host waits."""

    def work(backwards):
        def start(mesh):
            groups = [mesh.group("tensor"), mesh.group("data")]
            order = groups[::-1] if mesh.rank in backwards else groups
            for several in (groups, order):
                ones = [torch.ones(4, device=mesh.device) for _ in several]
                pending = [all_reduce(*one) for one in zip(ones, several, strict=True)]
                for one in pending:
                    one.wait()

        return start

    layout = Layout(tensor=2, data=2)
    simulate(calls_of_each(layout, work({0, 1, 2, 3})))
    with pytest.raises(Deadlock, match=r"rank \d, device: all_reduce .* \[test_layouts.py:\d+\]"):
        simulate(calls_of_each(layout, work({1, 2})))


@pytest.mark.parametrize("kind", ["collective", "message"])
def test_another_size_on_one_rank_is_found(kind):
    def work(mesh):
        x, group = torch.ones(4 + mesh.rank, device=mesh.device), mesh.group("data")
        if kind == "collective":
            all_reduce(x, group).wait()
        else:
            (receive if mesh.rank else send)(x, group).wait()

    told = {
        "collective": r"rank 0: all_reduce float32 4 .*, rank 1: all_reduce float32 5 ",
        "message": r"rank 0: send float32 4 to rank 1 .*, rank 1: receive float32 5 from rank 0 ",
    }
    with pytest.raises(Mismatch, match=told[kind] + r".*\[test_layouts.py:\d+\]"):
        simulate(calls_of_each(Layout(data=2), work))
