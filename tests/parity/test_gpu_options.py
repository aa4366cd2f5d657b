"""Options that change where or how a step is computed, but not its result: offloaded activations
and compiled pieces. Nothing in a step makes the host wait for the device.
"""

import os

import pytest
import torch
from bitwise import assert_bitwise_equal, assert_same_bits
from host_waits import forbid_host_waits
from parity_runs import MODELS, assert_same, run
from slow_cases import slow

from megaframe.architecture.model_blocks import describe_block
from megaframe.architecture.pipeline import build_step_schedule
from megaframe.architecture.stages import plan_stages
from megaframe.config import RunConfig
from megaframe.errors import UserError
from megaframe.layout import Layout
from megaframe.model.rotary import Rotary
from megaframe.ops.compile import MAX_KINDS, Compiled
from megaframe.ops.operator_mode import OperatorMode
from megaframe.pipeline_parallel.activation_offload import ActivationOffload
from megaframe.planner.memory import PlannedRank
from megaframe.planner.parameter_counts import count_rank_parameters
from megaframe.schedule import lower
from megaframe.training.rank_pool import RankPool
from megaframe.training.train_step import TrainStep
from megaframe.validate.run import validate_config

MOE = {"experts": 4, "ffn": 8, "top_k": 2, "balance_loss": 0.1, "z_loss": 0.01}
EXPERTS = {"norm": "rmsnorm", "activation": "swiglu", "moe": MOE}
WIDER = {**EXPERTS, "layers": 1, "moe": {**MOE, "ffn": 16}}
BLOCKS = {**WIDER, "hidden": 128, "moe": {**MOE, "ffn": 128}}
"""Wide enough for products in 8 bits with blocks of 128."""


@pytest.mark.parametrize(
    ("name", "parallel", "train"),
    [
        slow("gpt2", {}, {"recompute": "full"}),
        ("llama", {"pipeline": 2, "zero": 3}, {"recompute_blocks": 1, "recompute": "selective"}),
    ],
)
def test_offload_changes_no_bit(name, parallel, train, pool):
    ranks, model = parallel.get("pipeline", 1), {**MODELS[name], "layers": 4}
    plain = pool.run(ranks, run, model, train, parallel)
    offloaded = pool.run(ranks, run, model, {**train, "offload": True}, parallel)
    assert_same_bits(offloaded, plain, because="what is kept elsewhere comes back as it was")


def test_offloaded_activations_are_not_on_the_device():
    offload, x = ActivationOffload(torch.device("cpu")), torch.randn(8, 4)
    stored, before = offload.store(x), x.clone()
    x.zero_()
    stored.fetch()
    restored = offload.store(torch.ones(8, 4))  # reuses the buffer that was read
    assert_bitwise_equal([stored.take()], [before], because="it is only kept elsewhere")
    assert (restored.take() == 1).all()


def test_the_memory_plan_knows_what_is_away():
    def activations(offload):
        config = RunConfig(
            model={"layers": 6, "hidden": 64, "heads": 2, "vocab": 100},
            train={"recompute": "full", "seq": 32, "precision": "fp32", "offload": offload},
        )
        actions = lower(build_step_schedule(config, 2)).ranks[0]
        plans = plan_stages(config)
        parameters = count_rank_parameters(config.model, config.train, Layout(), plans)
        return PlannedRank(config, parameters, 1, plans, actions).compute_memory().activations

    stream = 32 * 64 * 4
    assert activations(False) - activations(True) == (6 - 2) * stream


def test_offload_without_anything_to_move_is_refused():
    config = RunConfig(model={"vocab": 100}, train={"offload": True})
    with pytest.raises(UserError, match=r"train\.offload=true .* use train\.recompute=full"):
        validate_config(config, 1, data=False)


