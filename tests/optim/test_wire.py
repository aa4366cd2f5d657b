"""Sums over ranks by every wire: bitwise equal to a reference that defines the bits, exact where
nothing is left out, and otherwise complete over several steps.
"""

import math

import pytest
import torch
from tolerances import assert_near

from megaframe.comm import barrier
from megaframe.layout import Layout
from megaframe.mesh import Mesh, world_size
from megaframe.optim.buffers import Buffers
from megaframe.optim.codec import Half, Int8
from megaframe.optim.powersgd import as_matrix
from megaframe.optim.wiring import Wiring

STEPS = 6
SHAPES = ((40, 3, 10), (20,), (24, 36), (2, 2), (50, 20))


FACTORS = 1000
"""Roundings of a number that PowerSGD sends: a product with up to 50 columns, its orthogonal basis,
and a product with that."""


def gradients(length, rank, step, dtype=torch.float64):
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(length, generator=generator, dtype=dtype)


def low_rank(length, rank, step):
    """Return gradients whose larger matrices have rank 2 when summed over ranks."""
    common = [torch.Generator().manual_seed(7 + step) for _ in (0, 1)]
    found = gradients(length, rank, step)
    for box in views(found):
        if box.numel() > 20:
            flat = as_matrix(box)
            left = torch.randn(flat.shape[0], 2, generator=common[0], dtype=box.dtype)
            right = torch.randn(2, flat.shape[1], generator=common[1], dtype=box.dtype)
            flat.copy_((1 + rank) * left @ right)
    return found


def views(flat):
    found, start = [], 0
    for shape in SHAPES:
        size = math.prod(shape)
        found.append(flat[start : start + size].view(shape))
        start += size
    return found


LENGTH = sum(map(math.prod, SHAPES))


class Harness:
    """A wire over all ranks of the world."""

    def __init__(self, mesh, length=LENGTH, dtype=torch.float64, compress="none", **keys):
        self.group, self.length = mesh.group("data"), length
        wiring = Wiring(compress=compress, **keys)
        slow = None if compress == "none" else views
        self.wire = wiring.wire(self.group, length, dtype, Buffers(mesh.device), slow)
        self.group.traffic.take()

    def add(self, flat, how="sum"):
        """Return the sum over ranks; with `sum_part` this rank's part of it."""
        flat = flat.clone()
        for pending in getattr(self.wire, how)(flat):
            pending.wait()
        part = self.length // self.group.size
        return flat if how == "sum" else flat[self.group.index * part :][:part]


def coded(mesh, kind, dtype, length):
    """Compare a sum and a part of one with their definition -> (equal, equal, bytes of the sum)."""
    codec, keys = CODED[kind]
    harness, here = Harness(mesh, length, dtype, **keys), mesh.rank
    ranks, size = range(world_size()), math.ceil(length / world_size())
    every = [gradients(length, rank, 0, dtype) for rank in ranks]
    wide = [torch.nn.functional.pad(one, (0, size * len(ranks) - length)) for one in every]

    def again(x):
        return codec.decode(codec.encode(x), len(x), dtype)

    parts = []
    for owner in ranks:
        rows = [one[owner * size :][:size] for one in wide]
        total = rows[owner].clone()
        for rank in ranks:
            if rank != owner:
                total += again(rows[rank])
        parts.append(total)
    whole = torch.cat([again(total) for total in parts])[:length]
    same = torch.equal(harness.add(every[here]), whole)
    moved = harness.group.traffic.take()[0]
    if length % len(ranks):
        return same, True, moved
    part = Harness(mesh, length, dtype, **keys).add(every[here], "sum_part")
    assert 2 * harness.group.traffic.take()[0] == moved
    return same, torch.equal(part, parts[here]), moved


