"""Tensor and sequence parallel ranks give the one-process answer to 1e-10 in fp64, alone and with
pipelines and data ranks: odd vocabulary, uneven groups and rows, tied and untied, every norm.

Tests `megaframe.tensor_parallel.embedding`.
"""

from collections import Counter

import pytest
import torch
from bitwise import assert_same_bits
from parity_runs import FEW, MODELS, STEPS, assert_same, run
from patience import PATIENCE
from saved_bytes import measure_block
from slow_cases import mark_slow, slow
from torch.distributed import _symmetric_memory

from megaframe.distributed.collectives import ALONE
from megaframe.distributed.mesh import Mesh
from megaframe.layout import Layout
from megaframe.tensor_parallel import symmetric_memory

SHAPES = {
    **MODELS,
    "smooth": {"position": "none", "logit_softcap": 3.0, "activation": "relu2", "bias": True},
    "windows": {
        **{"window": (4, None), "qkv_bias": True, "kv_heads": 4, "ffn": 30},
        "activation": "geglu",
    },
    "clamped": {"norm": "rmsnorm", "activation": "swiglu_clamped", "bias": True, "init_std": 1.0},
}
TRAIN = {"smooth": {"label_smoothing": 0.1, "z_loss": 0.01}}
INTERLEAVED = {"tensor": 2, "pipeline": 2, "chunks": 2, "schedule": "interleaved"}
ZB_V = {**INTERLEAVED, "schedule": "zb-v"}
LAYOUTS = [
    (2, {"tensor": 2}, "none"),
    (2, {"tensor": 2}, "selective"),
    (2, {"tensor": 2}, "full"),
    (4, {"tensor": 4}, "selective"),
    (4, {"tensor": 2, "data": 2}, "none"),
    (4, INTERLEAVED, "full"),
    (4, ZB_V, "none"),
    (4, ZB_V, "selective"),
]
QUICK = [
    ("windows", 2, {"tensor": 2}, "selective"),
    ("llama", 4, {"tensor": 4}, "selective"),
    ("llama", 4, INTERLEAVED, "full"),
    ("smooth", 4, ZB_V, "none"),
    ("clamped", 2, {"tensor": 2}, "none"),
]
"""Each shape, each number of ranks and each kind of recompute once."""
IN_TURN = [(list(SHAPES)[i % len(SHAPES)], *layout) for i, layout in enumerate(LAYOUTS)]
CASES = [*QUICK, *(case for case in IN_TURN if case not in QUICK)]
CHUNKED = [
    slow("smooth", 2, {"tensor": 2, "tensor_chunks": 2}, {"recompute": "selective"}),
    slow("windows", 2, {"tensor": 2, "tensor_chunks": 3}, {}),
    ("llama", 4, {"tensor": 4, "tensor_chunks": 3}, {"recompute": "selective", "microbatch": 4}),
    slow("gpt2", 4, {**ZB_V, "tensor_chunks": 2}, {"recompute": "selective"}),
]
"""Layouts with rows in parts. Each rank has 5 or 10 rows, which no number of parts divides."""


def shape_model(name, parallel):
    """Return a model with two layers for each pipeline rank."""
    return {**SHAPES[name], "layers": 2 * parallel.get("pipeline", 1)}


def make_train(name, microbatch, **train):
    return {**FEW, "microbatch": microbatch, **train, **TRAIN.get(name, {})}


def assert_same_result(pool, run_alone, name, ranks, parallel, train):
    model = shape_model(name, parallel)
    results = pool.run(ranks, run, model, train, parallel)
    assert_same(results, run_alone(model, make_train(name, 4)))


@pytest.mark.parametrize(
    ("name", "ranks", "parallel", "recompute"), mark_slow(CASES, except_for=QUICK)
)
def test_layouts_do_not_change_the_answer(name, ranks, parallel, recompute, pool, run_alone):
    # With one sample there are 10 rows, which 4 ranks do not divide.
    train = make_train(name, 1 if parallel == {"tensor": 4} else 2, recompute=recompute)
    assert_same_result(pool, run_alone, name, ranks, parallel, train)


