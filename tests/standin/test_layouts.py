"""Every kind of layout comes to an end by NCCL's and CUDA's rules, from 2 to 16 ranks: two steps and
an evaluation, of which each rank's calls are recorded and then simulated together. And each mistake
that the rules are there for is found.
"""

from contextlib import nullcontext
from dataclasses import replace
from typing import get_args

import pytest
import torch

from megaframe.comm import all_reduce
from megaframe.config import RunConfig
from megaframe.config.schema import Parallel
from megaframe.layout import Layout
from megaframe.microbatch import Microbatch
from megaframe.pipeline import Pipeline
from megaframe.schedule import NAMES
from standin.recorder import calls_of
from standin.rules import Collective, Create, Deadlock, Mismatch, simulate

GPT2 = {"position": "learned", "bias": True, "tie_embeddings": True}
LLAMA = {"norm": "rmsnorm", "activation": "swiglu", "kv_heads": 2}
EXPERTS = {**LLAMA, "moe": {"experts": 16, "ffn": 8, "top_k": 2, "balance": "global", "shared": 1}}
CHUNKS = {
    "interleaved": 2,
    "breadth-first": 2,
    "zb-v": 2,
    "v-half": 2,
    "dualpipe-v": 2,
    "search": 2,
}


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
QUICK = {
    ("1f1b", 2),
    ("zb-v", 2),
}


def named(world, model, parallel):
    return f"{world}: " + " ".join(f"{key}={value}" for key, value in parallel.items())


def trained(config):
    """Return a function that trains on a mesh, one step if it has many ranks or else two, and then
    evaluates."""

    def work(mesh):
        pipeline = Pipeline(config, mesh, lambda part: nullcontext())
        pipeline.optimizer.initialise(config.run.seed)
        train = config.train
        tokens = torch.arange(train.seq).repeat(train.microbatch, 1) % config.model.vocab
        one = Microbatch(tokens, tokens, torch.arange(train.microbatch))
        many = train.global_batch // (train.microbatch * mesh.layout.data)
        for step in range(1 if mesh.layout.world > 4 else 2):
            outcome = pipeline.train([one] * many, step, 1.0)
            all_reduce(outcome.loss, mesh.world).wait()
        pipeline.evaluate([one] * many)

    return work


def recorded(world, model, parallel, work=trained):
    """Return the calls of each rank, which trains as few microbatches as the layout allows."""
    ranks, chunks = parallel.get("pipeline", 1), parallel.get("chunks", 1)
    held = ranks * parallel.get("tensor", 1) * parallel.get("context", 1)
    config = RunConfig(
        model={"layers": max(2, ranks * chunks), "hidden": 16, "heads": 8, "vocab": 64, **model},
        train={
            "seq": 32,
            "global_batch": max(2, ranks) * (world // held),
            "microbatch": 1,
            "precision": "bf16",
        },
        parallel=parallel,
    )
    layout = Layout.from_parallel(config.parallel, world)
    return [calls_of(layout, rank, work(config)) for rank in range(world)]


@pytest.mark.parametrize(
    ("world", "model", "parallel"), LAYOUTS, ids=[named(*layout) for layout in LAYOUTS]
)
def test_every_layout_comes_to_an_end(world, model, parallel):
    simulate(recorded(world, model, parallel))
