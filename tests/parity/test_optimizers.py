"""No layout changes what an optimizer does, not even one that needs whole matrices: 1e-10 in fp64,
under ZeRO, tensor, context and pipeline ranks, and replicas.
"""

from contextlib import contextmanager, nullcontext

import pytest
from parity_runs import FEW, MODELS, assert_same, run
from slow_cases import mark_slow, slow

from megaframe.config import RunConfig
from megaframe.distributed.mesh import Mesh, read_world_size
from megaframe.layout import Layout
from megaframe.optim.matrix_gather import MatrixPiece
from megaframe.optim.muon import Muon
from megaframe.training.train_step import TrainStep

OPTIMIZERS = {
    "muon": {"name": "muon", "ema": 0.7},
    # Key biases do not change attention: their gradient is 0, and rounding decides its sign.
    "lion": {"name": "lion", "frozen": ("*qkv.bias", "blocks.1.*", "embedding.positions.weight")},
    "sgd": {"name": "sgd", "nesterov": True, "groups": {"matrix": {"lr": 0.5}}},
}
MODEL = {"layers": 3, "heads": 4, "hidden": 16}
LAYOUTS = [
    (2, {}, 2),
    (4, {"tensor": 4}, 4),
    (4, {"tensor": 2}, 2),
    (4, {"data_replicate": 2}, 1),
    (4, {"context": 2}, 1),
    (4, {"pipeline": 2}, 1),
    (4, {"pipeline": 2, "tensor": 2}, 2),
]
QUICK = [
    (0, 4, {"pipeline": 2, "tensor": 2}, 2),
    (1, 4, {"tensor": 2}, 2),
    (2, 4, {"data_replicate": 2}, 1),
    (3, 4, {"context": 2}, 1),
]
"""Each ZeRO stage and each axis."""
IN_TURN = [((3, 0)[place % 2], *layout) for place, layout in enumerate(LAYOUTS)]
CASES = [*QUICK, *(case for case in IN_TURN if case not in QUICK)]


@pytest.fixture
def check(pool, run_alone):
    """check(model, optim, ranks, parallel, microbatch): two steps are those of one process."""

    def compare(name, optim, ranks, parallel, microbatch):
        model, rest = {**MODELS[name], **MODEL}, (False, False, False, optim)
        results = pool.run(ranks, run, model, {**FEW, "microbatch": microbatch}, parallel, *rest)
        assert_same(results, run_alone(model, {**FEW, "microbatch": 4}, {}, *rest))

    return compare


@pytest.mark.parametrize(
    ("zero", "ranks", "parallel", "microbatch"), mark_slow(CASES, except_for=QUICK)
)
def test_muon_is_that_of_one_process(ranks, parallel, microbatch, zero, check):
    """With two key heads for four ranks, neighbours hold the same heads, and send them once."""
    check("llama", OPTIMIZERS["muon"], ranks, {**parallel, "zero": zero}, microbatch)


@pytest.mark.parametrize(
    ("parallel", "optim", "zero"),
    [
        # Every two of layout, optimizer and stage occur together.
        *(({"tensor": 2}, "muon", 0), ({"tensor": 2}, "lion", 3), ({"tensor": 2}, "sgd", 0)),
        slow({"pipeline": 2}, "muon", 3),
        slow({"pipeline": 2}, "lion", 0),
        slow({"pipeline": 2}, "sgd", 3),
    ],
)
def test_a_tied_embedding_is_that_of_one_process(optim, parallel, zero, check):
    check("gpt2", OPTIMIZERS[optim], 4, {**parallel, "zero": zero}, 2)


