"""Islands that train by themselves between synchronisations, against a reference in plain torch
that trains them one after the other; and every layout within an island, which must not change
anything (`megaframe/optim/islands.py`, `megaframe/optim/outer_step.py`).
"""

from dataclasses import replace

import pytest
import torch
from bitwise import assert_bitwise_equal
from parity_runs import MODELS, share
from patience import PATIENCE
from reference_model import loss as reference_loss
from repo_copy import ROOT
from slow_cases import slow
from tolerances import PROMISE

from megaframe.architecture.stages import plan_stages
from megaframe.architecture.traffic import count_message_bytes
from megaframe.config import RunConfig
from megaframe.config.sync import SyncConfig
from megaframe.data.microbatch import Microbatch
from megaframe.data_parallel.buffers import BufferPool
from megaframe.distributed.collectives import all_reduce
from megaframe.distributed.mesh import Mesh, read_world_size
from megaframe.layout import Layout
from megaframe.metrics import StepTimer
from megaframe.optim.islands import count_steps_since_push, find_fragment
from megaframe.optim.outer_step import GroupOuterStep, SpanShape
from megaframe.planner.communication_volume import compute_communication_bytes
from megaframe.training.layer_check.parity import make_global_batch
from megaframe.training.train_step import TrainStep

STEPS = 8
DILOCO = {"every": 3}
STREAMING = {"every": 4, "fragments": 2, "delay": 2}
AVERAGE = {"every": 1, "optimizer": "sgd"}
SGD = {"name": "sgd", "clip": 0.0, "momentum": 0.9}
MODEL = {**MODELS["gpt2"], "dropout": 0.0}


def make_config(parallel, sync, optim=None, train=None, model=None):
    return RunConfig(
        model={
            "layers": 2,
            "hidden": 16,
            "heads": 4,
            "vocab": 37,
            "init_std": 0.2,
            **(model or MODEL),
        },
        train={"seq": 10, "precision": "fp64", "steps": STEPS, "global_batch": 8, **(train or {})},
        optim={"lr": 0.01, "clip": 0.5, "schedule": "constant", "eps": 1e-3, **(optim or {})},
        parallel=parallel,
        sync=sync,
    )


def make_batches(config, step, islands, full=False):
    """Return the share of each island of the batch of a step. Some samples have few labels, so
    islands divide by different sums; not if all are `full`."""
    batch = make_global_batch(config.model, config.train, step)
    if full:
        batch = replace(batch, labels_BS=batch.tokens_BS.flip(1))
    rows = (slice(island, None, islands) for island in range(islands))
    return [
        Microbatch(batch.tokens_BS[own], batch.labels_BS[own], batch.samples_B[own]) for own in rows
    ]


def train_islands(parallel, sync, optim=None, train=None, model=None, full=False):
    """Train on this rank; return losses and norms of its island by step, and its weights."""
    config = make_config(parallel, sync, optim, train, model)
    mesh = Mesh(
        Layout.from_parallel(config.parallel, read_world_size()), device="cpu", timeout=PATIENCE
    )
    train_step = TrainStep(config, mesh, StepTimer().time)
    train_step.optimizer.initialize(config.run.seed)
    islands, ranks = mesh.layout.islands, mesh.layout.island_data
    if train_step.islands is not None:
        train_step.islands.begin()
    island, rank = divmod(mesh.coordinate["data"], ranks)
    within = mesh.group("pipeline", "data_shard", "context", "tensor")
    losses, norms = [], []
    for step in range(config.train.steps):
        batch = make_batches(config, step, islands, full)[island]
        valid = float(batch.sum_label_weights())
        own = share(batch, config.train.microbatch, rank, ranks, False)
        result = train_step.train(own, step, 1.0 / valid)
        loss = all_reduce(result.loss / valid, within).wait()
        losses.append(float(all_reduce(loss, mesh.group("data_replicate")).wait()))
        norms.append(float(result.update.grad_norm))
    weights = {}
    for name, _, box, piece in train_step.optimizer.list_tensors():
        weights.setdefault(name, []).append((box, piece.clone()))
    traffic = mesh.take_traffic().get("islands", 0)
    mesh.finish()
    return island, losses, norms, weights, traffic