CODED = {"bf16": (Half(), {"precision": "bf16"}), "int8": (Int8(), {"compress": "int8"})}


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_coded_sums_are_the_quantised_ones_bit_by_bit(ranks, pool):
    cases = [
        (kind, dtype, length)
        for kind in CODED
        for dtype in (torch.float32, torch.float64)
        for length in (4096, 3001)
    ]
    for found in pool.run(ranks, each, coded, cases):
        for (kind, _, length), (same, part_same, moved) in zip(cases, found, strict=True):
            assert same and part_same
            size = math.ceil(length / ranks)
            message = 2 * size if kind == "bf16" else size + 4 * math.ceil(size / 1024)
            assert moved == 2 * (ranks - 1) * message


def each(function, cases):
    """Return function(mesh, *case) for all cases, in one world."""
    mesh = Mesh(Layout(data=world_size()), device="cpu", timeout=60)
    found = [function(mesh, *case) for case in cases]
    barrier(mesh.world)
    mesh.close()
    return found


def sums(mesh, make, keys):
    """Return three sums of the wire, the true sums, and the bytes sent."""
    harness, ranks = Harness(mesh, **keys), range(world_size())
    found = [harness.add(make(LENGTH, mesh.rank, step)) for step in range(3)]
    wanted = [sum(make(LENGTH, rank, step) for rank in ranks) for step in range(3)]
    return found, wanted, harness.group.traffic.take()[0]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_what_leaves_nothing_out_is_exact(ranks, pool):
    cases = [
        (gradients, {"compress": "topk", "share": 1.0}),
        (gradients, {"compress": "powersgd", "rank": 64}),
        (low_rank, {"compress": "powersgd", "rank": 4}),
    ]
    for rank in pool.run(ranks, each, sums, cases):
        for (found, wanted, _), terms in zip(rank, (ranks, FACTORS, FACTORS), strict=True):
            for one, other in zip(found, wanted, strict=True):
                assert_near(one, other, terms)


def test_thin_factors_are_what_powersgd_sends(pool):
    """A matrix is sent whole if its factors would not be smaller."""
    rank, itemsize, ranks = 4, 8, 4
    left = rank * (40 + 24 + 50) + 20 + 2 * 2
    right = rank * (30 + 36 + 20)
    wanted = 3 * sum(2 * itemsize * n * (ranks - 1) // ranks for n in (left, right))
    keys = {"compress": "powersgd", "rank": rank}
    found = pool.run(ranks, each, sums, [(gradients, keys)])
    assert {moved for ((*_, moved),) in found} == {wanted}


def many_steps(mesh, how, keys, bad):
    """Return the result of each step, and what this rank has not sent."""
    harness, every = Harness(mesh, **keys), []
    for step in range(STEPS):
        mine = gradients(LENGTH, mesh.rank, step)
        if step == bad and mesh.rank == 1:
            mine[:1200:5] = torch.nan
        every.append(harness.add(mine, how))
    return every, harness.wire.state["residual"][:LENGTH]


KINDS = [
    {"compress": "int8"},
    {"compress": "topk", "share": 0.05},
    {"compress": "powersgd", "rank": 1},
]


@pytest.mark.parametrize("how", ["sum", "sum_part"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_error_feedback_loses_nothing(ranks, how, pool):
    """What was applied plus what is still unsent is the sum of all gradients."""
    cases = [(how, keys, None) for keys in KINDS]
    true = [gradients(LENGTH, rank, step) for rank in range(ranks) for step in range(STEPS)]
    for found in zip(*pool.run(ranks, each, many_steps, cases), strict=True):
        first, *others = (every for every, _ in found)
        applied = sum(first)
        if how == "sum":
            assert all(all(map(torch.equal, every, first)) for every in others)
        else:
            applied = torch.cat([sum(every) for every, _ in found])
        unsent = sum(residual for _, residual in found)
        assert unsent.norm() > 1e-3 * applied.norm()
        assert_near(applied + unsent, sum(true), FACTORS, size=sum(one.abs() for one in true).max())


def test_a_bad_step_is_seen_and_leaves_nothing_behind(pool):
    for found in pool.run(2, each, many_steps, [("sum", keys, 2) for keys in KINDS]):
        for every, residual in found:
            finite = [bool(torch.isfinite(one).all()) for one in every]
            assert finite == [step != 2 for step in range(STEPS)]
            assert torch.isfinite(residual).all()
            assert every[-1].norm() > 0
