"""Every schedule gives the one-process answer (loss, norm, weights, evaluation) to 1e-10 in fp64:
with chunks, uneven layers, tied embeddings, recompute, uneven masks, accumulation and data ranks.
"""

from itertools import pairwise

import pytest
from bitwise import assert_same_bits
from parity_runs import MODELS, assert_same, make_global_batch, run, share
from patience import PATIENCE
from slow_cases import mark_slow, slow

from megaframe.architecture.stages import compute_stage_costs, plan_stages
from megaframe.config import RunConfig
from megaframe.distributed.mesh import Mesh
from megaframe.layout import Layout
from megaframe.metrics import StepTimer
from megaframe.schedule import generate
from megaframe.schedule.event_simulation import count_live_activations
from megaframe.training.train_step import TrainStep

CHUNKS = {
    "gpipe": 1,
    "1f1b": 1,
    "interleaved": 2,
    "breadth-first": 2,
    "zb-h1": 1,
    "zb-h2": 1,
    "zb-v": 2,
    "v-half": 2,
    "dualpipe-v": 2,
    "search": 2,
}
LAYERS = {2: 5, 4: 9}
"""Of a model, by number of pipeline ranks: no number of stages divides them."""


WHOLE = {"microbatch": 8}

# Each schedule with two ranks, or with four, and every second one with the other number, and with a
# tied embedding. Schedules do not depend on the model; tied embeddings are also beside ZeRO 3.
TWO, FOUR = (2, "full"), (4, "none")
QUICK = [("llama", name, *(FOUR if name in ("1f1b", "v-half") else TWO)) for name in CHUNKS]
LLAMA = [("llama", name, *(TWO, FOUR)[place % 2]) for place, name in enumerate(CHUNKS)]
GPT2 = [("gpt2", name, *(FOUR, TWO)[place % 2]) for place, name in enumerate(CHUNKS)][::2]
CASES = [*QUICK, *(case for case in LLAMA if case not in QUICK), *GPT2]


