"""Each parameter counts its own updates, as torch's optimizers do: what was frozen, or trained by
another optimizer, starts from zero moments and a count of one, in whatever bucket it lies.
"""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from optimizer_steps import copy_weights, take_step
from tolerances import assert_near

from megaframe.architecture.spec import Box
from megaframe.checkpoint import Slice
from megaframe.checkpoint.train_state import find_restarted, prepare_slices
from megaframe.data_parallel.partition import BucketPartition
from megaframe.model.model_chunk import list_model_specs
from megaframe.optim.adamw import AdamW, AdamWOptions
from megaframe.optim.elementwise import ElementwiseRule, GroupRates
from megaframe.optim.optimizer_state import MomentStorage
from megaframe.optim.parameter_groups import find_frozen_names
from megaframe.optim.state_dtype import make_state_codecs
from megaframe.optim.update_rule import UpdateStep, find_counted_pieces

pytestmark = pytest.mark.numeric

STORAGE = MomentStorage(*make_state_codecs("master"))
RATE, BETAS, EPS = 0.02, (0.9, 0.95), 1e-8


@given(data=st.data(), alignment=st.sampled_from([1, 4]), ranks=st.integers(1, 3))
def test_counted_pieces_are_all_weights_of_a_rank_in_order(data, alignment, ranks):
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
    before = data.draw(st.lists(st.integers(0, 2), min_size=len(sizes), max_size=len(sizes)))
    divided = data.draw(st.booleans())
    boxes = [Box((0,), (size,)) for size in sizes]
    for index in range(ranks):
        partition = BucketPartition.divide(boxes, alignment, ranks, index, divided=divided)
        pieces = find_counted_pieces(partition, before)
        span = partition.master_span
        edges = [piece.span.start for piece in pieces] + [pieces[-1].span.stop]
        assert (edges[0], edges[-1]) == (0, span.stop - span.start)
        assert edges == sorted(edges)
        counts = [piece.updates_before for piece in pieces]
        assert all(first != second for first, second in pairwise(counts))
        for number, _, place in partition.iterate_pieces(span):
            (piece,) = [p for p in pieces if p.span.start <= place.start < p.span.stop]
            assert place.stop <= piece.span.stop and piece.updates_before == before[number]


@pytest.mark.parametrize("state", ["master", "bf16", "int8"])
def test_a_rule_corrects_each_piece_for_its_own_updates(state):
    """A span of three chunks whose middle is trained from the third update on is three spans that
    are trained on their own, whatever the type of the state (none of them rounds this state)."""
    storage = MomentStorage(*make_state_codecs(state))
    options = AdamWOptions(*BETAS, EPS, GroupRates())
    generator = torch.Generator().manual_seed(0)
    length, low, high = 600_000, 1024, 400_128
    weights = torch.randn(length, generator=generator)
    grads = torch.ones(length)
    rule = ElementwiseRule(weights, [AdamW(options, storage)], storage)
    boxes = [Box((0,), (size,)) for size in (low, high - low, length - high)]
    partition = BucketPartition.divide(boxes, 1, 1, 0, divided=False)
    rule.set_update_counts(find_counted_pieces(partition, [0, 7, 7]))
    start, rounded = weights.clone(), torch.empty(length, dtype=torch.bfloat16)
    step = UpdateStep(8, RATE, torch.ones(()), torch.zeros(()))
    rule.update(weights, grads, step, rounded)
    assert torch.equal(rounded, weights.bfloat16())
    moves = (start - weights) / RATE
    # Moments of zero at the first update: every element moves by the rate; at the eighth by less.
    eighth = (0.1 / (1 - 0.9**8)) / (0.05 / (1 - 0.95**8)) ** 0.5
    size = float(start.abs().max()) / RATE
    tolerance = 8 * torch.finfo(torch.float32).eps * size
    assert moves[low:].sub(1.0).abs().max() < tolerance
    assert moves[:low].sub(eighth).abs().max() < tolerance


def find_frozen(config):
    specs = list_model_specs(config.model, config.train)
    return find_frozen_names(config.frozen_patterns, specs)