# Pieces are compiled without the collectives between them, so one rank shows them.
@pytest.mark.slow
@pytest.mark.parametrize(("recompute", "tensor"), [("none", 1), ("selective", 2)])
def test_compiled_pieces_do_not_change_the_answer(recompute, tensor, pool):
    plain = pool.run(1, run, MODELS["llama"])[0]
    train = {"compile": "aot_eager", "recompute": recompute}
    # In processes of their own: torch's compiler has failed in one that had run other tests.
    workers = RankPool(tensor)
    try:
        compiled = workers.run(tensor, run, MODELS["llama"], train, {"tensor": tensor})
    finally:
        workers.close()
    assert_same(compiled, plain)


def test_shapes_that_keep_changing_are_left_to_plain_code_and_said_once():
    messages = []

    def double(x):
        return 2 * x

    torch._dynamo.reset()
    compiled = Compiled(double, "eager", messages.append)
    for size in range(1, MAX_KINDS + 4):
        assert (compiled(torch.ones(size)) == 2).all()
    assert len(messages) == 1 and "double has met" in messages[0]


class _Moves(OperatorMode):
    """Counts operators that move a tensor from the host to a device."""

    def __init__(self):
        super().__init__()
        self.times = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        tensors = [tensor for tensor in args if isinstance(tensor, torch.Tensor)]
        self.times += output.is_meta and any(
            one.device.type == "cpu" and one.dim() for one in tensors
        )
        return output


def test_the_tables_of_rotation_come_to_a_device_once():
    model = RunConfig(model={"vocab": 100, "position": "rotary", "rotary_base": 777.0}).model
    positions = torch.arange(8, device="meta")
    moves_per_call = []
    for _ in range(3):
        with _Moves() as moves:
            Rotary(describe_block(model, 0).mixer.rotary, positions, torch.float32)
        moves_per_call.append(moves.times)
    assert moves_per_call == [1, 0, 0]


def run_watched(*given):
    """`run`, which fails if the host waits within a train step. The numbers of the previous
    step are read before it, when they are on the host already."""
    import parity_runs as training

    step = TrainStep.train

    def watched(self, *arguments, **options):
        self.optimizer._count_pending()
        with forbid_host_waits():
            result = step(self, *arguments, **options)
            assert self.optimizer.loss_scale / 3 is not None  # what the next step begins with
            return result

    os.environ["TRITON_INTERPRET"] = "1"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainStep, "train", watched)
        patch.setattr(training, "GLOBAL_BATCH", 2)
        return run(*given)


# Plain code, also on tensor and on context ranks, and experts with their kernels.


@pytest.mark.parametrize(
    ("model", "train", "parallel", "kernels"),
    [
        (MODELS["gpt2"], {}, {}, {}),
        (MODELS["gpt2"], {"precision": "fp16"}, {}, {}),
        (MODELS["llama"], {"recompute": "selective"}, {"tensor": 2, "zero": 2}, {}),
        (MODELS["llama"], {"recompute": "full", "offload": True}, {"context": 2}, {}),
        (EXPERTS, {}, {}, {"experts": "triton"}),
        slow(WIDER, {"fp8": "tensor", "seq": 4}, {}, {"experts": "triton", "fp8": "triton"}),
        slow(WIDER, {"fp8": "row", "seq": 4}, {}, {"experts": "triton", "fp8": "triton"}),
        slow(BLOCKS, {"fp8": "block", "seq": 4}, {}, {"experts": "triton", "fp8": "triton"}),
    ],
)
def test_nothing_in_a_step_makes_the_host_wait(model, train, parallel, kernels, pool):
    train = {"microbatch": 2, "precision": "fp32", **train}
    ranks = max([*parallel.values(), 1])
    pool.run(ranks, run_watched, model, train, parallel, False, False, False, {}, kernels)


def test_a_wait_is_noticed():
    x = torch.ones(3)
    for wait in (lambda: x.sum().item(), lambda: x[x > 0], lambda: bool(x[0]), lambda: x.nonzero()):
        with pytest.raises(AssertionError, match="the host"), forbid_host_waits():
            wait()
