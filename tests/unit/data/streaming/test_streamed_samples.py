"""Samples of a corpus that is tokenised while a run trains: which they are, and that nothing else
changes them: workers, ranks, a resume, or blocks that were made beforehand.

The modules: megaframe.data.streaming.open_streams, megaframe.data.streaming.streamed_dataset,
megaframe.data.streaming.stream_reader.
"""

import gzip
from itertools import islice

import numpy as np
import pytest
from slow_cases import slow
from stream_runs import (
    BATCH,
    BLOCK,
    SEQ,
    configure,
    encode,
    list_rows,
    make_texts,
    open_loader,
    take_rows,
    watch_size,
    write_corpus,
    write_lines,
)
from token_files import make_counting_documents, write_token_file

from megaframe.data.shuffle import derive_source_key, sample_indices
from megaframe.data.streaming.corpus import find_corpus
from megaframe.data.streaming.prepare_blocks import prepare_blocks
from megaframe.errors import UserError


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("streams") / "corpus"
    write_corpus(folder)
    return folder


@pytest.fixture(scope="module")
def reference(corpus, tmp_path_factory):
    """Return the rows of sixty steps of one rank and one worker, and the state after them."""
    return take_rows(configure(tmp_path_factory.mktemp("reference"), corpus), 60)


def cut_by_hand(path, block_bytes=BLOCK):
    """Return the texts of each block of a file of JSON lines: the lines that begin within it."""
    import json

    blocks, place = {}, 0
    for line in path.read_bytes().splitlines(keepends=True):
        blocks.setdefault(place // block_bytes, []).append(json.loads(line)["text"])
        place += len(line)
    return [blocks[number] for number in sorted(blocks)]


def list_expected(folder, seed, share):
    """Yield the tokens of every sample of the first epoch, in order, from the rule alone."""
    files = sorted(folder.iterdir())
    order = sample_indices(np.arange(len(files)), len(files), derive_source_key(seed, folder.name))
    for shard in order.tolist():
        for number, texts in enumerate(cut_by_hand(files[shard])):
            tokens = encode(texts[: round(len(texts) * share)])
            windows = (len(tokens) - 1) // SEQ
            key = derive_source_key(seed, f"{folder.name}\0{0}\0{shard}\0{number}")
            for window in sample_indices(np.arange(windows), windows, key).tolist():
                yield tuple(tokens[window * SEQ : (window + 1) * SEQ].tolist())


class TestOrder:
    def test_samples_are_those_of_the_rule(self, corpus, reference):
        expected = list_expected(corpus, seed=1, share=0.9)
        rows, _ = reference
        assert [tokens for _, tokens in rows] == [next(expected) for _ in range(60 * BATCH)]

    def test_each_epoch_has_every_sample_once_in_another_order(self, corpus, tmp_path):
        expected = sorted(list_expected(corpus, seed=1, share=0.9))
        steps = -(-2 * len(expected) // BATCH)
        rows, state = take_rows(configure(tmp_path, corpus), steps)
        tokens = [row for _, row in rows]
        first, second = tokens[: len(expected)], tokens[len(expected) : 2 * len(expected)]
        assert sorted(first) == sorted(second) == expected
        assert first != second
        block = set(islice(list_expected(corpus, seed=1, share=0.9), 100))
        orders = [[row for row in epoch if row in block] for epoch in (first, second)]
        assert sorted(orders[0]) == sorted(orders[1]) and orders[0] != orders[1]
        assert state["streams"][str(corpus)][0] in (1, 2)

    @pytest.mark.slow
    def test_another_seed_gives_another_order(self, corpus, tmp_path, reference):
        rows, _ = take_rows(configure(tmp_path, corpus, seed=2), 5)
        assert rows != reference[0][: len(rows)]

    def test_small_files_are_put_together_and_large_ones_cut(self, tmp_path):
        for number in range(40):
            write_lines(tmp_path / "small" / f"{number:02}.jsonl", make_texts(20, seed=number))
        source = configure(tmp_path, tmp_path / "small").data
        shards = find_corpus(source.sources[0], source).list_shards()
        sizes = [sum(size for _, size in files) for files in shards]
        assert 1 < len(shards) < 40
        assert all(size >= BLOCK for size in sizes[:-1])
        names = [name for files in shards for name, _ in files]
        assert names == sorted(names) and len(names) == 40


class TestSameSamples:
    @pytest.mark.parametrize("workers", [3])
    def test_with_any_number_of_workers(self, workers, corpus, reference, tmp_path):
        config = configure(tmp_path, corpus, streaming={"workers": workers})
        assert take_rows(config, 60) == reference

    @pytest.mark.parametrize("ranks", [2, slow(4), slow(8)])
    def test_on_any_number_of_ranks(self, ranks, corpus, reference, tmp_path):
        config = configure(tmp_path, corpus)
        found = [take_rows(config, 20, rank, ranks) for rank in range(ranks)]
        whole = sorted(row for rows, _ in found for row in rows)
        assert whole == reference[0][: 20 * BATCH]
        assert all(state == found[0][1] for _, state in found)

    def test_ranks_that_read_at_the_same_time_share_a_cache(self, corpus, reference, tmp_path):
        config = configure(tmp_path, corpus, prefetch=2)
        with open_loader(config, 0, 2) as one, open_loader(config, 1, 2) as other:
            rows = [
                row for _ in range(30) for each in (one, other) for row in list_rows(each.next())
            ]
        assert sorted(rows) == reference[0][: 30 * BATCH]

    @pytest.mark.parametrize("step", [7, slow(1), slow(59)])
    def test_after_a_resume_with_another_cache(self, step, corpus, reference, tmp_path):
        rows, state = take_rows(configure(tmp_path / "before", corpus), step)
        place = state["streams"][str(corpus)]
        assert len(place) == 4 and all(type(number) is int for number in place)
        after, end = take_rows(configure(tmp_path / "after", corpus), 60 - step, state=state)
        assert (rows + after, end) == reference

    @pytest.mark.slow
    def test_a_loader_goes_back(self, corpus, reference, tmp_path):
        with open_loader(configure(tmp_path, corpus, prefetch=1)) as loader:
            states = [loader.next().state for _ in range(40)]
            loader.load(states[2])
            rows = list_rows(loader.next())
        assert rows == reference[0][3 * BATCH : 4 * BATCH]

    def test_from_blocks_made_beforehand_and_in_the_middle_of_a_run(
        self, corpus, reference, tmp_path
    ):
        config = configure(tmp_path, corpus)
        found = find_corpus(config.data.sources[0], config.data)
        blocks = tmp_path / "blocks" / corpus.name
        counts = prepare_blocks(found, str(blocks), workers=1)
        assert counts.documents == sum(900 + 50 * n for n in range(5))
        rows, state = take_rows(config, 11)
        after, end = take_rows(configure(tmp_path / "after", blocks), 49, state=state)
        assert rows + after == reference[0]
        assert list(end["streams"].values()) == list(reference[1]["streams"].values())
        assert not (tmp_path / "after" / "cache").exists()

    @pytest.mark.parametrize("how", ["gz", slow("parquet"), slow("zst")])
    def test_of_other_files(self, how, corpus, tmp_path):
        """Cuts of compressed files differ from those of plain ones; whole blocks do not."""
        folder = tmp_path / corpus.name
        folder.mkdir()
        texts = make_texts(150, seed=3)
        write_lines(tmp_path / "plain" / corpus.name / "a.jsonl", texts)
        content = (tmp_path / "plain" / corpus.name / "a.jsonl").read_bytes()
        if how == "gz":
            (folder / "a.jsonl.gz").write_bytes(gzip.compress(content))
        elif how == "zst":
            import zstandard

            (folder / "a.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(content))
        else:
            import pyarrow
            import pyarrow.parquet

            table = pyarrow.table({"text": texts})
            pyarrow.parquet.write_table(table, folder / "a.parquet", row_group_size=40)
        plain, _ = take_rows(configure(tmp_path / "one", tmp_path / "plain" / corpus.name), 20)
        assert take_rows(configure(tmp_path / "other", folder), 20)[0] == plain


class TestOtherSources:
    def test_a_source_that_comes_back_continues_in_its_block(self, corpus, tmp_path):
        write_lines(tmp_path / "more" / "a.jsonl", make_texts(400, seed=9))
        both = configure(tmp_path, corpus, tmp_path / "more")
        _, state = take_rows(both, 120)
        place = state["streams"][str(corpus)]
        assert place[1:3] != [0, 0]
        _, without = take_rows(configure(tmp_path, tmp_path / "more"), 3, state=state)
        assert without["streams"][str(corpus)] == place
        after, _ = take_rows(configure(tmp_path, corpus), 4, state=without)
        expected = islice(list_expected(corpus, seed=1, share=0.9), 480, 512)
        assert [tokens for _, tokens in after] == list(expected)

    def test_longer_samples_continue_in_the_same_block(self, corpus, tmp_path):
        config = configure(tmp_path, corpus)
        _, state = take_rows(config, 60)
        longer = config.replace(train={"seq": 3 * SEQ})
        with open_loader(longer) as loader:
            loader.load(state, SEQ)
            after = loader.next().state
        path = str(corpus)
        assert after["streams"][path][:3] == state["streams"][path][:3]
        assert after["streams"][path][3] == state["streams"][path][3] // 3
        assert after["consumed"][path] == 480 // 3 + BATCH


class TestBlend:
    def test_streams_and_token_files_are_blended(self, corpus, tmp_path):
        tokens = write_token_file(tmp_path / "counted", make_counting_documents([20] * 250))
        weights = [{"path": str(corpus), "weight": 1.0}, {"path": tokens, "weight": 3.0}]
        config = configure(tmp_path, *weights).replace(model={"vocab": 65536})
        rows, state = take_rows(config, 10)
        assert state["consumed"] == {str(corpus): 20, tokens: 60}
        alone, _ = take_rows(configure(tmp_path / "alone", corpus), 3)
        from_stream = [tokens for _, tokens in rows if tokens not in self.list_counted(250 * 20)]
        assert from_stream == [tokens for _, tokens in alone][:20]

    def list_counted(self, count):
        starts = range(0, count - SEQ, SEQ)
        return {tuple(range(start, start + SEQ)) for start in starts}


class TestHeldOut:
    def list_validation(self, config, rank=0, ranks=1, samples=40):
        with open_loader(config, rank, ranks) as loader:
            first = self.collect(loader, samples)
            loader.next()
            assert self.collect(loader, samples) == first
            return first

    def collect(self, loader, samples):
        return [
            tuple(tokens.tolist())
            for batch in loader.iterate_validation(samples)
            for tokens, labels in zip(
                batch.microbatch.tokens_BS, batch.microbatch.labels_BS, strict=True
            )
            if (labels >= 0).any()
        ]

    def test_validation_has_what_training_never_sees(self, corpus, tmp_path):
        config = configure(tmp_path, corpus)
        held_out = self.list_validation(config)
        assert len(held_out) == 40
        trained = set(list_expected(corpus, seed=1, share=0.9))
        assert not trained & set(held_out)

    @pytest.mark.slow
    def test_it_is_the_same_on_any_number_of_ranks(self, corpus, tmp_path):
        alone = self.list_validation(configure(tmp_path, corpus))
        shares = [self.list_validation(configure(tmp_path, corpus), r, 2) for r in range(2)]
        assert sorted(shares[0] + shares[1]) == sorted(alone)

    @pytest.mark.slow
    def test_it_ends_with_the_first_epoch(self, tmp_path):
        write_lines(tmp_path / "few" / "a.jsonl", make_texts(60))
        config = configure(tmp_path, tmp_path / "few")
        held_out = self.list_validation(config, samples=10_000)
        texts = make_texts(60)[54:]
        assert len(held_out) == (len(encode(texts)) - 1) // SEQ


class TestBound:
    @pytest.mark.parametrize("limit", [260_000, slow(150_000), slow(1_000_000)])
    def test_the_cache_never_exceeds_it(self, limit, corpus, reference, tmp_path):
        config = configure(
            tmp_path, corpus, streaming={"cache_bytes": limit, "workers": 2}, prefetch=1
        )
        with watch_size(tmp_path / "cache") as sizes:
            assert take_rows(config, 60)[0] == reference[0]
            take_rows(config, 400)
        # Beside blocks the folder has what readers need and what the corpus is.
        assert 0 < max(sizes) <= limit + 8192

    def test_a_bound_without_room_for_a_block_says_so(self, corpus, tmp_path):
        config = configure(tmp_path, corpus, streaming={"cache_bytes": 20_000})
        with pytest.raises(UserError, match=r"cache_bytes=20,000 has no room for a block .* of"):
            take_rows(config, 1)

    @pytest.mark.slow
    def test_evaluation_and_training_share_a_small_one(self, corpus, tmp_path):
        config = configure(tmp_path, corpus, streaming={"cache_bytes": 300_000})
        with watch_size(tmp_path / "cache") as sizes, open_loader(config) as loader:
            for _ in range(3):
                for _ in range(50):
                    loader.next()
                assert len(list(loader.iterate_validation(60))) == 60
        assert max(sizes) <= 300_000 + 8192


class TestMessages:
    def test_text_takes_a_tokenizer(self, corpus, tmp_path):
        with pytest.raises(UserError, match=r"takes a tokenizer; name it: data.tokenizer="):
            take_rows(configure(tmp_path, corpus, tokenizer=None), 1)

    def test_a_corpus_without_a_sample_says_so(self, tmp_path):
        write_lines(tmp_path / "short" / "a.jsonl", ["a", "b"])
        with pytest.raises(UserError, match=r"has no sample of train.seq=256: its 1 shards"):
            take_rows(configure(tmp_path, tmp_path / "short"), 1)

    def test_a_damaged_place_is_refused(self, corpus, tmp_path, reference):
        for place in ([1, 2], [0, 0, 0, -1], "here", None):
            state = {**reference[1], "streams": {str(corpus): place}}
            with pytest.raises(UserError, match="data state of the checkpoint is damaged"):
                take_rows(configure(tmp_path, corpus), 1, state=state)

    def test_broken_rows_are_named_and_left_out_only_if_asked(self, tmp_path):
        path = tmp_path / "rows" / "a.jsonl"
        write_lines(path, make_texts(300))
        lines = path.read_bytes().splitlines(keepends=True)
        lines[4:4] = [b'{"text": 5}\n', b"{\n", b'{"other": "x"}\n', b'{"text": "\xff"}\n']
        path.write_bytes(b"".join(lines))
        with pytest.raises(UserError, match=r"a.jsonl:5: key 'text' holds a number.*skip_broken"):
            take_rows(configure(tmp_path / "strict", path.parent), 1)
        whole = tmp_path / "whole" / "rows" / "a.jsonl"
        write_lines(whole, make_texts(300))
        config = configure(tmp_path / "lax", path.parent, streaming={"skip_broken": True})
        with open_loader(config) as loader:
            rows = [row for _ in range(20) for row in list_rows(loader.next())]
            notes = loader.take_notes()
            assert not loader.take_notes()
        assert rows == take_rows(configure(tmp_path / "other", whole.parent), 20)[0]
        assert len(notes) == 1 and "4 rows that cannot be used are left out" in notes[0]
        assert all(f"a.jsonl:{number}: " in notes[0] for number in (5, 6, 7))
