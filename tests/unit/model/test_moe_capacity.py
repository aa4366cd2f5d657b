"""`model.moe.capacity` limits what is trained. Padding takes no place of a token, and an evaluation
drops nothing, so its result does not depend on what else is computed with a text.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from parity_runs import FEW, MODELS, run
from tolerances import PROMISE, near

from megaframe.context_parallel.axis import ContextParallel
from megaframe.data.microbatch import Microbatch, select_context_part
from megaframe.expert_parallel.dispatch import DROPPED
from megaframe.inference.evaluation import TokenSequence, score
from megaframe.tensor_parallel.axis import RowPartition

pytestmark = pytest.mark.numeric

CAPACITY = {"experts": 4, "ffn": 12, "top_k": 2, "capacity": 0.5}
WITHOUT = {**CAPACITY, "capacity": None}


class PaddedRank:
    """The place of a context rank, of which padding asks for nothing else."""

    def __init__(self, index, size):
        self.index, self.size = index, size

    compute_positions = ContextParallel.compute_positions


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20)
@given(data=st.data(), samples=st.integers(1, 3), length=st.integers(1, 9))
def test_padding_takes_no_place_of_a_token(data, samples, length, build, make_microbatch):
    """Choices of tokens are those of a rank that has no padding, however strong padding's are."""
    built = build({"moe": CAPACITY, "layers": 1})
    router = built.stage.blocks[0].mlp.router
    tokens_BS = torch.zeros(samples, length, dtype=torch.int64)
    whole = Microbatch(tokens_BS, tokens_BS, torch.arange(samples))
    parts, ranks = data.draw(st.sampled_from([(1, 1), (1, 2), (1, 4), (2, 1), (3, 2)]))
    part, rank = data.draw(st.integers(0, parts - 1)), data.draw(st.integers(0, ranks - 1))
    microbatch = select_context_part(whole, part, parts)
    tokens = microbatch.tokens_BS.numel()
    padded = built.stage.make_inputs(replace(whole, tokens_BS=microbatch.tokens_BS), scale=1.0)
    padded = replace(
        padded,
        labels_T=microbatch.labels_BS.flatten(),
        rows=RowPartition(tokens, ranks, rank),
        context=PaddedRank(part, parts),
        whole=microbatch.whole,
    )
    is_token_R = padded.is_token_R
    x_RH = torch.randn(len(is_token_R), 16, dtype=torch.float64)
    x_RH[~is_token_R] = 100 * torch.randn(16, dtype=torch.float64)
    bare = int(is_token_R.sum())
    alone = replace(padded, rows=RowPartition(bare), batch=1, length=bare, context=PaddedRank(0, 1))
    alone = replace(alone, whole=None, labels_T=padded.labels_T[:1].expand(bare))
    with torch.no_grad():
        state = built.stage.make_pass_state()
        chosen_RK, _ = router(x_RH, padded, state)
        expected_RK, _ = router(x_RH[is_token_R], alone, state)
    assert torch.equal(chosen_RK[is_token_R], expected_RK)
    assert (chosen_RK[~is_token_R] == DROPPED).all()


def test_the_score_of_a_text_does_not_depend_on_what_is_scored_with_it(build):
    losses = {}
    generator = np.random.default_rng(0)
    passage = TokenSequence(generator.integers(0, 37, 12 * 9 + 5))
    for moe in (CAPACITY, WITHOUT):
        stage = build({"moe": moe}).stage
        for batch in (1, 2, 3, 64):
            (result,) = score(stage, [passage], context=12, stride=7, batch=batch)
            losses[moe["capacity"], batch] = result.loss
    assert [*losses.values()] == [near(losses[None, 1], 200)] * len(losses)


@pytest.mark.parametrize(("ranks", "parallel"), [(2, {"tensor": 2}), (2, {"context": 2}), (2, {})])
def test_an_evaluation_drops_nothing_under_any_layout(ranks, parallel, pool):
    """Before anything is trained, because training drops."""
    model = {**MODELS["gpt2"], "bias": False, "moe": CAPACITY}
    optim = {"lr": 1e-300}
    results = [
        pool.run(count, run, model, FEW, layout, False, False, False, optim)[0].evaluation
        for count, layout in ((1, {}), (ranks, parallel))
    ]
    assert results[1] == pytest.approx(results[0], rel=PROMISE)