def resume(built, other):
    """Continue a run in `other`, with what a checkpoint would hold of `built`."""
    saved = {key: tensor.clone() for key, _, _, tensor in built.optimizer.list_tensors(owned=True)}
    moments = other.optimizer.list_moments()
    frozen_before = find_frozen(built.config)
    restarted = find_restarted(moments, saved, frozen_before)
    slices = [
        Slice(key, spec.shape, box.offset, tensor)
        for key, spec, box, tensor in other.optimizer.list_tensors()
    ]
    for part in prepare_slices(slices, saved, restarted):
        part.tensor.copy_(saved[part.name])
    other.optimizer.load_state(built.optimizer.read_state().restart(moments, restarted))
    return other


def step_both(built, torch_weights, torch_optimizer, microbatch, step):
    """Take a step in both, torch with the gradients of `built`."""
    take_step(built, microbatch, step)
    for weight in torch_weights.values():
        weight.grad = None
    for bucket in built.sharded_parameters.buckets:
        if bucket.trained:
            for parameter, _, grad in bucket.iterate_pieces(bucket.grad_sums, bucket.master_span):
                torch_weights[parameter.spec.name].grad = grad.clone()
    torch_optimizer.step()


PHASES = [
    ("blocks.0.*", "head.weight"),
    (),
    ("blocks.0.mlp.*",),
    ("blocks.0.mlp.*", "embedding.*"),
    ("embedding.*",),
    (),
]


@pytest.mark.parametrize("bucket_size", [1, 1 << 20])
def test_frozen_and_unfrozen_parameters_are_those_of_torch(bucket_size, build, make_microbatch):
    """Frozen ones have no state: torch's is deleted where a phase freezes a parameter."""
    optim = {"lr": RATE, "schedule": "constant", "clip": 0.0, "weight_decay": 0.0}
    model, parallel = {"bias": True}, {"bucket_size": bucket_size}
    built, weights, optimizer = None, {}, None
    for phase, frozen in enumerate(PHASES):
        other = build(model, optim={**optim, "frozen": frozen}, parallel=parallel)
        if built is None:
            weights = {n: w.clone().requires_grad_() for n, w in copy_weights(other).items()}
            optimizer = torch.optim.AdamW(
                weights.values(), lr=RATE, betas=BETAS, eps=EPS, weight_decay=0.0
            )
        else:
            # What the optimizer remembers of later steps, as when a run goes back to a checkpoint.
            take_step(other, make_microbatch(other.config, 99), 99)
            resume(built, other)
        built = other
        for name in find_frozen(built.config):
            optimizer.state.pop(weights[name], None)
        for step in range(3 * phase, 3 * phase + 3):
            microbatch = make_microbatch(built.config, step)
            step_both(built, weights, optimizer, microbatch, step)
        for name, weight in copy_weights(built).items():
            assert_near(weight, weights[name], 24 * 3 * (phase + 1), label=name)
    # The head has been trained from the fourth update on; a block's MLP from the thirteenth.
    before = built.optimizer.read_state().updates_before
    assert before["head.weight"] == 3 and before["blocks.0.mlp.up.weight"] == 12
    assert before["embedding.tokens.weight"] == 15 and "blocks.1.mlp.up.weight" not in before


def test_moments_of_another_optimizer_are_not_corrected_as_ones_own(build, make_microbatch):
    """Lion's mean alone is no state of AdamW, which starts anew; what has none before does too."""
    lion = build(optim={"name": "lion", "lr": 0.001, "clip": 0.0, "weight_decay": 0.0})
    for step in range(3):
        take_step(lion, make_microbatch(lion.config, step), step)
    optim = {"lr": RATE, "clip": 0.0, "weight_decay": 0.0, "schedule": "constant", "eps": 1e-300}
    adamw = resume(lion, build(optim=optim))
    before = {name: weight.clone() for name, weight in copy_weights(adamw).items()}
    take_step(adamw, make_microbatch(adamw.config, 3), 3)
    for name, weight in copy_weights(adamw).items():
        moved = (weight - before[name]).abs()
        assert_near(moved[moved > 0], torch.full_like(moved[moved > 0], RATE), 64, label=name)