FEWER_BITS = [
    # int8 has no tensor ranks: if they divide a parameter, its blocks differ from one process.
    (name, state, *layout, 3 * (number // 2 % 2))
    for name in ("adamw", "muon")
    for state in ("bf16", "int8")
    for number, layout in enumerate((*LAYOUTS, (2, {}, 1), (2, {"pipeline": 2}, 4)))
    if state == "bf16" or "tensor" not in layout[1]
    # Every layout with an optimizer and a type in turn.
    if (number + (name == "muon") + 2 * (state == "int8")) % 4 == 0
    or (layout[1] == {"data_replicate": 2} and (name == "muon") == (state == "bf16"))
]


# Each optimizer and each type on replicas.
@pytest.mark.parametrize(
    ("name", "state", "ranks", "parallel", "microbatch", "zero"),
    mark_slow(
        FEWER_BITS,
        except_for=[
            ("adamw", "int8", 4, {"data_replicate": 2}, 1, 3),
            ("muon", "bf16", 4, {"data_replicate": 2}, 1, 3),
        ],
    ),
    ids=str,
)
def test_fewer_bits_of_state_are_those_of_one_process(
    name, state, ranks, parallel, microbatch, zero, check
):
    """Stochastic rounding rounds the same elements up or down."""
    optim = {"name": name, "state": state}
    check("gpt2", optim, ranks, {**parallel, "zero": zero}, microbatch)


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.slow
def test_blocks_that_no_rank_cuts_are_those_of_one_process(zero, pool):
    """256 divides what each of two tensor ranks has of a row."""
    model = {"bias": True, "layers": 1, "heads": 4, "hidden": 512, "ffn": 512}
    arguments = model, FEW, {"tensor": 2, "zero": zero}, False, False, False, {"state": "int8"}
    (expected,) = pool.run(1, run, model, FEW, {}, *arguments[3:])
    assert_same(pool.run(4, run, *arguments), expected)


def test_every_rank_owns_some_of_the_matrices(pool):
    """A block has seven matrices (queries, keys, values, gate and up are separate), which are
    distributed by work."""
    owned = pool.run(4, measure_owned_matrices, {"zero": 1})
    assert sum(len(sizes) for sizes in owned) == 3 * 7
    work = [sum(sizes) for sizes in owned]
    assert max(work) < 1.5 * min(work)


@pytest.mark.parametrize(
    "parallel",
    [
        {"zero": 0},
        {"tensor": 4, "zero": 1},
        {"tensor": 2, "context": 2, "zero": 3},
        {"data_replicate": 2, "zero": 2},
        {"expert": 2, "expert_tensor": 2, "zero": 1},
        {"expert": 2, "tensor": 2, "zero": 3},
    ],
    ids=str,
)
def test_every_rank_knows_the_boxes_of_all_without_asking(parallel, pool):
    ranks = pool.run(4, list_known_boxes, parallel)
    assert len(ranks[0]) >= 3
    for of_bucket in zip(*ranks, strict=True):
        for known, members, _ in of_bucket:
            assert known == [of_bucket[rank][2] for rank in members]


def measure_owned_matrices(parallel):
    """Return the work of each matrix that this rank owns."""
    with list_muon_shards(parallel) as muon_shards:
        rules = [shard.rule for shard in muon_shards]
        return [rule.costs[index] for rule in rules for index in rule._gather._owned]


def list_known_boxes(parallel):
    """Return for each bucket the boxes that each rank of its group gives and takes, as this rank
    derives them; those ranks; and the boxes that this rank really gives and takes."""
    model = {"moe": {"experts": 4, "ffn": 10, "top_k": 2}} if "expert" in parallel else {}
    with list_muon_shards(parallel, **model) as muon_shards:
        known = []
        for shard in muon_shards:
            rule, bucket = shard.rule, shard.bucket
            numbers = {p: n for n, p in enumerate(bucket.parameters)}
            master_pieces = bucket.iterate_pieces(bucket.weights, bucket.master_span)
            own_pieces = bucket.iterate_pieces(bucket.owned_grad_sums, bucket.owned_span)
            rank_boxes = [
                [MatrixPiece(numbers[p], box) for p, box, _ in pieces]
                for pieces in (own_pieces, master_pieces)
            ]
            all_boxes = [
                list(each) for each in zip(rule._pieces.sent, rule._pieces.received, strict=True)
            ]
            known.append((all_boxes, rule._group.ranks, rank_boxes))
        return known


@contextmanager
def list_muon_shards(parallel, **model):
    """Yield this rank's buckets that Muon updates."""
    config = RunConfig(
        model={**MODELS["llama"], **MODEL, "vocab": 37, **model},
        optim={"name": "muon"},
        parallel=parallel,
        train={"precision": "fp64"},
    )
    mesh = Mesh(Layout.from_parallel(config.parallel, read_world_size()), device="cpu")
    optimizer = TrainStep(config, mesh, lambda part: nullcontext()).optimizer
    yield [shard for shard in optimizer.shards if isinstance(shard.rule, Muon)]
    mesh.finish()
