"""Context ranks that can share a layer's heads: refusals suggest values that work."""

import pytest
from config_refusals import list_refusals_of_ranks

# (context ranks that are refused, the message, changes that it suggests, each of which
# must pass)
EXCHANGE = {"parallel.context_kind": "all_to_all"}
NESTED = {"parallel.context_kind": "nested"}
RANKS = [
    (
        {**EXCHANGE, "parallel.context": 5},
        "parallel.context=5 of parallel.context_kind=all_to_all can neither divide nor evenly "
        "share model.kv_heads=12 with model.heads=12; use 4 or 6, or parallel.context_kind=ring",
        [{"parallel.context": 4}, {"parallel.context": 6}, {"parallel.context_kind": "ring"}],
    ),
    (
        {**EXCHANGE, "parallel.context": 4, "parallel.tensor": 4},
        "model.heads=12 on each of parallel.tensor=4; use 3, or parallel.context_kind=ring",
        [{"parallel.context": 3}, {"parallel.context_kind": "ring"}],
    ),
    (
        {**NESTED, "parallel.context": 4},
        "parallel.context_heads=left out does not divide parallel.context=4 into a ring of more "
        "than one group of more than one rank, as parallel.context_kind=nested needs; use "
        "parallel.context_heads=2, or parallel.context_kind=ring or all_to_all",
        [{"parallel.context_heads": 2}, {"parallel.context_kind": "ring"}, EXCHANGE],
    ),
    (
        {**NESTED, "parallel.context": 12, "parallel.context_heads": 5},
        "parallel.context_heads=5 does not divide parallel.context=12",
        [{"parallel.context_heads": 4}, {"parallel.context_heads": 6}],
    ),
    (
        {**NESTED, "parallel.context": 5, "parallel.context_heads": 5},
        "no number does; use parallel.context_kind=ring",
        [{"parallel.context_kind": "ring", "parallel.context_heads": "null"}],
    ),
    (
        {**NESTED, "parallel.context": 16, "parallel.context_heads": 8},
        "parallel.context_heads=8 can neither divide nor evenly share model.kv_heads=12 with "
        "model.heads=12; use 4, or parallel.context_kind=ring",
        [{"parallel.context_heads": 4}],
    ),
    (
        {"parallel.context": 4, "parallel.context_heads": 2},
        "parallel.context_heads=2 has no effect with parallel.context_kind=ring; leave it out, or "
        "use parallel.context_kind=nested",
        [{"parallel.context_heads": "null"}, NESTED],
    ),
]


@pytest.mark.parametrize(("keys", "message", "mends"), RANKS)
def test_ranks_that_cannot_be_are_refused_and_the_advice_works(keys, message, mends):
    lines = list_refusals_of_ranks(keys)
    assert len(lines) == 1 and message in lines[0]
    for mend in mends:
        assert list_refusals_of_ranks({**keys, **mend}) == []
