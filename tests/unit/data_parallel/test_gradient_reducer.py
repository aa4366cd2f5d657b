"""Sums over ranks by every reducer: bitwise equal to a reference that defines the bits, exact where
nothing is left out, and otherwise complete over several steps.
"""

import math
from dataclasses import replace

import pytest
import torch
from rank_pool import Pool
from tolerances import assert_near, assert_within, growth, unit_roundoff

from megaframe.data_parallel.buffers import BufferPool
from megaframe.data_parallel.compression import Bf16Codec, Int8Codec
from megaframe.data_parallel.powersgd import as_matrix
from megaframe.data_parallel.reducer_config import ReducerConfig
from megaframe.distributed.collectives import barrier
from megaframe.distributed.mesh import Mesh, read_world_size
from megaframe.layout import Layout, exchange_groups, exchange_steps

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
    """A reducer over all ranks of the world."""

    def __init__(self, mesh, length=LENGTH, dtype=torch.float64, compress="none", steps=(), **keys):
        self.group, self.length = mesh.group("data"), length
        if steps:
            groups = exchange_groups(self.group.ranks, steps)
            made = [mesh._make_group(("data",), members) for members in groups]
            self.group = replace(self.group, steps=tuple(made))
        config = ReducerConfig(compress=compress, **keys)
        slow = None if compress == "none" else views
        self.reducer = config.build(self.group, length, dtype, BufferPool(mesh.device), slow)
        self.group.traffic.take()

    def add(self, flat, how="sum"):
        """Return the sum over ranks; with `sum_part` this rank's part of it."""
        flat = flat.clone()
        for pending in getattr(self.reducer, how)(flat):
            pending.wait()
        part = self.length // self.group.size
        return flat if how == "sum" else flat[self.group.index * part :][:part]


def coded(mesh, kind, dtype, length):
    """Compare a sum and a part of one with their definition -> (equal, equal, bytes of the sum)."""
    codec, keys = CODED[kind]
    harness, here = Harness(mesh, length, dtype, **keys), mesh.rank
    ranks, size = range(read_world_size()), math.ceil(length / read_world_size())
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


def in_steps(every, sizes, again):
    """Return each rank's part of a sum that is exchanged in steps: the definition of the bits.
    every: the parts [ranks, part] of each rank."""
    held, stride = [dict(enumerate(rows)) for rows in every], 1
    for size in sizes:
        summed = []
        for rank, mine in enumerate(held):
            place = rank // stride % size
            first = rank - place * stride
            members = [first + other * stride for other in range(size)]
            wanted = [number for number in mine if number // stride % size == place]
            parts = {}
            for number in wanted:
                parts[number] = mine[number].clone()
                for other in members:
                    if other != rank:
                        parts[number] += again(held[other][number])
            summed.append(parts)
        held, stride = summed, stride * size
    return [parts[rank] for rank, parts in enumerate(held)]


def stepped(mesh, sizes, dtype, length):
    """Compare a sum in steps with its definition, and with the sum in fp64 -> (equal, equal, bytes,
    calls of a part)."""
    codec, ranks, here = Bf16Codec(), read_world_size(), mesh.rank
    size = math.ceil(length / ranks)
    every = [gradients(length, rank, 0, dtype) for rank in range(ranks)]
    wide = [torch.nn.functional.pad(one, (0, size * ranks - length)) for one in every]

    def again(x):
        return codec.decode(codec.encode(x), len(x), dtype)

    parts = in_steps([one.view(ranks, size) for one in wide], sizes, again)
    whole = torch.cat([again(total) for total in parts])[:length]
    harness = Harness(mesh, length, dtype, precision="bf16", steps=sizes)
    found = harness.add(every[here])
    moved = sum(group.traffic.take()[0] for group in harness.group.steps)
    moved += harness.group.traffic.take()[0]
    exact, terms = sum(one.double() for one in every), sum(one.double().abs() for one in every)
    # At most one rounding per step, and one of the sum on its way back.
    unit = unit_roundoff(torch.bfloat16)
    allowed = ((1 + unit) ** (len(sizes) + 1) - 1 + growth(ranks, dtype)) * terms
    assert_within(found, exact, allowed, f"{len(sizes) + 1} roundings to bf16")
    if length % ranks:
        return torch.equal(found, whole), True, moved, None
    harness.group.traffic.take()
    own = harness.add(every[here], "sum_part")
    calls = [group.traffic.take()[1] for group in harness.group.steps]
    allowed = ((1 + unit) ** len(sizes) - 1 + growth(ranks, dtype)) * terms
    rows = slice(here * size, (here + 1) * size)
    assert_within(own, exact[rows], allowed[rows], f"{len(sizes)} roundings to bf16")
    return torch.equal(found, whole), torch.equal(own, parts[here]), moved, calls


@pytest.mark.quick(when=lambda ranks: ranks == 4)
@pytest.mark.parametrize(("ranks", "sizes"), [(4, (2, 2)), (8, (2, 4)), (8, (2, 2, 2))])
def test_sums_in_steps_are_rounded_once_a_step_bit_by_bit(ranks, sizes, pool):
    """In as many bytes as between all pairs of ranks."""
    cases = [
        (sizes, dtype, length)
        for dtype in (torch.float32, torch.float64)
        for length in (4096, 3001)
    ]
    workers = pool if ranks == 4 else Pool(ranks)
    for found in workers.run(ranks, each, stepped, cases):
        for (_, _, length), (same, part_same, moved, calls) in zip(cases, found, strict=True):
            assert same and part_same
            assert moved == 2 * (ranks - 1) * 2 * math.ceil(length / ranks)
            assert calls is None or calls == [1] * len(sizes)
    if workers is not pool:
        workers.close()


def steps_of(mesh, node_size):
    mesh.divide_exchanges([("data",)], node_size)
    group = mesh.group("data")
    found = [step.ranks for step in group.steps]
    once = Harness(mesh, 4096, torch.float32, precision="bf16")
    again = Harness(mesh, 4096, torch.float32, precision="bf16")
    one = once.add(gradients(4096, mesh.rank, 0, torch.float32))
    other = again.add(gradients(4096, mesh.rank, 0, torch.float32))
    return found, torch.equal(one, other)


def test_a_group_is_divided_at_its_nodes(pool):
    cases = [(4,), (2,)]  # nodes of all ranks, and of half of them
    for rank, (one, two) in enumerate(pool.run(4, each, steps_of, cases)):
        near, far = rank // 2 * 2, rank % 2
        assert two == ([(near, near + 1), (far, far + 2)], True)
        assert one == ([], True)
    assert exchange_steps(4, 4) == (1, 4, 1)


CODED = {"bf16": (Bf16Codec(), {"precision": "bf16"}), "int8": (Int8Codec(), {"compress": "int8"})}


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
    mesh = Mesh(Layout(data=read_world_size()), device="cpu", timeout=60)
    found = [function(mesh, *case) for case in cases]
    barrier(mesh.world)
    mesh.close()
    return found


def sums(mesh, make, keys):
    """Return three sums of the reducer, the true sums, and the bytes sent."""
    harness, ranks = Harness(mesh, **keys), range(read_world_size())
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
    return every, harness.reducer.state["residual"][:LENGTH]


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
