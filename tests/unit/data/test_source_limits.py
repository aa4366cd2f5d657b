"""Sources that are used up leave the blend.

Tests `megaframe.data.blend`, `megaframe.data.source_limits` and
`megaframe.data.source_descriptions`.
"""

import json
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from loader_runs import make_config, take
from stream_runs import configure, open_loader, write_corpus

from megaframe.config.schema import RunConfig
from megaframe.data.blend import Blend
from megaframe.data.loader import Loader
from megaframe.data.source_limits import divide_samples
from megaframe.errors import UserError

blends = st.lists(
    st.tuples(st.integers(1, 9), st.none() | st.integers(1, 40)), min_size=1, max_size=5
)


def start(weights):
    """Return a blend with these weights as they are."""
    return Blend(tuple(weights), (0,) * len(weights), (0,) * len(weights))


def take_slowly(weights, limits, size):
    """Take one sample at a time, and begin a new blend whenever a source is used up."""
    given, sources = [0] * len(weights), []
    active, blend = [], None
    for _ in range(size):
        now = [n for n, limit in enumerate(limits) if limit is None or given[n] < limit]
        if now != active:
            active, blend = now, start([weights[n] for n in now])
        (place,), _, blend = blend.take(1)
        sources.append(active[place])
        given[active[place]] += 1
    return sources


# Without a new beginning of the weights, source 1 would come before source 0 after the last of 2.
@example([(1, None), (1, None), (4, 3)], 9, [3, 4])
@given(blends, st.integers(1, 60), st.lists(st.integers(1, 30), max_size=4))
def test_equals_blends_of_those_that_are_left_however_it_is_taken(sources, size, sizes):
    weights, limits = zip(*sources, strict=True)
    if None not in limits:
        size = min(size, sum(limits))
    blend = start(weights)
    taken, numbers, after = blend.take(size, limits)
    assert taken.tolist() == take_slowly(weights, limits, size)
    for source in range(len(weights)):
        own = numbers[taken == source].tolist()
        assert own == list(range(len(own))) and len(own) <= (limits[source] or size)
    parts, part = [], blend
    for count in sizes:
        count = min(count, size - sum(map(len, parts)))
        sources_taken, _, part = part.take(count, limits)
        parts.append(sources_taken)
    rest, _, part = part.take(size - sum(map(len, parts)), limits)
    assert np.concatenate([*parts, rest]).tolist() == taken.tolist() and part == after
    expected = divide_samples(weights, limits, [0] * len(weights), size)
    assert sum(expected) == size
    # Each source that is used up rounds its moment by a sample.
    for count, exact in zip(after.consumed, expected, strict=True):
        assert abs(count - exact) < 1 + len(weights)


def test_more_than_all_sources_have_is_refused_with_both_numbers():
    with pytest.raises(UserError, match="have 5 samples, and the step takes 3 more"):
        Blend.start([1.0, 1.0]).take(8, (2, 3))


def test_numbers_are_divided_exactly():
    given = divide_samples([1, 2, 1], [10, None, None], [0, 0, 0], 100)
    assert given == [10, Fraction(60), Fraction(30)]


def limit(config, *limits):
    """Return the config with `epochs` and `max_tokens` of its sources."""
    sources = [
        {**source.model_dump(), **keys}
        for source, keys in zip(config.data.sources, limits, strict=True)
    ]
    data = {**config.data.model_dump(), "sources": sources}
    return RunConfig(**{**config.model_dump(), "data": data})


def test_a_run_resumes_after_a_source_is_used_up(paths):
    """The sources have 25, 79 and 13 samples of 8 tokens."""
    config = limit(make_config(paths), {"epochs": 0.5}, {"max_tokens": 120}, {})
    whole = Loader(config, 0, 1)
    (line, *_) = whole.describe_sources(10)
    assert line == "epochs of each source by the end: source0 0.48, source1 0.19, source2 4.08"
    steps = take(whole, 10)
    assert whole.consumed == (12, 15, 53)
    for stop in (3, 5, 8):
        resumed = Loader(config, 1, 2)
        resumed.load(json.loads(json.dumps(steps[stop - 1].state)))
        parts = take(resumed, 2)
        for part, step in zip(parts, steps[stop:], strict=False):
            assert part.state == step.state
            assert [m.tokens_BS.tolist() for m in part.microbatches] == [
                m.tokens_BS.tolist() for m in step.microbatches[1::2]
            ]
    longer = Loader(limit(make_config(paths), {}, {"max_tokens": 160}, {}), 0, 1)
    (note,) = longer.load(steps[-1].state)
    assert "changed after sample 80: other epochs or max_tokens" in note
    take(longer, 5)
    assert longer.consumed[1] == 20


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"max_tokens": 7}, r"max_tokens=7 is less than a sample of train.seq=8; use max_tokens=8"),
        ({"epochs": 0.01}, r"epochs=0.01 of 25 samples is less than one; use epochs=0.04 "),
    ],
)
def test_limits_without_a_sample_are_refused(keys, message, paths):
    with pytest.raises(UserError, match=message):
        Loader(limit(make_config(paths), keys, {}, {}), 0, 1)


def test_a_run_of_more_samples_than_there_are_is_refused_before_it_begins(paths):
    loader = Loader(limit(make_config(paths), *[{"epochs": 1}] * 3), 0, 1)
    assert [*loader.describe_sources(14)]
    with pytest.raises(UserError, match=r"takes 120 more samples, and .* leave 117; use fewer"):
        [*loader.describe_sources(15)]


def test_a_stream_leaves_after_its_epochs(tmp_path):
    write_corpus(tmp_path / "corpus", files=1, texts=30)
    write_corpus(tmp_path / "other", files=1, texts=300)
    sources = [{"path": str(tmp_path / "corpus"), "epochs": 2}, str(tmp_path / "other")]
    config = configure(tmp_path, *sources)
    seen = []
    with open_loader(config) as loader:
        while len(seen) < 20 and (len(seen) < 2 or seen[-1][0] > seen[-2][0]):
            step = loader.next()
            seen.append(loader.consumed)
    (used_up, _), (before, after) = seen[-1], (seen[-2][1], seen[-1][1])
    assert used_up % 2 == 0 and after - before == 8
    with open_loader(config, rank=1, ranks=2, state=step.state) as resumed:
        resumed.next()
        assert resumed.consumed == (used_up, after + 8)
    part = configure(tmp_path, {"path": str(tmp_path / "corpus"), "epochs": 1.5})
    with pytest.raises(UserError, match=r"epochs=1.5 of a stream, .* use 2, or max_tokens"):
        Loader(part, 0, 1)
