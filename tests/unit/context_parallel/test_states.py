"""States passed along pieces of samples: every kind of context ranks gives what one rank computes,
forward and backward, and sends what is written."""

import pytest
import torch
from patience import PATIENCE
from tolerances import assert_near

from megaframe.architecture.attention import count_exchanging_ranks
from megaframe.config import ParallelConfig
from megaframe.context_parallel.axis import ContextParallel
from megaframe.context_parallel.states import join_chunks, pass_states, split_chunks
from megaframe.data.microbatch import divide_zigzag
from megaframe.distributed.mesh import Mesh, read_world_size
from megaframe.layout import Layout

BATCH, SEQ, HEADS, WIDTH = 2, 24, 3, 4
KINDS = [
    (2, {"context_kind": "ring"}),
    (4, {"context_kind": "ring"}),
    (4, {"context_kind": "all_to_all"}),
    (4, {"context_kind": "nested", "context_heads": 2}),
]


def make_mesh(kind):
    world = read_world_size()
    mesh = Mesh(Layout(context=world), device="cpu", timeout=PATIENCE)
    parallel = ParallelConfig(context=world, **kind)
    return mesh, ContextParallel(*mesh.divide_context(count_exchanging_ranks(parallel)))


def gather_numbers(kind):
    """Gather the numbers of this rank's pieces, and return what all ranks' sums are back here."""
    mesh, context = make_mesh(kind)
    own = torch.tensor([context.own_pieces] * BATCH, dtype=torch.float64)[..., None]
    own.requires_grad_()
    gathered = context.gather_pieces(own)
    (gathered * (1 + mesh.rank)).sum().backward()
    mesh.finish()
    return gathered.detach(), own.grad


@pytest.mark.parametrize(("ranks", "kind"), KINDS)
def test_pieces_are_gathered_in_sample_order_and_their_gradients_summed(ranks, kind, pool):
    for gathered, gradient in pool.run(ranks, gather_numbers, kind):
        assert gathered[..., 0].tolist() == [[*range(2 * ranks)]] * BATCH
        assert (gradient == ranks * (ranks + 1) / 2).all()


def draw_tokens():
    """Return a factor and an addition for each token of whole samples; some factors are zero, as at
    the start of a document."""
    generator = torch.Generator().manual_seed(0)
    decay = torch.rand((BATCH, SEQ, HEADS, 1), generator=generator, dtype=torch.float64)
    decay[torch.rand((BATCH, SEQ), generator=generator) < 0.1] = 0.0
    added = torch.randn((BATCH, SEQ, HEADS, WIDTH), generator=generator, dtype=torch.float64)
    return decay, added, torch.randn(added.shape, generator=generator, dtype=torch.float64)


def pass_parts(kind):
    """Return the states before this rank's tokens and the gradients of both inputs, with chunks of
    one token; and the bytes that were sent forward and backward."""
    mesh, context = make_mesh(kind)
    traffic = [context.heads.traffic, context.ring.group.traffic]
    decay, added, weight = (
        divide_zigzag(part.movedim(1, -1), context.index, context.size, 0)
        .movedim(-1, 1)
        .contiguous()
        for part in draw_tokens()
    )
    decay.requires_grad_(), added.requires_grad_()
    chunks = (split_chunks(each, 1, context)[:, :, 0] for each in (decay, added))
    states = pass_states(*chunks, context)
    sent = [sum(each.take()[0] for each in {id(t): t for t in traffic}.values())]
    states = join_chunks(states[:, :, None], BATCH, added.shape[1])
    (states * weight).sum().backward()
    sent.append(sum(each.take()[0] for each in {id(t): t for t in traffic}.values()))
    mesh.finish()
    return states.detach(), decay.grad, added.grad, sent


@pytest.mark.parametrize(("ranks", "kind"), KINDS)
def test_states_and_gradients_are_those_of_one_rank_token_by_token(ranks, kind, pool):
    decay, added, weight = draw_tokens()
    decay.requires_grad_(), added.requires_grad_()
    state, before = torch.zeros_like(added[:, 0]), []
    for token in range(SEQ):
        before.append(state)
        state = decay[:, token] * state + added[:, token]
    states = torch.stack(before, 1)
    (states * weight).sum().backward()
    for rank, (*parts, sent) in enumerate(pool.run(ranks, pass_parts, kind)):
        for part, whole in zip(parts, (states, decay.grad, added.grad), strict=True):
            own = divide_zigzag(whole.detach().movedim(1, -1), rank, ranks, 0).movedim(-1, 1)
            assert_near(part, own, SEQ * WIDTH, size=float(whole.detach().abs().max()))
        # Of both pieces, a state and a factor for each head, to every other rank.
        assert sent == [8 * BATCH * 2 * HEADS * (WIDTH + 1) * (ranks - 1)] * 2


@pytest.mark.parametrize("length", [1, 4, 5, 11])
def test_chunks_are_joined_again_and_filled_with_zeros(length):
    tokens = torch.arange(1.0, 2 * length + 1).view(2, length, 1)
    chunks = split_chunks(tokens, 4, ContextParallel())
    assert chunks.shape == (2, -(-length // 4), min(4, length), 1)
    assert chunks.sum() == tokens.sum()
    assert torch.equal(join_chunks(chunks, 2, length), tokens)