def draw_initial_weights(*arguments):
    config = make_config(*arguments)
    mesh = Mesh(Layout(), device="cpu", timeout=PATIENCE)
    train_step = TrainStep(config, mesh, StepTimer().time)
    train_step.optimizer.initialize(config.run.seed)
    weights = {
        name: (piece.clone(), spec.decay)
        for name, spec, _, piece in train_step.optimizer.list_tensors()
        if name == spec.name
    }
    mesh.finish()
    return weights


class ReferenceIsland:
    """One island in plain torch: its weights, and AdamW."""

    def __init__(self, config, initial):
        self.config = config
        self.weights = {
            name: value.clone().requires_grad_() for name, (value, _) in initial.items()
        }
        optim = config.optim
        groups = [
            {
                "params": [
                    self.weights[name] for name, (_, decay) in initial.items() if decay is d
                ],
                "weight_decay": optim.weight_decay if d else 0.0,
            }
            for d in (True, False)
        ]
        self.adamw = torch.optim.AdamW(
            groups, lr=optim.lr, betas=(optim.beta1, optim.beta2), eps=optim.eps
        )

    def step(self, batch):
        self.adamw.zero_grad()
        loss = reference_loss(self.weights, self.config, batch)
        loss.backward()
        grads = [weight.grad for weight in self.weights.values()]
        norm = torch.stack([grad.norm() for grad in grads]).norm()
        for grad in grads:  # torch's own function divides by the norm plus 1e-6
            grad.div_((norm / self.config.optim.clip).clamp_min(1.0))
        self.adamw.step()
        return loss.item(), norm.item()


@torch.no_grad()
def synchronise(config, islands, synced, outer, in_flight, step):
    """DiLoCo after a step, one fragment after the other: what is due leaves, what has travelled for
    `delay` steps arrives."""
    sync = config.sync
    for name in synced:
        fragment = find_fragment(name, sync.fragments)
        age = count_steps_since_push(sync, fragment, step)
        if age == 0:
            mean = sum(island.weights[name] for island in islands) / len(islands)
            in_flight[name] = synced[name] - mean
        if age == sync.delay and name in in_flight:
            synced[name].grad = in_flight.pop(name)
            outer[name].step()
            for island in islands:
                own = island.weights[name]
                own.copy_(sync.kept_share * own + (1 - sync.kept_share) * synced[name])


def train_reference(config, count, initial):
    """Return losses and norms [island][step], and the weights of each island after the last
    step."""
    sync, kinds = config.sync, {"nesterov": {"nesterov": True}, "sgd": {}}
    islands = [ReferenceIsland(config, initial) for _ in range(count)]
    synced = {name: value.clone().requires_grad_() for name, (value, _) in initial.items()}
    outer = {
        name: torch.optim.SGD([p], sync.outer_lr, sync.outer_momentum, **kinds[sync.optimizer])
        for name, p in synced.items()
    }
    lines, in_flight = [[] for _ in islands], {}
    for step in range(config.train.steps):
        batches = make_batches(config, step, count)
        for island, batch, line in zip(islands, batches, lines, strict=True):
            line.append(island.step(batch))
        synchronise(config, islands, synced, outer, in_flight, step + 1)
    with torch.no_grad():  # what travels arrives, and the islands end with their mean
        for name in synced:
            if name in in_flight:
                synced[name].grad = in_flight[name]
                outer[name].step()
                kept = sync.kept_share
                for island in islands:
                    own = island.weights[name]
                    own.copy_(kept * own + (1 - kept) * synced[name])
    names = list(synced)
    mean = {
        name: sum(island.weights[name].detach() for island in islands) / count for name in names
    }
    return lines, mean


