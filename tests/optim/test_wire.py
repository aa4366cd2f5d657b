"""Sums over ranks by every wire: bitwise where a reference can say the bits, exact where nothing is
left out, and nothing lost over the steps where something is.
"""

import math

import pytest
import torch

from megaframe.comm import barrier
from megaframe.layout import Layout
from megaframe.mesh import Mesh, world_size
from megaframe.optim.buffers import Buffers
from megaframe.optim.codec import Half, Int8
from megaframe.optim.wiring import Wiring

STEPS = 6
SHAPES = ((40, 3, 10), (20,), (24, 36), (2, 2), (50, 20))


def gradients(length, rank, step, dtype=torch.float64):
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(length, generator=generator, dtype=dtype)


def low_rank(length, rank, step):
    """Matrices whose sums over ranks have rank 2."""
    common = [torch.Generator().manual_seed(7 + step) for _ in (0, 1)]
    found = gradients(length, rank, step)
    for box in views(found):
        if box.numel() > 20:
            flat = box.view(-1, box.shape[-1])
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
    """A wire over all ranks of this world."""

    def __init__(self, length=LENGTH, dtype=torch.float64, compress="none", **keys):
        layout = Layout(data=world_size())
        self.mesh = Mesh(layout, device="cpu", timeout=60)
        self.group, self.length = self.mesh.group("data"), length
        wiring = Wiring(compress=compress, **keys)
        slow = None if compress == "none" else views
        self.wire = wiring.wire(self.group, length, dtype, Buffers(self.mesh.device), slow)
        self.group.traffic.take()

    def close(self):
        barrier(self.mesh.world)
        self.mesh.close()

    def add(self, flat, how="sum"):
        """The sum, or this rank's part of it."""
        flat = flat.clone()
        for pending in getattr(self.wire, how)(flat):
            pending.wait()
        part = self.length // self.group.size
        return flat if how == "sum" else flat[self.group.index * part :][:part]


def coded(dtype, codec, keys, length):
    """A sum and a part of one as they come, and as the definition says -> whether bits are same."""
    harness = Harness(length, dtype, **keys)
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
    same = [torch.equal(harness.add(every[harness.group.index]), whole)]
    bytes_of_sum = harness.group.traffic.take()[0]
    if length % len(ranks) == 0:
        fresh = Harness.__new__(Harness)
        fresh.__dict__.update(harness.__dict__)
        fresh.wire = type(harness.wire)(harness.group, codec)
        found = fresh.add(every[harness.group.index], "sum_part")
        same.append(torch.equal(found, parts[harness.group.index]))
        assert 2 * harness.group.traffic.take()[0] == bytes_of_sum
    harness.close()
    return same, bytes_of_sum


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("ranks", "length"), [(2, 4096), (3, 4096), (4, 4096), (3, 3000)])
@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_coded_sums_are_the_quantised_ones_bit_by_bit(kind, ranks, length, dtype, pool):
    codec, keys = Int8(), {"compress": kind}
    if kind == "bf16":
        codec, keys = Half(), {"precision": "bf16"}
    size = math.ceil(length / ranks)
    message = 2 * size if kind == "bf16" else size + 4 * math.ceil(size / 1024)
    for same, moved in pool.run(ranks, coded, dtype, codec, keys, length):
        assert all(same)
        assert moved == 2 * (ranks - 1) * message


def one_sum(make, keys):
    """A sum of the wire and the true one, of one step."""
    harness = Harness(**keys)
    found = [harness.add(make(LENGTH, harness.mesh.rank, step)) for step in range(3)]
    moved = harness.group.traffic.take()[0]
    wanted = [sum(make(LENGTH, rank, step) for rank in range(world_size())) for step in range(3)]
    harness.close()
    return found, wanted, moved


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(
    ("make", "keys", "tolerance"),
    [
        (gradients, {"compress": "topk", "share": 1.0}, 1e-10),
        (gradients, {"compress": "powersgd", "rank": 64}, 1e-9),
        (low_rank, {"compress": "powersgd", "rank": 4}, 1e-9),
    ],
)
def test_what_leaves_nothing_out_is_exact(make, keys, tolerance, ranks, pool):
    for found, wanted, _ in pool.run(ranks, one_sum, make, keys):
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def test_thin_factors_are_what_powersgd_sends(pool):
    """And whole what they would not make smaller."""
    rank, itemsize, ranks = 4, 8, 4
    left = rank * (40 + 24 + 50) + 20 + 2 * 2
    right = rank * (30 + 36 + 20)
    wanted = 3 * sum(2 * itemsize * n * (ranks - 1) // ranks for n in (left, right))
    keys = {"compress": "powersgd", "rank": rank}
    assert {moved for *_, moved in pool.run(ranks, one_sum, gradients, keys)} == {wanted}


def many_steps(how, keys, bad):
    """Sum over the steps of what came, and what this rank has left unsent."""
    harness = Harness(**keys)
    every = []
    for step in range(STEPS):
        mine = gradients(LENGTH, harness.mesh.rank, step)
        if step == bad and harness.mesh.rank == 1:
            mine[:1200:5] = torch.nan
        every.append(harness.add(mine, how))
    harness.close()
    return every, harness.wire.state["residual"][:LENGTH]


KINDS = [
    {"compress": "int8"},
    {"compress": "topk", "share": 0.05},
    {"compress": "powersgd", "rank": 1},
]


@pytest.mark.parametrize("how", ["sum", "sum_part"])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("keys", KINDS)
def test_error_feedback_loses_nothing(keys, ranks, how, pool):
    """What was applied and what is still unsent are together the sum of all gradients."""
    found = pool.run(ranks, many_steps, how, keys, None)
    true = [gradients(LENGTH, rank, step) for rank in range(ranks) for step in range(STEPS)]
    if how == "sum":
        for every, _ in found[1:]:
            assert all(map(torch.equal, every, found[0][0]))
        applied = sum(found[0][0])
    else:
        applied = torch.cat([sum(every) for every, _ in found])
    unsent = sum(residual for _, residual in found)
    assert unsent.norm() > 1e-3 * applied.norm()
    torch.testing.assert_close(applied + unsent, sum(true), rtol=1e-12, atol=1e-11)


@pytest.mark.parametrize("keys", KINDS)
def test_a_bad_step_is_seen_and_leaves_nothing_behind(keys, pool):
    for every, residual in pool.run(2, many_steps, "sum", keys, 2):
        finite = [bool(torch.isfinite(one).all()) for one in every]
        assert finite == [step != 2 for step in range(STEPS)]
        assert torch.isfinite(residual).all()
        assert every[-1].norm() > 0
