"""A checkpoint of any layout loads under any other: weights and optimizer state.

The saved tensors are not trained, but drawn from a generator that depends on their names, so every
element is known without a layout. The loaded bits must be the same, rounded if a precision on the
way is lower.
"""

import random
import zlib

import pytest
import torch
from patience import PATIENCE
from slow_cases import slow

from megaframe.checkpoint import CheckpointWriter, Slice, open_checkpoint
from megaframe.config import RunConfig
from megaframe.distributed.mesh import Mesh, read_world_size
from megaframe.layout import Layout
from megaframe.metrics import StepTimer
from megaframe.training.train_step import TrainStep

MODEL = {"layers": 4, "hidden": 16, "heads": 4, "vocab": 37}
MOE = {"experts": 4, "ffn": 12, "top_k": 2, "shared": 1}
MODELS = {
    "dense": {
        **{**MODEL, "bias": True, "position": "learned", "tie_embeddings": True},
        **{"kv_heads": 2, "qk_norm": "whole"},
    },
    "moe": {**MODEL, "kv_heads": 2, "activation": "swiglu", "norm": "rmsnorm", "moe": MOE},
}
V_SHAPED = {"pipeline": 2, "chunks": 2, "schedule": "zb-v"}
LAYOUTS = {
    "dense": [
        (1, {}),
        (2, {"tensor": 2}),
        (2, {"context": 2, "zero": 1}),
        (3, {"pipeline": 3, "layers_per_stage": "uneven"}),
        (3, {"zero": 3, "data": 3}),
        (4, {"zero": 2}),
        (4, {"zero": 3, "data_replicate": 2}),
        (4, {"tensor": 4}),
        (4, {"pipeline": 2, "tensor": 2}),
        (4, {**V_SHAPED, "zero": 1}),
        (4, {"pipeline": 4, "precision": "fp32"}),
        (2, {"zero": 2, "precision": "fp32"}),
    ],
    "moe": [
        (1, {}),
        (2, {"expert": 2}),
        (2, {"expert_tensor": 2, "zero": 1}),
        (3, {"zero": 3, "data": 3}),
        (4, {"expert": 4, "zero": 3}),
        (4, {"expert": 2, "expert_tensor": 2, "tensor": 2, "zero": 1}),
        (4, {**V_SHAPED, "expert": 2, "zero": 2}),
        (4, {"pipeline": 2, "tensor": 2, "expert_tensor": 2, "precision": "fp32"}),
        (4, {"data_replicate": 2, "expert": 2, "zero": 3}),
    ],
}
PAIRS = 20
"""Number of random pairs of layouts, for each model."""


def draw_tensor(name, shape):
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def build_model(model, parallel):
    """Build a model and its optimizer under a layout; return mesh, optimizer and precision."""
    parallel = dict(parallel)
    precision = parallel.pop("precision", "fp64")
    if parallel.get("layers_per_stage"):
        parallel["layers_per_stage"] = (2, 1, 1)
    config = RunConfig(
        model=MODELS[model],
        train={"seq": 12, "global_batch": 12, "precision": precision},
        parallel=parallel,
    )
    mesh = Mesh(
        Layout.from_parallel(config.parallel, read_world_size()), device="cpu", timeout=PATIENCE
    )
    return mesh, TrainStep(config, mesh, StepTimer().time).optimizer, precision


def round_tensor(tensor, *precisions):
    """Return a tensor after conversion to each of these precisions."""
    for precision in precisions:
        tensor = tensor.to({"fp32": torch.float32, "fp64": torch.float64}[precision])
    return tensor


def save(model, parallel, folder):
    """Draw every tensor, and save a checkpoint."""
    mesh, optimizer, _ = build_model(model, parallel)
    for name, spec, box, tensor in optimizer.list_tensors():
        tensor.copy_(draw_tensor(name, spec.shape)[box.slices])
    rank_arguments = {"rank": mesh.rank, "world": mesh.layout.world, "store": mesh.store}
    writer = CheckpointWriter(folder, **rank_arguments, keep=1, timeout=PATIENCE)
    pieces = optimizer.list_tensors(owned=True)
    writer.save(1, [Slice(name, spec.shape, box.offset, t) for name, spec, box, t in pieces], {})
    writer.wait()
    mesh.finish()


def load(model, parallel, sources):
    """Load each checkpoint -> the pieces that differ from what was drawn, and kinds of tensors.

    sources: (path, precision in which it was saved).
    """
    mesh, optimizer, precision = build_model(model, parallel)
    wrong, kinds = [], set()
    for path, saved_in in sources:
        pieces = list(optimizer.list_tensors())
        for *_, tensor in pieces:
            tensor.fill_(torch.nan)
        with open_checkpoint(path) as checkpoint:
            slices = [Slice(name, spec.shape, box.offset, t) for name, spec, box, t in pieces]
            checkpoint.load(slices)
        for name, spec, box, tensor in pieces:
            slices = round_tensor(draw_tensor(name, spec.shape)[box.slices], saved_in, precision)
            kinds.add(name.partition("/")[0] if "/" in name else "")
            if bool((tensor != slices).any()):
                wrong.append((path, name, box))
    mesh.finish()
    return wrong, sorted(kinds)


# The layouts of "moe" have every axis that divides weights, and every ZeRO stage.
@pytest.mark.parametrize("model", [slow("dense"), "moe"])
def test_any_layout_loads_as_any_other(model, pool, tmp_path):
    layouts = LAYOUTS[model]
    for number, (ranks, parallel) in enumerate(layouts):
        pool.run(ranks, save, model, parallel, tmp_path / str(number))
    generator = random.Random(model)
    layout_pairs = [(a, b) for a in range(len(layouts)) for b in range(len(layouts)) if a != b]
    pairs = generator.sample(layout_pairs, PAIRS)
    for number, (ranks, parallel) in enumerate(layouts):
        sources = [
            (tmp_path / f"{a}/step-00000001", layouts[a][1].get("precision", "fp64"))
            for a, b in pairs
            if b == number
        ]
        for wrong, kinds in pool.run(ranks, load, model, parallel, sources) if sources else ():
            assert not wrong, (layouts[number], wrong[:3])
            assert {"", "optimizer.mean", "optimizer.square"} <= {*kinds}
