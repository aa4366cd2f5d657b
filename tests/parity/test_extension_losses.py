"""No layout changes a loss from outside, nor what follows from it: 1e-10 in fp64."""

import pytest
from parity_runs import FEW, LAYOUTS, MODELS, assert_same, run
from repo_copy import ROOT
from slow_cases import mark_slow

from megaframe.architecture.output_head import MAX_GPU_LOGITS
from megaframe.architecture.pipeline import build_step_schedule
from megaframe.architecture.stages import plan_stages
from megaframe.config import RunConfig, load
from megaframe.config.registry import Registry, use_registry
from megaframe.extensions import load_extensions
from megaframe.layout import Layout
from megaframe.planner.memory import compute_rank_memory
from megaframe.validate.run import find_mistakes

EXAMPLE = f"run.extensions=[{ROOT / 'examples/callback.py'}]"
LOSS = {"loss": {"kind": "focal", "gamma": 3.0}}
AHEAD = {**MODELS["llama"], "mtp_depth": 2, "logit_softcap": 2.0}


@pytest.fixture(autouse=True)
def loaded():
    with use_registry(Registry()):
        load_extensions(None, [EXAMPLE])
        yield


def run_with_loss(model, train, parallel):
    with use_registry(Registry()):
        load_extensions(None, [EXAMPLE])
        return run(model, {**FEW, **LOSS, **train}, parallel)


@pytest.fixture(scope="module")
def expected(pool):
    return pool.run(1, run_with_loss, AHEAD, {}, {})[0]


@pytest.mark.parametrize("layout", mark_slow(LAYOUTS, except_for=["tensor", "context"]))
def test_a_loss_is_that_of_one_process_for_tokens_ahead_too(layout, pool, expected):
    ranks, parallel, train = LAYOUTS[layout]
    assert_same(pool.run(ranks, run_with_loss, AHEAD, train, parallel), expected)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tensor", "pipeline"])
def test_a_loss_with_a_tied_head_is_that_of_one_process(layout, pool):
    ranks, parallel, train = LAYOUTS[layout]
    expected = pool.run(1, run_with_loss, MODELS["gpt2"], {}, {})[0]
    assert_same(pool.run(ranks, run_with_loss, MODELS["gpt2"], train, parallel), expected)


def test_an_evaluation_is_cross_entropy_and_training_is_not(pool, expected):
    (plain,) = pool.run(1, run, AHEAD, FEW)
    # The same weights before the first step: the focal loss is smaller.
    assert expected.losses[0] < plain.losses[0]
    still = {"lr": 1e-300}
    with_loss = pool.run(1, run_still, LOSS, still)[0]
    without = pool.run(1, run_still, {}, still)[0]
    assert with_loss.evaluation == without.evaluation
    assert with_loss.losses != without.losses


def run_still(train, optim):
    with use_registry(Registry()):
        load_extensions(None, [EXAMPLE])
        return run(AHEAD, {**FEW, **train}, optim=optim)


def test_the_plan_counts_a_loss():
    """A 32nd of the largest chunk is in fp32, in as many tensors as the loss says."""
    model = {"layers": 2, "hidden": 64, "heads": 2, "vocab": 1 << 15}
    memory = []
    for train in ({}, LOSS):
        config = RunConfig(model=model, train={"seq": 2048, "precision": "bf16", **train})
        plans, schedule = plan_stages(config), build_step_schedule(config, 1)
        memory.append(compute_rank_memory(config, Layout(), plans, schedule, 0).total)
    assert memory[1] - memory[0] == MAX_GPU_LOGITS // 32 * 7 * 4


def test_what_a_loss_replaces_is_refused_beside_it():
    options = ["train.loss=focal", "train.z_loss=0.1", "train.label_smoothing=0.1"]
    config = load(None, [EXAMPLE, *options, "kernels.loss=triton", "model.vocab=8"])
    mistakes = "\n".join(find_mistakes(config, 1, data=False))
    for text in ("train.z_loss=0.1 changes", "train.label_smoothing=0.1 ch", "kernels.loss=triton"):
        assert text in mistakes
