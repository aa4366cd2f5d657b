"""Documents packed into samples.

Tests `megaframe.data.packing`, `megaframe.data.packed_dataset` and
`megaframe.data.dataset_options`.
"""

from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from config_refusals import list_refusals
from hypothesis import given
from hypothesis import strategies as st
from loader_runs import make_config, take
from stream_runs import configure, take_rows, write_corpus
from token_files import make_counting_documents, write_token_file

from megaframe.data.dataset_options import DatasetOptions
from megaframe.data.gpt_dataset import NoSamples
from megaframe.data.loader import Loader
from megaframe.data.microbatch import IGNORE
from megaframe.data.packing import cut_documents, pack_best_fit
from megaframe.data.streaming.corpus import find_corpus
from megaframe.data.streaming.prepare_blocks import prepare_blocks

ALL = (1.0, 0.0, 0.0)
PACKED = {"packing": "best_fit", "reset_attention": True}


def pack_slowly(sizes, room):
    """Return how many samples best-fit decreasing takes, piece by piece, and the room left."""
    left = []
    for size in sorted(sizes, reverse=True):
        fitting = [sample for sample, space in enumerate(left) if space >= size]
        if not fitting:
            left.append(room)
            fitting = [len(left) - 1]
        left[min(fitting, key=left.__getitem__)] -= size
    return sorted(left)


@given(st.lists(st.integers(1, 24), max_size=120))
def test_equals_best_fit_decreasing_one_piece_at_a_time(sizes):
    samples, count = pack_best_fit(np.array(sizes, np.int64), 24)
    filled = np.bincount(samples, sizes, count).astype(int)
    assert sorted((24 - filled).tolist()) == pack_slowly(sizes, 24)


def test_real_lengths_leave_less_than_a_percent_of_padding():
    # The lengths of texts are about lognormal; the median here is 400 tokens.
    lengths = np.random.default_rng(0).lognormal(6, 1.2, 20_000).astype(np.int64) + 1
    for room in (1025, 8193):
        _, sizes = cut_documents(np.append(0, lengths.cumsum()), room)
        _, count = pack_best_fit(sizes, room)
        assert sizes.sum() <= count * room <= 1.01 * sizes.sum()


documents = st.lists(st.integers(0, 30), min_size=1, max_size=30).filter(any)


@given(documents, st.integers(1, 12), st.booleans())
def test_every_token_is_predicted_once_from_its_own_document(lengths, seq, weighted):
    """All tokens are different; their weights as labels are half of them."""
    with TemporaryDirectory() as folder:
        path = write_token_file(Path(folder) / "f", make_counting_documents(lengths))
        if weighted:
            weights = [[[token / 2 for token in d[0]]] for d in make_counting_documents(lengths)]
            write_token_file(f"{path}.weights", weights, "f4")
        options = DatasetOptions("train", ALL, seq, 1 << 16, None, True, packed=True)
        if max(lengths) < 2:
            with pytest.raises(NoSamples):
                options.open(path)
            return
        source = options.open(path)
        windows = np.arange(source.windows)[::-1]
        tokens, starts = source.read(windows), source.is_document_start(windows)
        read_weights = source.read_label_weights(windows)
    ends = np.cumsum(lengths)
    own = np.repeat(np.arange(len(lengths)), lengths)
    firsts = {int(end - length) for end, length in zip(ends, lengths, strict=True) if length}
    labels = tokens[:, 1:][~starts[:, 1:]]
    assert Counter(labels.tolist()) == Counter({*range(ends[-1])} - firsts)
    for row, column in np.argwhere(~starts):
        token = int(tokens[row, column])
        assert token == tokens[row, column - 1] + 1 and own[token] == own[token - 1]
        if read_weights is not None:
            assert read_weights[row, column] == token / 2
    row_of = dict(zip(labels.tolist(), np.argwhere(~starts[:, 1:])[:, 0].tolist(), strict=True))
    for first in firsts:
        length = lengths[own[first]]
        if length <= seq + 1:  # it is not cut
            assert len({row_of[token] for token in range(first + 1, first + length)}) <= 1
    most = seq / (seq + 1)  # of a row that has one token
    assert 0 <= source.measure_padding() <= most


def test_padding_has_no_label_and_sees_nothing(tmp_path):
    path = write_token_file(tmp_path / "f", [[[9, 8, 7]], [[6, 5]], [[4] * 6]])
    config = make_config([path], train={"seq": 6, "global_batch": 2}, split=ALL, **PACKED,
                         reset_positions=True)  # fmt: skip
    (step,) = take(Loader(config, 0, 1), 1)
    rows = {}
    for microbatch in step.microbatches:
        rows[int(microbatch.tokens_BS[0, 0])] = [
            tensor[0].tolist()
            for tensor in (
                microbatch.tokens_BS,
                microbatch.labels_BS,
                microbatch.documents_BS,
                microbatch.positions_BS,
            )
        ]
    assert rows[9] == [
        [9, 8, 7, 6, 5, 0],
        [8, 7, IGNORE, 5, IGNORE, IGNORE],
        [1, 1, 1, 2, 2, 3],
        [0, 1, 2, 0, 1, 0],
    ]
    assert rows[4][1] == [4] * 5 + [IGNORE] and step.valid == 8


def test_a_damaged_token_is_named_by_its_place_in_the_file(tmp_path):
    path = write_token_file(tmp_path / "f", [[[1, 1]], [[2, 2, 2]], [[3, 99, 3, 3]]])
    source = DatasetOptions("train", ALL, 5, 50, None, True, packed=True).open(path)
    with pytest.raises(Exception, match="token 6 is 99"):
        source.read(np.arange(source.windows))


def test_a_stream_is_packed_block_by_block_as_beforehand(tmp_path):
    """With documents whose middle comes last."""
    write_corpus(tmp_path / "corpus", files=1)
    fim = {"rate": 1, "prefix": 300, "suffix": 301, "middle": 302}
    source = {"path": str(tmp_path / "corpus"), "fim": fim}
    config = configure(tmp_path, source, **PACKED)
    prepare_blocks(
        find_corpus(config.data.sources[0], config.data), str(tmp_path / "blocks" / "corpus"), 1
    )
    streamed, _ = take_rows(config, 2)
    beforehand = {**source, "path": str(tmp_path / "blocks" / "corpus")}
    blocks = configure(tmp_path, beforehand, **PACKED)
    assert streamed == take_rows(blocks, 2)[0]
    assert all(300 in tokens for _, tokens in streamed)
    _, state = take_rows(blocks, 1)
    (step,) = take(Loader(blocks, 0, 1), 1)
    assert 0.98 < step.valid / (8 * 256) < 1
    assert take_rows(blocks, 1, rank=1, ranks=2, state=state)[0] == [
        row for row in streamed if row[0] >= 8 and row[0] % 2
    ]


def test_packing_without_document_attention_is_refused():
    (line,) = list_refusals("data.packing=best_fit")
    assert "use data.reset_attention=true, or data.packing=none" in line
    assert list_refusals("data.packing=best_fit", "data.reset_attention=true") == []
