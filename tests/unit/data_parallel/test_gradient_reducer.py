"""Sums over ranks by every reducer: bitwise equal to a reference that defines the bits, exact where
nothing is left out, and otherwise complete over several steps.
"""

import math
from dataclasses import replace

import pytest
import torch
from bitwise import assert_bitwise_equal
from patience import PATIENCE
from slow_cases import slow
from tolerances import assert_near, assert_within, compute_roundoff, estimate_growth

from megaframe.data_parallel.buffers import BufferPool
from megaframe.data_parallel.compression import Bf16Codec, Int8Codec
from megaframe.data_parallel.powersgd import as_matrix
from megaframe.data_parallel.reducer_config import ReducerConfig
from megaframe.distributed.mesh import Mesh, read_world_size
from megaframe.layout import Layout, exchange_groups, exchange_steps
from megaframe.training.rank_pool import RankPool

STEPS = 6
SHAPES = ((40, 3, 10), (20,), (24, 36), (2, 2), (50, 20))


FACTORS = 1000
"""Roundings of a number that PowerSGD sends: a product with up to 50 columns, its orthogonal basis,
and a product with that."""


def make_gradients(length, rank, step, dtype=torch.float64):
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(length, generator=generator, dtype=dtype)


def make_low_rank_gradients(length, rank, step):
    """Return gradients whose larger matrices have rank 2 when summed over ranks."""
    common = [torch.Generator().manual_seed(7 + step) for _ in (0, 1)]
    gradients = make_gradients(length, rank, step)
    for box in make_views(gradients):
        if box.numel() > 20:
            flat = as_matrix(box)
            left = torch.randn(flat.shape[0], 2, generator=common[0], dtype=box.dtype)
            right = torch.randn(2, flat.shape[1], generator=common[1], dtype=box.dtype)
            flat.copy_((1 + rank) * left @ right)
    return gradients


def make_views(flat):
    boxes, start = [], 0
    for shape in SHAPES:
        size = math.prod(shape)
        boxes.append(flat[start : start + size].view(shape))
        start += size
    return boxes


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
        slow = None if compress == "none" else make_views
        self.reducer = config.build(self.group, length, dtype, BufferPool(mesh.device), slow)
        self.group.traffic.take()

    def add(self, flat, method="sum"):
        """Return the sum over ranks; with `sum_part` this rank's part of it."""
        flat = flat.clone()
        for pending in getattr(self.reducer, method)(flat):
            pending.wait()
        part = self.length // self.group.size
        return flat if method == "sum" else flat[self.group.index * part :][:part]


def compare_coded_sum(mesh, kind, dtype, length):
    """Compare a sum and a part of one with their definition -> (equal, equal, bytes of the sum)."""
    codec, keys = CODED[kind]
    harness, here = Harness(mesh, length, dtype, **keys), mesh.rank
    ranks, size = range(read_world_size()), math.ceil(length / read_world_size())
    all_gradients = [make_gradients(length, rank, 0, dtype) for rank in ranks]
    wide = [
        torch.nn.functional.pad(gradient, (0, size * len(ranks) - length))
        for gradient in all_gradients
    ]

    def encode_and_decode(x):
        return codec.decode(codec.encode(x), len(x), dtype)

    parts = []
    for owner in ranks:
        rows = [gradient[owner * size :][:size] for gradient in wide]
        # In the order of ranks; the owner does not encode its own.
        kept = [row if rank == owner else encode_and_decode(row) for rank, row in enumerate(rows)]
        parts.append(sum(kept[1:], start=kept[0]))
    expected = torch.cat([encode_and_decode(total) for total in parts])[:length]
    same = torch.equal(harness.add(all_gradients[here]), expected)
    bytes_sent = harness.group.traffic.take()[0]
    if length % len(ranks):
        return same, True, bytes_sent
    part = Harness(mesh, length, dtype, **keys).add(all_gradients[here], "sum_part")
    assert 2 * harness.group.traffic.take()[0] == bytes_sent
    return same, torch.equal(part, parts[here]), bytes_sent