@pytest.mark.parametrize(("name", "ranks", "parallel", "train"), CHUNKED)
def test_parts_of_rows_do_not_change_the_answer(name, ranks, parallel, train, pool, run_alone):
    train = make_train(name, **{"microbatch": 1, **train})
    assert_same_result(pool, run_alone, name, ranks, parallel, train)


def run_fused(model, train, parallel):
    """`run` with torch's fused operators, whose reference implementations replace those for GPUs ->
    its result, and how often each operator was called."""
    calls, library = Counter(), torch.library.Library("symm_mem", "IMPL")
    references = {
        "fused_all_gather_matmul": _symmetric_memory._fused_all_gather_matmul_fallback,
        "fused_matmul_reduce_scatter": _symmetric_memory._fused_matmul_reduce_scatter_fallback,
    }
    for name, reference in references.items():

        def counted(*positional, name=name, reference=reference, **named):
            calls[name] += 1
            return reference(*positional, **named)

        library.impl(name, counted, "CPU")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(symmetric_memory, "is_available", lambda group, node_size: group.size > 1)
        result = run(model, train, parallel)
    library._destroy()
    return result, [calls[name] for name in references]


def test_fused_operators_mean_by_their_operands_what_is_handed_to_them(pool, run_alone):
    parallel = {"tensor": 2, "symmetric_memory": "auto"}
    arguments = shape_model("smooth", parallel), make_train("smooth", 2), parallel
    results, calls = zip(*pool.run(2, run_fused, *arguments), strict=True)
    assert_same(results, run_alone(arguments[0], make_train("smooth", 4)))
    # Two in each of two blocks, for two microbatches in every step and in the evaluation.
    assert calls == ([2 * 2 * (STEPS + 1) * 2] * 2,) * 2


def test_nothing_is_fused_without_gpus(pool):
    assert pool.run(2, is_fused, 2) == [False, False]
    assert not symmetric_memory.is_available(ALONE, 1)


def is_fused(tensor):
    mesh = Mesh(Layout(tensor=tensor), device="cpu", timeout=PATIENCE)
    usable = symmetric_memory.is_available(mesh.group("tensor"), tensor)
    mesh.finish()
    return usable


@pytest.mark.parametrize(("tensor", "chunks"), [slow(2, 1), (4, 3)])
@pytest.mark.parametrize("recompute", [slow("none"), "selective"])
@pytest.mark.parametrize(
    "model", [{}, {"norm": "rmsnorm", "activation": "swiglu"}, {"window": (4, None)}]
)
def test_activations_and_bytes_are_the_closed_forms(model, recompute, tensor, chunks, pool):
    """What a block keeps is divided by the ranks, and it keeps no mask. In each layer, the forward
    pass moves (t-1)/t b s h elements 4 times, the backward pass 6 times, because it gathers inputs
    again instead of keeping them. The embedding and the head move as much twice each, and the loss
    3 numbers per token in fp32. The number of parts does not matter."""
    for saved, planned, bytes_sent in pool.run(
        tensor, measure_block, model, recompute, tensor, chunks
    ):
        assert saved == planned
        stream = 2 * 16 * 64 * 2
        losses = 2 * (1 + 2) * 2 * 16 * 4
        assert (
            bytes_sent
            == (10 + 2 + 2) * stream * (tensor - 1) // tensor + losses * (tensor - 1) // tensor
        )


def test_overlap_changes_no_bit(pool, run_alone):
    parallel = {"tensor": 2, "tensor_chunks": 3}
    train = make_train("llama", 2, recompute="selective")
    arguments = shape_model("llama", parallel), train, parallel
    serial, overlapped = (pool.run(2, run, *arguments, serial) for serial in (True, False))
    assert_same_bits(serial, overlapped, because="overlap moves waits, not what is computed")
    assert_same(overlapped, run_alone(arguments[0], make_train("llama", 4)))
