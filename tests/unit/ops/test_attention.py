"""Tiles of attention: together they give the whole result, forward and backward, whichever way a
tile is computed. The tiles of a ring cover what is seen once, and nothing that is hidden entirely.
"""

import math
from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerances import assert_near, compute_roundoff

from megaframe.config import ModelConfig
from megaframe.context_parallel.axis import ContextParallel
from megaframe.context_parallel.ring_mask import RingMask, find_document_ends
from megaframe.data.microbatch import Microbatch, divide_zigzag
from megaframe.distributed.collectives import Ring
from megaframe.model.layer_inputs import LayerSetup, make_microbatch_inputs
from megaframe.ops import attention_mask, attention_plain, attention_tiles, cpu_attention
from megaframe.ops.attention_local import attend_locally
from megaframe.ops.attention_mask import AttentionMask, SequenceMask
from megaframe.ops.attention_tiles import attend, attend_backward, merge

pytestmark = pytest.mark.numeric

BATCH, HEADS, GROUPS, WIDTH = 2, 4, 2, 6
SCALE = 0.7


def attend_plain(query, key, value, mask, *, causal, scale):
    bias = attention_plain.to_bias(
        attention_tiles._make_causal(mask, query.transpose(1, 2), causal), None
    )
    out, lse = attention_plain.attend_plain(
        *attention_tiles._move_heads_first(query, key, value), bias, (scale, None)
    )
    return out.transpose(1, 2), lse


def backward_plain(d_out, query, key, value, out, lse, mask, *, causal, scale):
    bias = attention_plain.to_bias(
        attention_tiles._make_causal(mask, query.transpose(1, 2), causal), None
    )
    heads_first = attention_tiles._move_heads_first(query, key, value)
    gradients = attention_plain.attend_plain_backward(
        d_out.transpose(1, 2), *heads_first, out.transpose(1, 2), lse, bias, (scale, None)
    )
    return [gradient.transpose(1, 2) for gradient in gradients]


WAYS = {"fused": (attend, attend_backward), "plain": (attend_plain, backward_plain)}


def make_samples(length, documents, generator, value_width=WIDTH):
    query, key, value = (
        torch.randn(BATCH, length, heads, width, dtype=torch.float64, generator=generator)
        for heads, width in ((HEADS, WIDTH), (GROUPS, WIDTH), (GROUPS, value_width))
    )
    numbers = None
    if documents:
        numbers = (torch.rand(BATCH, length, generator=generator) < 0.3).cumsum(1)
    return query, key, value, numbers


def assert_same_attention(actual, expected, query, key, value, d_out):
    """Compare the output and the gradients. A score's rounding is carried into its exponential,
    and gradients are differences of products of `d_out` and values, which may cancel entirely."""
    scores = SCALE * compute_largest_norm(query) * compute_largest_norm(key)
    size = (1.0 + scores) * compute_largest_norm(d_out) * compute_largest_norm(value)
    for name, output, reference in zip(
        ("output", "query", "key", "value"), actual, expected, strict=True
    ):
        assert_near(output, reference, len(key[0]) + 2 * WIDTH, size=size, label=name)


def compute_largest_norm(heads):
    return float(heads.norm(dim=-1).max())


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=25)
@given(
    ranks=st.integers(2, 4),
    piece=st.integers(1, 4),
    window=st.none() | st.integers(1, 9),
    documents=st.booleans(),
    value_width=st.sampled_from([WIDTH, 4, 9]),
    seed=st.integers(0, 99),
)
def test_tiles_of_a_ring_make_up_the_whole(way, ranks, piece, window, documents, value_width, seed):
    forward, backward = WAYS[way]
    generator = torch.Generator().manual_seed(seed)
    length = 2 * piece * ranks
    query, key, value, numbers = make_samples(length, documents, generator, value_width)
    shape = (*query.shape[:3], value_width)
    d_out = torch.randn(shape, dtype=torch.float64, generator=generator)
    mask, places = AttentionMask(window, numbers), torch.arange(length)
    expected = attend_whole(query, key, value, mask.make_dense(places, places), d_out)
    actual = [torch.zeros_like(tensor) for tensor in (d_out, query, key, value)]
    parts = [divide_zigzag(places, index, ranks, 0) for index in range(ranks)]
    for rank, own_places in enumerate(parts):
        ends = find_document_ends(numbers, 2 * piece)
        ring_mask = RingMask(Ring(rank, ranks), 2 * piece, mask, ends)
        out = torch.zeros_like(d_out[:, own_places])
        lse = torch.full((BATCH, HEADS, len(own_places)), -math.inf, dtype=torch.float64)
        order = [(rank - step) % ranks for step in range(ranks)]
        tiles = [(peer, tile) for peer in order for tile in ring_mask.get_tiles(peer)]
        for there, tile in tiles:
            rows, keys = tile.queries, parts[there][tile.keys]
            options = {"causal": tile.kind == "causal", "scale": SCALE}
            dense = ring_mask.make_dense_tile(tile, there, query.device)
            part = forward(
                query[:, own_places[rows]], key[:, keys], value[:, keys], dense, **options
            )
            merge(out[:, rows], lse[:, :, rows], *part)
        actual[0][:, own_places] = out
        for there, tile in tiles:
            rows, keys = tile.queries, parts[there][tile.keys]
            d_query, d_key, d_value = backward(
                d_out[:, own_places[rows]],
                query[:, own_places[rows]],
                key[:, keys],
                value[:, keys],
                out[:, rows],
                lse[:, :, rows],
                ring_mask.make_dense_tile(tile, there, query.device),
                causal=tile.kind == "causal",
                scale=SCALE,
            )
            actual[1][:, own_places[rows]] += d_query
            actual[2][:, keys] += d_key
            actual[3][:, keys] += d_value
    assert_same_attention(actual, expected, query, key, value, d_out)