def sum_in_steps(all_gradients, sizes, round_trip):
    """Return each rank's part of a sum that is exchanged in steps: the definition of the bits.
    every: the parts [ranks, part] of each rank."""
    rows_of_ranks, stride = [dict(enumerate(rows)) for rows in all_gradients], 1
    for size in sizes:
        summed = []
        for rank, own_rows in enumerate(rows_of_ranks):
            place = rank // stride % size
            first = rank - place * stride
            members = [first + other * stride for other in range(size)]
            numbers = [number for number in own_rows if number // stride % size == place]
            parts = {}
            for number in numbers:
                # In the order of ranks; the owner does not encode its own.
                kept = [
                    own_rows[number] if other == rank else round_trip(rows_of_ranks[other][number])
                    for other in members
                ]
                parts[number] = sum(kept[1:], start=kept[0])
            summed.append(parts)
        rows_of_ranks, stride = summed, stride * size
    return [parts[rank] for rank, parts in enumerate(rows_of_ranks)]


def compare_stepped_sum(mesh, sizes, dtype, length):
    """Compare a sum in steps with its definition, and with the sum in fp64 -> (equal, equal, bytes,
    calls of a part)."""
    codec, ranks, here = Bf16Codec(), read_world_size(), mesh.rank
    size = math.ceil(length / ranks)
    all_gradients = [make_gradients(length, rank, 0, dtype) for rank in range(ranks)]
    wide = [
        torch.nn.functional.pad(gradient, (0, size * ranks - length)) for gradient in all_gradients
    ]

    def encode_and_decode(x):
        return codec.decode(codec.encode(x), len(x), dtype)

    parts = sum_in_steps(
        [gradient.view(ranks, size) for gradient in wide], sizes, encode_and_decode
    )
    expected = torch.cat([encode_and_decode(total) for total in parts])[:length]
    harness = Harness(mesh, length, dtype, precision="bf16", steps=sizes)
    actual = harness.add(all_gradients[here])
    bytes_sent = sum(group.traffic.take()[0] for group in harness.group.steps)
    bytes_sent += harness.group.traffic.take()[0]
    exact, terms = (
        sum(one.double() for one in all_gradients),
        sum(one.double().abs() for one in all_gradients),
    )
    # At most one rounding per step, and one of the sum on its way back.
    unit = compute_roundoff(torch.bfloat16)
    allowed = ((1 + unit) ** (len(sizes) + 1) - 1 + estimate_growth(ranks, dtype)) * terms
    assert_within(actual, exact, allowed, f"{len(sizes) + 1} roundings to bf16")
    if length % ranks:
        return torch.equal(actual, expected), True, bytes_sent, None
    harness.group.traffic.take()
    own_part = harness.add(all_gradients[here], "sum_part")
    calls = [group.traffic.take()[1] for group in harness.group.steps]
    allowed = ((1 + unit) ** len(sizes) - 1 + estimate_growth(ranks, dtype)) * terms
    rows = slice(here * size, (here + 1) * size)
    assert_within(own_part, exact[rows], allowed[rows], f"{len(sizes)} roundings to bf16")
    return torch.equal(actual, expected), torch.equal(own_part, parts[here]), bytes_sent, calls


@pytest.mark.parametrize(("ranks", "sizes"), [(4, (2, 2)), slow(8, (2, 4)), slow(8, (2, 2, 2))])
def test_sums_in_steps_are_rounded_once_a_step_bit_by_bit(ranks, sizes, pool):
    """In as many bytes as between all pairs of ranks."""
    cases = [
        (sizes, dtype, length)
        for dtype in (torch.float32, torch.float64)
        for length in (4096, 3001)
    ]
    workers = pool if ranks == 4 else RankPool(ranks)
    for results in workers.run(ranks, run_each, compare_stepped_sum, cases):
        for (_, _, length), (same, part_same, bytes_sent, calls) in zip(
            cases, results, strict=True
        ):
            assert same and part_same
            assert bytes_sent == 2 * (ranks - 1) * 2 * math.ceil(length / ranks)
            assert calls is None or calls == [1] * len(sizes)
    if workers is not pool:
        workers.close()


def list_steps(mesh, node_size):
    mesh.divide_exchanges([("data",)], node_size)
    group = mesh.group("data")
    step_ranks = [step.ranks for step in group.steps]
    once = Harness(mesh, 4096, torch.float32, precision="bf16")
    in_steps_again = Harness(mesh, 4096, torch.float32, precision="bf16")
    in_one = once.add(make_gradients(4096, mesh.rank, 0, torch.float32))
    other = in_steps_again.add(make_gradients(4096, mesh.rank, 0, torch.float32))
    return step_ranks, torch.equal(in_one, other)


def test_a_group_is_divided_at_its_nodes(pool):
    cases = [(4,), (2,)]  # nodes of all ranks, and of half of them
    for rank, (unstepped, two) in enumerate(pool.run(4, run_each, list_steps, cases)):
        near_rank, far = rank // 2 * 2, rank % 2
        assert two == ([(near_rank, near_rank + 1), (far, far + 2)], True)
        assert unstepped == ([], True)
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
    for results in pool.run(ranks, run_each, compare_coded_sum, cases):
        for (kind, _, length), (same, part_same, bytes_sent) in zip(cases, results, strict=True):
            assert same and part_same
            size = math.ceil(length / ranks)
            message = 2 * size if kind == "bf16" else size + 4 * math.ceil(size / 1024)
            assert bytes_sent == 2 * (ranks - 1) * message


def run_each(function, cases):
    """Return function(mesh, *case) for all cases, in one world."""
    mesh = Mesh(Layout(data=read_world_size()), device="cpu", timeout=PATIENCE)
    results = [function(mesh, *case) for case in cases]
    mesh.finish()
    return results


def compute_sums(mesh, make, keys):
    """Return three sums of the reducer, the true sums, and the bytes sent."""
    harness, ranks = Harness(mesh, **keys), range(read_world_size())
    actual = [harness.add(make(LENGTH, mesh.rank, step)) for step in range(3)]
    expected = [sum(make(LENGTH, rank, step) for rank in ranks) for step in range(3)]
    return actual, expected, harness.group.traffic.take()[0]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_what_leaves_nothing_out_is_exact(ranks, pool):
    cases = [
        (make_gradients, {"compress": "topk", "share": 1.0}),
        (make_gradients, {"compress": "powersgd", "rank": 64}),
        (make_low_rank_gradients, {"compress": "powersgd", "rank": 4}),
    ]
    for rank in pool.run(ranks, run_each, compute_sums, cases):
        for (actual, expected, _), terms in zip(rank, (ranks, FACTORS, FACTORS), strict=True):
            for first, other in zip(actual, expected, strict=True):
                assert_near(first, other, terms)


def test_thin_factors_are_what_powersgd_sends(pool):
    """A matrix is sent whole if its factors would not be smaller."""
    rank, itemsize, ranks = 4, 8, 4
    left = rank * (40 + 24 + 50) + 20 + 2 * 2
    right = rank * (30 + 36 + 20)
    expected_bytes = 3 * sum(2 * itemsize * n * (ranks - 1) // ranks for n in (left, right))
    keys = {"compress": "powersgd", "rank": rank}
    results = pool.run(ranks, run_each, compute_sums, [(make_gradients, keys)])
    assert {bytes_sent for ((*_, bytes_sent),) in results} == {expected_bytes}


def run_steps(mesh, method, keys, bad):
    """Return the result of each step, and what this rank has not sent."""
    harness, sums_of_steps = Harness(mesh, **keys), []
    for step in range(STEPS):
        gradient = make_gradients(LENGTH, mesh.rank, step)
        if step == bad and mesh.rank == 1:
            gradient[:1200:5] = torch.nan
        sums_of_steps.append(harness.add(gradient, method))
    return sums_of_steps, harness.reducer.state["residual"][:LENGTH]


KINDS = [
    {"compress": "int8"},
    {"compress": "topk", "share": 0.05},
    {"compress": "powersgd", "rank": 1},
]


@pytest.mark.parametrize("method", ["sum", "sum_part"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_error_feedback_loses_nothing(ranks, method, pool):
    """What was applied plus what is still unsent is the sum of all gradients."""
    cases = [(method, keys, None) for keys in KINDS]
    gradients_of_ranks = [
        make_gradients(LENGTH, rank, step) for rank in range(ranks) for step in range(STEPS)
    ]
    for results in zip(*pool.run(ranks, run_each, run_steps, cases), strict=True):
        first, *others = (sums_of_steps for sums_of_steps, _ in results)
        applied = sum(first)
        if method == "sum":
            for sums_of_steps in others:
                assert_bitwise_equal(sums_of_steps, first, because="all ranks get one sum")
        else:
            applied = torch.cat([sum(sums_of_steps) for sums_of_steps, _ in results])
        unsent = sum(residual for _, residual in results)
        assert unsent.norm() > 1e-3 * applied.norm()
        assert_near(
            applied + unsent,
            sum(gradients_of_ranks),
            FACTORS,
            size=sum(gradient.abs() for gradient in gradients_of_ranks).max(),
        )


def test_a_bad_step_is_seen_and_leaves_nothing_behind(pool):
    for results in pool.run(2, run_each, run_steps, [("sum", keys, 2) for keys in KINDS]):
        for sums_of_steps, residual in results:
            finite = [bool(torch.isfinite(total).all()) for total in sums_of_steps]
            assert finite == [step != 2 for step in range(STEPS)]
            assert torch.isfinite(residual).all()
            assert sums_of_steps[-1].norm() > 0
