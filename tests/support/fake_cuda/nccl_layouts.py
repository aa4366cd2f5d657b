"""Layouts of every kind, from 2 to 16 ranks, and what their ranks do, for the rules."""

from contextlib import nullcontext

import torch

from fake_cuda.recorder import record_calls
from megaframe.config import RunConfig
from megaframe.data.microbatch import Microbatch
from megaframe.distributed.collectives import all_reduce
from megaframe.layout import Layout
from megaframe.schedule import SCHEDULE_NAMES
from megaframe.training.train_step import TrainStep

PLAIN = ("elementwise", "attention", "loss", "experts", "update")
GPT2 = {"position": "learned", "bias": True, "tie_embeddings": True}
LLAMA = {"norm": "rmsnorm", "activation": "swiglu", "kv_heads": 2}
EXPERTS = {**LLAMA, "moe": {"experts": 4, "ffn": 8, "top_k": 2, "balance": "global"}}
CHUNKS = dict.fromkeys(
    ("interleaved", "breadth-first", "zb-v", "v-half", "dualpipe-v", "search"), 2
)


def schedule_model(name, stages, **others):
    return {"pipeline": stages, "schedule": name, "chunks": CHUNKS.get(name, 1), **others}


RING, HEADS = {"context_kind": "ring"}, {"context_kind": "all_to_all"}
NESTED = {"context_kind": "nested", "context_heads": 2}
LAYOUTS = [
    *((2, GPT2, schedule_model(name, 2)) for name in SCHEDULE_NAMES),
    *((4, LLAMA, schedule_model(name, 4)) for name in SCHEDULE_NAMES),
    (8, GPT2, schedule_model("1f1b", 8)),
    (8, GPT2, schedule_model("interleaved", 4, zero=2)),
    (8, LLAMA, schedule_model("zb-v", 2, tensor=2, zero=1)),
    (2, LLAMA, {"context": 2, **RING}),
    (4, LLAMA, {"context": 4, **RING, "zero": 3}),
    (4, LLAMA, {"context": 4, **HEADS}),
    (4, LLAMA, {"context": 4, **NESTED}),
    (8, LLAMA, schedule_model("zb-v", 2, context=2, tensor=2, **RING)),
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
    (4, EXPERTS, schedule_model("dualpipe-v", 2, expert=2, expert_overlap=True)),
    (8, EXPERTS, {"tensor": 2, "context": 2, "expert": 4, "zero": 2}),
    (8, EXPERTS, schedule_model("interleaved", 2, expert=4, tensor=2, context=2)),
]


def name_layout(world, model, parallel):
    return f"{world}: " + " ".join(f"{key}={value}" for key, value in parallel.items())


def make_training(config):
    """Return a function that trains on a mesh, two steps on two ranks and one on more, and then
    evaluates."""

    def work(mesh):
        train_step = TrainStep(config, mesh, lambda part: nullcontext())
        train_step.optimizer.initialize(config.run.seed)
        train, device = config.train, mesh.device if mesh.device.type == "cuda" else "cpu"
        tokens = torch.arange(train.seq, device=device).repeat(train.microbatch, 1)
        batch = Microbatch(tokens, tokens, torch.arange(train.microbatch))
        many = train.global_batch // (train.microbatch * mesh.layout.data)
        for step in range(2 if mesh.layout.world == 2 else 1):
            result = train_step.train([batch] * many, step, 1.0)
            all_reduce(result.loss, mesh.world).wait()
        train_step.evaluate([batch] * many)

    return work


def make_config(world, model, parallel):
    """Return a config with as few microbatches as the layout allows."""
    ranks, chunks = parallel.get("pipeline", 1), parallel.get("chunks", 1)
    model_ranks = ranks * parallel.get("tensor", 1) * parallel.get("context", 1)
    return RunConfig(
        model={"layers": max(2, ranks * chunks), "hidden": 16, "heads": 8, "vocab": 64, **model},
        train={
            "seq": 32,
            "global_batch": max(2, ranks) * (world // model_ranks),
            "microbatch": 1,
            "precision": "bf16",
        },
        parallel=parallel,
        kernels=dict.fromkeys(
            ("elementwise", "attention", "loss", "experts", "update"), "reference"
        ),
    )


def record_layout(config, world):
    """Return the calls of each rank that trains."""
    return record_each(Layout.from_parallel(config.parallel, world), make_training(config))


def record_each(layout, work):
    return [record_calls(layout, rank, work) for rank in range(layout.world)]
