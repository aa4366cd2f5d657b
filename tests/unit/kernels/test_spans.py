"""Spans, compared with explicit masks."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_exactness import DEVICE
from kernel_exactness import make_generator as generator_of
from megaframe_kernels.attention.spans import find_spans


@given(
    seed=st.integers(0, 10**6),
    queries=st.integers(0, 12),
    keys=st.integers(1, 12),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 8),
    documents=st.booleans(),
)
def test_spans_are_the_mask_from_both_sides(seed, queries, keys, causal, window, documents):
    generator = generator_of(seed)

    def ascending(*shape):
        drawn = torch.randint(0, 9, shape, generator=generator, device="cpu")
        return drawn.sort(-1).values.to(DEVICE)

    places = {"query_places": ascending(queries), "key_places": ascending(keys)}
    numbers = {}
    if documents:
        numbers = {
            "query_documents": ascending(2, queries) // 3,
            "key_documents": ascending(2, keys) // 3,
        }
    spans = find_spans(2, queries, keys, DEVICE, causal=causal, window=window, **places, **numbers)
    apart = places["query_places"][:, None] - places["key_places"]
    visible = torch.ones(2, queries, keys, dtype=torch.bool)
    if causal:
        visible &= apart >= 0
    if window is not None:
        visible &= apart < window
    if documents:
        visible &= numbers["query_documents"][:, :, None] == numbers["key_documents"][:, None]
    assert torch.equal(spans.mask(), visible)
    query = torch.arange(queries)[:, None]
    from_keys = (query >= spans.first[:, None]) & (query < spans.last[:, None])
    assert torch.equal(from_keys, visible)
    assert not spans.plain


def test_plain_spans():
    assert find_spans(1, 4, 4, DEVICE).plain
    assert find_spans(1, 4, 4, DEVICE, window=2).plain
    assert not find_spans(1, 3, 4, DEVICE).plain
    assert not find_spans(1, 4, 4, DEVICE, causal=False).plain