def assert_like(results, lines, weights):
    for island, losses, norms, pieces, _ in results:
        for step, (loss, norm) in enumerate(lines[island]):
            assert losses[step] == pytest.approx(loss, rel=0, abs=PROMISE), f"step {step}"
            assert norms[step] == pytest.approx(norm, rel=0, abs=PROMISE), f"step {step}"
        for name, expected in weights.items():
            for box, piece in pieces.get(name, ()):
                difference = float((piece - expected[box.slices]).abs().max())
                assert difference < PROMISE, (name, difference)


LAYOUTS = [
    (DILOCO, 2, {"islands": 2, "zero": 0}),
    (STREAMING, 4, {"islands": 2, "tensor": 2}),
    (STREAMING, 4, {"islands": 2, "pipeline": 2, "zero": 2}),
    (DILOCO, 4, {"islands": 2, "data": 4, "zero": 3}),
    slow(DILOCO, 4, {"islands": 2, "context": 2}),
    slow(DILOCO, 4, {"islands": 2, "data": 4, "data_replicate": 2, "zero": 0}),
    slow(STREAMING, 4, {"islands": 2, "data": 4, "zero": 0}),
    slow(
        {**DILOCO, "optimizer": "sgd", "outer_lr": 0.8, "outer_momentum": 0.3},
        2,
        {"islands": 2, "zero": 1},
    ),
]


@pytest.fixture(scope="module")
def initial(pool):
    return pool.run(1, draw_initial_weights, {}, {})[0]


@pytest.mark.parametrize(("sync", "ranks", "parallel"), LAYOUTS)
def test_layouts_of_an_island_do_not_change_the_answer_of_the_reference(
    sync, ranks, parallel, pool, initial
):
    train = {"microbatch": 1}
    config = make_config(parallel, sync, None, train)
    lines, mean = train_reference(config, parallel["islands"], initial)
    results = pool.run(ranks, train_islands, parallel, sync, None, train)
    assert_like(results, lines, mean)


def gather(results, island):
    """Return the weights and optimizer state of an island, whole."""
    whole = {}
    for place, *_, pieces, _ in results:
        for name, boxes in pieces.items() if place == island else ():
            ends = [[o + n for o, n in zip(b.offset, b.shape, strict=True)] for b, _ in boxes]
            whole.setdefault(name, []).extend(zip(boxes, ends, strict=True))
    gathered = {}
    for name, boxes in whole.items():
        shape = [max(ends[dim] for _, ends in boxes) for dim in range(len(boxes[0][1]))]
        gathered[name] = torch.full(shape, torch.nan, dtype=torch.float64)
        for (box, piece), _ in boxes:
            gathered[name][box.slices] = piece
    return gathered


def measure_difference(results, others, island=0, state=True):
    """Return the largest difference between the tensors of an island of two runs."""
    ours, theirs = gather(results, island), gather(others, min(island, others[-1][0]))
    assert ours.keys() == theirs.keys()
    names = [name for name in ours if state or not name.startswith("optimizer.")]
    return max(float((ours[name] - theirs[name]).abs().max()) for name in names)


def test_islands_send_what_is_planned(pool):
    """Two synchronisations, and the mean at the end of the run."""
    config = make_config({"islands": 2}, DILOCO)
    layout = Layout.from_parallel(config.parallel, 2)
    planned = compute_communication_bytes(config, layout, plan_stages(config), ())["islands"]
    for *_, sent in pool.run(2, train_islands, {"islands": 2}, DILOCO):
        assert sent == pytest.approx(3 * DILOCO["every"] * planned, rel=1e-3)


MOE = {"experts": 4, "ffn": 12, "top_k": 2, "shared": 1}
EXPERTS = {"kv_heads": 2, "activation": "swiglu", "norm": "rmsnorm", "moe": MOE}


