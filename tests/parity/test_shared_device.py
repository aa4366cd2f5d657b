"""The main layouts with the collectives for GPUs, on one GPU that all ranks share
(`run.device=shared`), or on the CPU if there is none: 1e-10 in fp64, and overlapped runs bitwise
equal to serial ones.
"""

import pytest
import torch
from bitwise import assert_same_bits
from parity_runs import FEW, MODELS, assert_same, deterministic, run
from patience import PATIENCE
from slow_cases import mark_slow

from megaframe.distributed.collectives import (
    all_gather,
    all_gather_,
    all_gather_v,
    all_reduce,
    all_to_all,
    all_to_all_v,
    barrier,
    reduce_scatter,
    reduce_scatter_,
    reduce_scatter_v,
)
from megaframe.distributed.host_staged_group import HostStagedGroup
from megaframe.distributed.mesh import Mesh, read_world_size
from megaframe.distributed.object_collectives import gather_bytes
from megaframe.layout import Layout

EXPERTS = {**MODELS["llama"], "moe": {"experts": 4, "top_k": 2, "balance_loss": 0.01}}
LAYOUTS = [
    ("gpt2", 2, {"zero": 0}),
    ("gpt2", 4, {"zero": 2, "data_replicate": 2}),
    ("llama", 4, {"zero": 3, "tensor": 2}),
    ("gpt2", 2, {"tensor": 2, "tensor_chunks": 2}),
    ("llama", 4, {"context": 4, "zero": 3}),
    ("llama", 2, {"context": 2, "context_kind": "all_to_all"}),
    ("gpt2", 2, {"pipeline": 2, "chunks": 2, "schedule": "interleaved"}),
    ("gpt2", 4, {"pipeline": 2, "chunks": 2, "schedule": "zb-v", "zero": 2}),
    ("experts", 4, {"expert": 4}),
    ("experts", 4, {"expert": 2, "expert_tensor": 2, "dispatch": "all_gather"}),
]
OVERLAPPED = [LAYOUTS[place] for place in (2, 7, 8)]
"""Tensor, pipeline and expert ranks, with ZeRO stages 2 and 3."""


@pytest.mark.parametrize(
    ("name", "ranks", "parallel"), mark_slow(LAYOUTS, except_for=OVERLAPPED[1:])
)
def test_no_layout_changes_the_answer(name, ranks, parallel, pool, run_alone):
    model = {**({**MODELS, "experts": EXPERTS}[name]), "layers": 4}
    results = pool.run(ranks, run_on_shared_device, model, {**FEW, "microbatch": 1}, parallel)
    assert_same(results, run_alone(model, {**FEW, "microbatch": 4}))


def run_on_shared_device(model, train, parallel, serial=False):
    """`run` on the shared device, with plain code, which is as exact as fp64."""
    with deterministic():
        return run(model, train, parallel, serial, device="shared")


@pytest.mark.parametrize(
    ("name", "ranks", "parallel"), mark_slow(OVERLAPPED, except_for=[LAYOUTS[7]])
)
def test_serial_and_overlapped_are_bitwise_equal(name, ranks, parallel, pool):
    model = {**({**MODELS, "experts": EXPERTS}[name]), "layers": 4}
    arguments = (model, {**FEW, "microbatch": 1}, parallel)
    overlapped = pool.run(ranks, run_on_shared_device, *arguments)
    serial = pool.run(ranks, run_on_shared_device, *arguments, True)
    assert_same_bits(serial, overlapped, because="overlap moves waits, not what is computed")


def run_collectives():
    """Return each collective's result on this rank of three; inputs encode rank and position."""
    mesh = Mesh(
        Layout(data=read_world_size()), device="shared", timeout=PATIENCE, check_collectives=True
    )
    group, device = mesh.group("data"), mesh.device
    assert isinstance(group.handle, HostStagedGroup)

    def make_numbers(count, dtype=torch.float64):
        return torch.arange(count, dtype=dtype, device=device) + 100 * mesh.rank

    flat = make_numbers(6)
    gathered = make_numbers(6)
    outputs = {
        "all_reduce": all_reduce(make_numbers(3), group).wait(),
        "largest": all_reduce(make_numbers(3), group, "max").wait(),
        "all_gather": all_gather(make_numbers(2, torch.bfloat16), group).wait(),
        "reduce_scatter": reduce_scatter(make_numbers(6), group).wait(),
        "all_to_all": all_to_all(make_numbers(6).view(3, 2), group).wait(),
        "flat": reduce_scatter_(flat, group).wait(),
        "spread": all_gather_(gathered, group).wait(),
        "gather_v": all_gather_v(make_numbers(mesh.rank + 1), [1, 2, 3], group).wait(),
        "scatter_v": reduce_scatter_v(make_numbers(6), [1, 2, 3], group).wait(),
    }
    leaving = [[1, 0, 2], [2, 1, 0], [0, 3, 1]]
    coming = [row[mesh.rank] for row in leaving]
    parts = make_numbers(sum(leaving[mesh.rank]))
    exchanged = all_to_all_v(parts, leaving[mesh.rank], coming, group)
    outputs["to_all_v"] = exchanged.wait()
    barrier(group)
    texts = gather_bytes(bytes([mesh.rank]) * (mesh.rank + 1), group, device)
    mesh.finish()
    return {name: value.tolist() for name, value in outputs.items()} | {"texts": texts}


def test_each_call_gives_what_its_name_says(pool):
    outputs = pool.run(3, run_collectives)
    bases = [0, 100, 200]
    for rank, output in enumerate(outputs):
        assert output["all_reduce"] == [300.0, 303.0, 306.0]
        assert output["largest"] == [200.0, 201.0, 202.0]
        assert output["all_gather"] == [base + i for base in bases for i in range(2)]
        assert (
            output["reduce_scatter"]
            == output["flat"]
            == [300 + 3 * (2 * rank + i) for i in range(2)]
        )
        assert output["all_to_all"] == [[base + 2 * rank + i for i in range(2)] for base in bases]
        assert output["spread"] == [100 * r + 2 * r + i for r in range(3) for i in range(2)]
        assert output["gather_v"] == [100 * r + i for r in range(3) for i in range(r + 1)]
        start = (0, 1, 3)[rank]
        assert output["scatter_v"] == [300 + 3 * i for i in range(start, start + rank + 1)]
    assert [output["to_all_v"] for output in outputs] == [
        [0.0, 100.0, 101.0],
        [102.0, 200.0, 201.0, 202.0],
        [1.0, 2.0, 203.0],
    ]
    assert [output["texts"] for output in outputs] == [[b"\0", b"\1\1", b"\2\2\2"], [], []]