@given(
    length=st.integers(1, 23),
    window=st.none() | st.integers(1, 30),
    documents=st.booleans(),
    value_width=st.sampled_from([WIDTH, 4, 9]),
    seed=st.integers(0, 99),
)
def test_tiles_among_tokens_that_are_here_are_the_whole(
    length, window, documents, value_width, seed
):
    """Tiles have four queries. With a window, a tile's keys reach back no further than that of its
    first query."""
    generator = torch.Generator().manual_seed(seed)
    query, key, value, numbers = make_samples(length, documents, generator, value_width)
    d_out = torch.randn(*query.shape[:3], value_width, dtype=torch.float64, generator=generator)
    mask, places = AttentionMask(window, numbers), torch.arange(length)
    expected = attend_whole(query, key, value, mask.make_dense(places, places), d_out)
    leaves = [x.clone().requires_grad_() for x in (query, key, value)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_mask, "_QUERIES_PER_TILE", 4)
        sequence_mask = SequenceMask(mask, BATCH, length, query.device)
        out = attend_locally(*leaves, sequence_mask, SCALE)
        out.backward(d_out)
    actual = (out, *(x.grad for x in leaves))
    assert_same_attention(actual, expected, query, key, value, d_out)
    if window is not None:
        assert all(len(places[tile.keys]) <= window + 3 for tile in sequence_mask.tiles)


