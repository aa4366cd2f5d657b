"""Documents whose middle comes last.

Tests `megaframe.data.fill_in_the_middle`.
"""

import numpy as np
import pytest
from config_refusals import list_refusals
from hypothesis import given
from hypothesis import strategies as st
from loader_runs import make_config, take
from token_files import make_counting_documents, write_token_file, write_tokenizer

from megaframe.config.schema import RunConfig
from megaframe.data.fill_in_the_middle import FillInTheMiddle
from megaframe.data.loader import Loader
from megaframe.data.microbatch import IGNORE
from megaframe.errors import UserError

PREFIX, SUFFIX, MIDDLE, EOD = 901, 902, 903, 900
TOKENS = {"prefix": PREFIX, "suffix": SUFFIX, "middle": MIDDLE}


def undo(document):
    """Return the kind of a document, and the document that it was but for three tokens."""
    document = list(document)
    end = [EOD] * (document[-1] == EOD)
    body = document[: len(document) - len(end)]
    if PREFIX not in body:
        return "plain", document
    middle_at, suffix_at = body.index(MIDDLE), body.index(SUFFIX)
    assert body[0] == PREFIX and suffix_at < middle_at
    suffix, rest = body[suffix_at + 1 : middle_at], body[middle_at + 1 :]
    if suffix_at == 1:
        return "either", [*rest, *suffix, *end]
    return "psm", [*body[1:suffix_at], *rest, *suffix, *end]


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=6),
    st.booleans(),
    st.floats(0, 1),
    st.integers(0, 2**62),
)
def test_documents_lose_their_last_three_tokens_and_nothing_else(lengths, ends, spm_rate, number):
    tokens = np.concatenate([np.arange(length) + 50 * n for n, length in enumerate(lengths)])
    starts = np.cumsum([0, *lengths[:-1]])
    begins = np.zeros((1, tokens.size), np.bool_)
    begins[0, starts[1:]] = True
    if ends:
        tokens[np.cumsum(lengths) - 1] = EOD
    changed, weights = tokens[None].copy(), tokens[None] / 8
    fill = FillInTheMiddle(1.0, spm_rate, (PREFIX, SUFFIX, MIDDLE), EOD, 7)
    fill.apply(changed, weights, begins, np.array([number]))
    for start, length in zip(starts, lengths, strict=True):
        before, after = (row[start : start + length].tolist() for row in (tokens, changed[0]))
        kind, undone = undo(after)
        body = length - ends
        if body < 4:
            assert kind == "plain" and undone == before
            continue
        assert undone == [*before[: body - 3], *[EOD] * ends]
        own = weights[0, start : start + length]
        for token, following, weight in zip(after, [*after[1:], None], own, strict=True):
            if token < EOD:
                assert weight == token / 8
            elif token != EOD:  # a special token counts as what it announces
                assert weight * 8 in before
                assert following is None or following >= EOD or weight == following / 8


def test_rates_are_those_of_the_keys():
    fill = FillInTheMiddle(0.7, 0.25, (PREFIX, SUFFIX, MIDDLE), EOD, 3)
    tokens = np.tile(np.arange(64), (4000, 1))
    begins = np.zeros(tokens.shape, np.bool_)
    fill.apply(tokens, None, begins, np.arange(4000))
    kinds = [undo(row)[0] for row in tokens.tolist()]
    changed = len(kinds) - kinds.count("plain")
    # Four standard deviations. A prefix is empty in one of 31 documents by two uniform cuts.
    assert abs(changed - 2800) < 4 * (4000 * 0.7 * 0.3) ** 0.5
    either = changed * (0.25 + 0.75 * 2 / 63)
    assert abs(kinds.count("either") - either) < 4 * (changed * 0.25 * 0.75) ** 0.5


def test_samples_do_not_depend_on_ranks_or_on_a_resume_and_validation_is_plain(tmp_path):
    paths = [
        write_token_file(tmp_path / "code", make_counting_documents([30] * 20)),
        write_token_file(tmp_path / "text", make_counting_documents([30] * 20, 2000)),
    ]
    keys = {"document_ends": 64_999, "tokenizer": None, "packing": "best_fit",
            "reset_attention": True}  # fmt: skip
    config = make_config(paths, train={"seq": 63, "eval_every": 1}, **keys)
    special = {"prefix": 65_001, "suffix": 65_002, "middle": 65_003}
    source = {"path": paths[0], "fim": {**special, "rate": 1}}
    config = RunConfig(**{**config.model_dump(), "data": {
        **config.data.model_dump(), "sources": [source, paths[1]], "document_ends": "index",
        "tokenizer": "bytes"}})  # fmt: skip
    steps = take(Loader(config, 0, 1), 2)
    rows = {
        int(number): (tokens.tolist(), labels.tolist())
        for step in steps
        for m in step.microbatches
        for number, tokens, labels in zip(m.samples_B, m.tokens_BS, m.labels_BS, strict=True)
    }
    code = [tokens for tokens, _ in rows.values() if tokens[0] < 2000 or tokens[0] > 60_000]
    assert 0 < len(code) < len(rows)
    assert all(tokens[0] == 65_001 and tokens[30] in (65_001, 0) for tokens in code)
    assert all(65_001 not in tokens for tokens, _ in rows.values() if tokens not in code)
    for tokens, labels in rows.values():
        pairs = zip(labels, tokens[1:], strict=False)  # the last label is of no input
        assert all(label in (IGNORE, token) for label, token in pairs)
    resumed = Loader(config, 2, 4)
    resumed.load(steps[0].state)
    (second,) = take(resumed, 1)
    for microbatch in second.microbatches:
        assert rows[int(microbatch.samples_B[0])][0] == microbatch.tokens_BS[0].tolist()
    held_out = [batch.microbatch.tokens_BS for batch in resumed.iterate_validation(8)]
    assert held_out and all((tokens < 65_000).all() for tokens in held_out)


def test_tokens_by_name(tmp_path):
    names = ["<|end|>", "<pre>", "<suf>", "<mid>"]
    tokenizer = write_tokenizer(tmp_path, names)
    path = write_token_file(tmp_path / "f", [[[4, 5, 4, 5, 4, 5, 4, 0]]] * 4)

    def read(**fim):
        config = make_config([path], split=(1.0, 0.0, 0.0), tokenizer=f"{tokenizer}?eod=<|end|>")
        source = {"path": path, "fim": {"rate": 1, "middle": "<mid>", **fim}}
        data = {**config.data.model_dump(), "sources": [source]}
        return take(Loader(RunConfig(**{**config.model_dump(), "data": data}), 0, 1), 1)

    (step,) = read(prefix="<pre>", suffix="<suf>")
    tokens = step.microbatches[0].tokens_BS[0].tolist()
    assert tokens[0] == 1 and {2, 3} < set(tokens) and tokens[7] == 0
    with pytest.raises(UserError, match=r"prefix=<PRE>, and data.tokenizer has no such"):
        read(prefix="<PRE>", suffix="<suf>")
    with pytest.raises(UserError, match="the tokens 1, 3 and 3, and documents end with 0"):
        read(prefix="<pre>", suffix="<mid>")


def test_an_id_outside_of_the_vocabulary_is_refused():
    fim = "{prefix: 97, suffix: 98, middle: 100}"
    (line,) = list_refusals(f"data.sources=[{{path: x, fim: {fim}}}]")
    assert "fim.middle=100 is no token of model.vocab=100; use an id of 0 to 99" in line