def test_islands_with_experts_are_the_same_under_any_layout(pool):
    """Loads, biases and auxiliary losses are those of an island."""
    fewest = pool.run(2, train_islands, {"islands": 2}, STREAMING, None, None, EXPERTS)
    parallel = {"islands": 2, "data": 4, "expert": 2, "zero": 2}
    more = pool.run(4, train_islands, parallel, STREAMING, None, {"microbatch": 2}, EXPERTS)
    for island in range(2):
        assert measure_difference(more, fewest, island) < PROMISE


def read_table():
    """Return {inner optimizer and `sync.every`: difference} of the table."""
    text = (ROOT / "docs/design.md").read_text().partition("| 2 islands |")[2]
    rows = (line.strip("| ").split(" | ") for line in text.splitlines()[2:] if line[:2] == "| ")
    return {name: cell for name, cell, *_ in rows}


INNER = {"SGD": SGD, "AdamW": {"clip": 0.0}, "AdamW with clipping": {}}


@pytest.mark.parametrize("name", INNER)
@pytest.mark.parametrize("every", [1, slow(2)])
def test_the_table_says_how_far_islands_come_from_data_parallelism(name, every, pool):
    """With a plain average after every step it is data parallelism, as long as the inner update is
    linear in the gradients: SGD with momentum and without clipping, and islands with as many
    labels each."""
    sync = {**AVERAGE, "every": every}
    full = INNER[name], None, None, True
    islands = pool.run(2, train_islands, {"islands": 2}, sync, *full)
    plain = pool.run(2, train_islands, {"data": 2}, sync, *full)
    difference = measure_difference(islands, plain, state=False)
    cell = read_table()[f"{name}, `sync.every={every}`"]
    if cell == "same":
        assert difference < PROMISE
    else:
        assert float(cell) / 3 < difference < 3 * float(cell), difference


CODECS = ("none", "bf16", "fp16", "int8", "int4", "topk", "randomk", "threshold")


def push_and_pull(rounds):
    """Synchronise the same differences by every codec; return how far what was applied and what is
    left is from what was pushed, and the bytes sent, by codec."""
    mesh = Mesh(
        Layout(data=read_world_size(), islands=read_world_size()), device="cpu", timeout=PATIENCE
    )
    group, found = mesh.group("islands"), {}
    for codec in CODECS:
        sync = SyncConfig(optimizer="sgd", compress=codec)
        span = SpanShape(1001, torch.float64, True)
        outer = GroupOuterStep(sync, group, [span], BufferPool(mesh.device))
        synced, pushed = torch.zeros(2, 1001, dtype=torch.float64)
        group.traffic.take()
        for number in range(rounds):
            generator = torch.Generator().manual_seed(number * 7 + group.index)
            difference = torch.randn(1001, generator=generator, dtype=torch.float64)
            pushed += difference
            outer.push({0: difference})
            outer.advance([0])
            outer.pull({0: synced})
        sent = group.traffic.take()[0] / rounds
        state = dict(outer.list_state(0))
        left = state.get("unsent", torch.zeros_like(pushed))
        total = all_reduce(torch.stack([pushed, left]), group).wait() / group.size
        found[codec] = float((total[0] - total[1] + synced).abs().max()), sent, synced
    mesh.finish()
    return found


def test_what_islands_apply_and_what_is_unsent_is_all_that_they_pushed(pool):
    """Error feedback loses nothing; all islands get the same bits, and send what is planned."""
    results = pool.run(3, push_and_pull, 4)
    for codec in CODECS:
        for missing, sent, synced in (result[codec] for result in results):
            assert missing < PROMISE, codec
            # Parts of a third to two owners, and the own sum to both.
            assert sent == 4 * count_message_bytes(codec, 334, 8, 0.01), codec
            assert_bitwise_equal(
                [synced],
                [results[0][codec][2]],
                because="all decode the same messages of the same owners",
            )