@pytest.mark.parametrize("value_width", [WIDTH, 3])
@pytest.mark.parametrize(("queries", "keys", "causal"), [(300, 300, True), (300, 70, False)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("room", ["samples", "groups", "heads"])
def test_products_of_blocks_are_plain_attention(
    queries, keys, causal, dtype, value_width, room, monkeypatch
):
    """Blocks have 75 queries of all samples, of one group, or of one head at a time. Errors are
    those of rounding: of sums with `keys` terms, or on average of a single bf16 number."""
    heads_at_once = {"samples": BATCH * HEADS, "groups": HEADS // GROUPS, "heads": 1}[room]
    monkeypatch.setattr(cpu_attention, "_SCORES_PER_BLOCK", heads_at_once * 75 * keys)
    generator = torch.Generator().manual_seed(0)
    options = {"causal": causal, "scale": SCALE}
    query, d_out, key, value = (
        torch.randn(BATCH, length, heads, width, generator=generator).to(dtype).double()
        for length, heads, width in (
            (queries, HEADS, WIDTH),
            (queries, HEADS, value_width),
            (keys, GROUPS, WIDTH),
            (keys, GROUPS, value_width),
        )
    )
    out, lse = attend_plain(query, key, value, None, **options)
    expected = (out, lse, *backward_plain(d_out, query, key, value, out, lse, None, **options))
    d_out, query, key, value, out = (
        x.to(dtype).transpose(1, 2) for x in (d_out, query, key, value, out)
    )
    wide = torch.promote_types(dtype, torch.float32)
    actual = list(cpu_attention.attend(query, key, value, **options))
    actual += cpu_attention.attend_backward(d_out, query, key, value, out, lse.to(wide), **options)
    for output, plain in zip(actual, expected, strict=True):
        if output.dim() == 4:
            assert output.dtype is dtype
            output = output.transpose(1, 2)
        if dtype is torch.bfloat16:
            assert (output.double() - plain).norm() < compute_roundoff(dtype) * plain.norm()
        else:
            assert_near(output, plain, keys + 2 * WIDTH)


@pytest.mark.parametrize("method", get_args(cpu_attention.AttentionMethod))
@pytest.mark.parametrize(
    ("length", "dtype"),
    [(1024, torch.float32), (512, torch.float32), (64, torch.bfloat16), (1024, torch.float64)],
)
def test_tiles_are_computed_by_the_chosen_method(length, dtype, method, monkeypatch):
    """`attend` uses products exactly if `pays` says so, which the bits of the result show. A choice
    for one size leaves the other as it was."""
    monkeypatch.setattr(cpu_attention, "_method_of", {})
    size = "long" if length == 1024 else "short"
    if method in cpu_attention.list_methods(dtype):
        cpu_attention.use_methods(dtype, {size: method})
    query, kv = torch.randn(1, length, 1, 8), torch.randn(2, 1, length, 1, 8)
    heads_first = [x.to(dtype).transpose(1, 2) for x in (query, *kv)]
    pays = cpu_attention.is_faster(*heads_first[:2])
    assert pays == (method == "blocks" and dtype is not torch.float64)
    other = "short" if size == "long" else "long"
    assert cpu_attention.get_methods_in_use(dtype)[other] == cpu_attention.get_default_method(
        dtype, other
    )
    options = {"causal": True, "scale": SCALE}
    attended, _ = attend(query.to(dtype), *kv.to(dtype), None, **options)
    products, _ = cpu_attention.attend(*heads_first, **options)
    fused, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *heads_first, 0.0, True, scale=SCALE
    )
    assert not torch.equal(products, fused)
    assert torch.equal(attended.transpose(1, 2), products if pays else fused)


def attend_whole(query, key, value, mask, d_out):
    """Return the output and the gradients of plain attention."""
    leaves = [x.clone().requires_grad_() for x in (query, key, value)]
    heads_first = (x.transpose(1, 2) for x in leaves)
    out = F.scaled_dot_product_attention(*heads_first, attn_mask=mask, enable_gqa=True, scale=SCALE)
    out.transpose(1, 2).backward(d_out)
    return out.detach().transpose(1, 2), *(leaf.grad for leaf in leaves)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_ranks_compute_equally_much_and_need_no_mask(ranks):
    """Under a causal mask, a tile is the rank's own triangle or a rectangle of half the square."""
    length = 12
    for rank in range(ranks):
        ring_mask = RingMask(Ring(rank, ranks), length, AttentionMask(None, None), None)
        for peer in range(ranks):
            (tile,) = ring_mask.get_tiles(peer)
            queries, keys = (len(range(*s.indices(length))) for s in (tile.queries, tile.keys))
            assert tile.kind == ("causal" if rank == peer else "all")
            assert queries * keys == length**2 // (1 if rank == peer else 2)


def test_what_nobody_sees_is_not_computed():
    """A window of one piece reaches one piece back; documents of one piece see only themselves."""
    ranks, piece = 4, 3
    numbers = torch.arange(2 * ranks).repeat_interleave(piece).expand(BATCH, -1)
    for rank in range(ranks):
        windowed = RingMask(Ring(rank, ranks), 2 * piece, AttentionMask(piece, None), None)
        ends = find_document_ends(numbers, 2 * piece)
        by_document = RingMask(Ring(rank, ranks), 2 * piece, AttentionMask(None, numbers), ends)
        for peer in range(ranks):
            assert bool(windowed.get_tiles(peer)) == (abs(rank - peer) <= 1)
            assert len(by_document.get_tiles(peer)) == 2 * (rank == peer)


def test_a_microbatch_has_a_ring_mask_for_each_window_and_asks_for_documents_once(monkeypatch):
    """Each question (`tolist`) makes the host wait for the device."""
    tolist_calls, tolist = [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: tolist_calls.append(x) or tolist(x))
    tokens = torch.zeros(BATCH, 8, dtype=torch.int64)
    documents = torch.arange(32).expand(BATCH, -1) // 3
    microbatch = Microbatch(tokens, tokens, torch.arange(BATCH), None, documents)
    setup = LayerSetup(context=ContextParallel(ring=Ring(1, 4)))
    context = make_microbatch_inputs(
        ModelConfig(window=(5, None, 40, 5)), setup, microbatch, torch.float32
    )
    windows = {window: mask.attention_mask.window for window, mask in context.masks.items()}
    assert windows == {5: 5, None: None, 40: None}, "32 tokens are all that 40 would see"
    assert len(tolist_calls) == 1


@pytest.mark.parametrize("way", WAYS)
def test_a_query_that_sees_nothing_of_a_tile_changes_nothing(way):
    generator = torch.Generator().manual_seed(0)
    query, key, value, _ = make_samples(3, False, generator)
    mask = torch.tensor([[True, True, False], [False] * 3, [True] * 3])
    out, lse = WAYS[way][0](query, key, value, mask, causal=False, scale=SCALE)
    assert (lse == -math.inf).tolist() == [[[False, True, False]] * HEADS] * BATCH
    before = torch.randn(out.shape, dtype=torch.float64), torch.randn(lse.shape).double()
    after = tuple(x.clone() for x in before)
    merge(*after, out, lse)
    assert torch.equal(after[0][:, 1], before[0][:, 1])
    assert torch.equal(after[1][..., 1], before[1][..., 1])
    assert not torch.equal(after[0][:, 0], before[0][:, 0])


@given(st.integers(1, 40), st.integers(1, 6))
def test_zigzag_deals_every_token_once_and_equally(length, parts):
    dealt = [divide_zigzag(torch.arange(length), index, parts, -1) for index in range(parts)]
    assert len({len(part) for part in dealt}) == 1
    places = torch.cat(dealt)
    assert places[places >= 0].sort().values.tolist() == list(range(length))
    assert len(places) - length < 2 * parts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_is_merged_in_fp32(dtype):
    generator = torch.Generator().manual_seed(0)
    *heads, _ = make_samples(8, False, generator)
    out, lse = attend(*(head.to(dtype) for head in heads), None, causal=True, scale=SCALE)
    assert out.dtype == dtype and lse.dtype == torch.float32