@pytest.mark.parametrize(
    ("name", "schedule", "stages", "recompute"), mark_slow(CASES, except_for=QUICK)
)
def test_schedules_do_not_change_the_answer(name, schedule, stages, recompute, pool, run_alone):
    # Four microbatches for each two ranks: some are in flight on all ranks, others wait.
    train = {"microbatch": 4 // stages, "recompute": recompute}
    model = {**MODELS[name], "layers": LAYERS[stages]}
    parallel = {"pipeline": stages, "chunks": CHUNKS[schedule], "schedule": schedule}
    assert_same(pool.run(stages, run, model, train, parallel), run_alone(model, WHOLE))


@pytest.mark.parametrize(
    ("name", "parallel"),
    [
        slow("gpt2", {"layers_per_stage": (1, 8)}),
        slow("gpt2", {"layers_per_stage": (9, 0), "schedule": "zb-h1"}),
        ("llama", {"layers_per_stage": (0, 4, 5, 0), "chunks": 2, "schedule": "zb-v"}),
        slow("gpt2", {"chunks": 3, "schedule": "interleaved", "schedule_microbatches": 3}),
        slow("llama", {"chunks": 4, "schedule": "breadth-first"}),
    ],
)
def test_uneven_stages_with_data_ranks(name, parallel, pool, run_alone):
    """Each stage recomputes a different number of its blocks."""
    stages = 2 * parallel.get("chunks", 1)
    train = {"microbatch": 1, "recompute": "selective", "recompute_blocks": tuple(range(stages))}
    model = {**MODELS[name], "layers": 9}
    results = pool.run(4, run, model, train, {"pipeline": 2, **parallel})
    assert_same(results, run_alone(model, WHOLE))


@pytest.mark.parametrize(("name", "schedule"), [slow("gpt2", "interleaved"), ("llama", "zb-v")])
def test_microbatches_of_different_lengths(name, schedule, pool):
    model = {**MODELS[name], "layers": 4}
    arguments = ({"microbatch": 1}, {"pipeline": 2, "chunks": 2, "schedule": schedule})
    (unmixed,) = pool.run(1, run, model, arguments[0], None, False, True)
    assert_same(pool.run(4, run, model, *arguments, False, True), unmixed)


def test_overlap_changes_no_bit(pool):
    arguments = ({**MODELS["gpt2"], "layers": 2}, {"microbatch": 2}, {"pipeline": 2})
    serial, overlapped = (pool.run(4, run, *arguments, serial) for serial in (True, False))
    assert_same_bits(serial, overlapped, because="overlap moves waits, not what is computed")


def measure_step(schedule, chunks):
    """Train one step on two ranks -> this rank's most microbatches in flight, those left at the
    end, and bytes sent."""
    config = RunConfig(
        model={"layers": 4, "hidden": 16, "heads": 4, "vocab": 37},
        train={"seq": 10, "global_batch": 8, "microbatch": 1, "precision": "fp64"},
        parallel={"pipeline": 2, "chunks": chunks, "schedule": schedule},
    )
    mesh = Mesh(Layout.from_parallel(config.parallel, 2), device="cpu", timeout=PATIENCE)
    train_step = TrainStep(config, mesh, StepTimer().time)
    train_step.optimizer.initialize(1)
    stages = train_step.stages.values()
    most = 0

    def count_calls(forward):
        def counted(*arguments, **options):
            nonlocal most
            output = forward(*arguments, **options)
            most = max(most, sum(len(stage._activations) for stage in stages))
            return output

        return counted

    for stage in stages:
        stage.forward = count_calls(stage.forward)
    batch = make_global_batch(config.model, config.train, 0)
    train_step.train(share(batch, 1, 0, 1, ragged=False), 0, 1.0)
    sent = mesh.link(mesh.rank, 1 - mesh.rank).traffic.bytes
    left = sum(len(stage._activations) for stage in stages)
    mesh.finish()
    return most, left, sent


@pytest.mark.parametrize("schedule", mark_slow(CHUNKS, except_for=["1f1b", "interleaved", "zb-v"]))
def test_activations_and_bytes_are_the_closed_forms(schedule, pool):
    """As many microbatches are in flight as the checker counts, none is left at the end, and each
    microbatch sends 2 b s h elements over each boundary between ranks."""
    chunks = CHUNKS[schedule]
    results = pool.run(2, measure_step, schedule, chunks)
    costs = None
    if schedule == "search":
        config = {"model": {"layers": 4, "hidden": 16, "heads": 4, "vocab": 37}}
        config |= {"train": {"seq": 10}, "parallel": {"pipeline": 2, "chunks": 2}}
        config = RunConfig(**config)
        costs = compute_stage_costs(config.model, config.train, plan_stages(config))
    actions = generate(schedule, 2, chunks, 8, costs=costs, placement="vee")
    assert [most for most, _, _ in results] == [n * chunks for n in count_live_activations(actions)]
    assert [left for _, left, _ in results] == [0, 0]
    crossings = sum(a != b for a, b in pairwise(actions.rank_of))
    assert sum(sent for _, _, sent in results) == 2 * 1 * 10 * 16 * 8 * crossings * 8


def test_a_schedule_from_a_file(pool, run_alone, tmp_path):
    """Forwards run one microbatch further ahead than in 1F1B, and the first rank splits every other
    backward."""
    (tmp_path / "mine.txt").write_text(
        "0F0 0F1 0F2 0B0 0F3 0B1 0W1 0B2 0B3 0W3  # first rank\n1F0 1B0 1F1 1F2 1B1 1F3 1B2 1B3\n"
    )
    parallel = {"pipeline": 2, "schedule": f"file:{tmp_path}/mine.txt"}
    model = {**MODELS["gpt2"], "layers": LAYERS[2]}
    assert_same(pool.run(2, run, model, {"microbatch": 2}, parallel), run_alone(model, WHOLE))
