"""Which block is made next and which one makes room, against the rules in words, for random readers
and caches. Modules: megaframe.data.streaming.plan_blocks, megaframe.data.streaming.block_files,
megaframe.data.streaming.block_parts.
"""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stream_runs import BLOCK, configure, encode, make_texts, write_lines

from megaframe.data.indexed_dataset import IndexedDataset
from megaframe.data.preprocessing.corpus_files import CorpusFormat, InputError
from megaframe.data.streaming import block_parts
from megaframe.data.streaming.block_cache import Demand
from megaframe.data.streaming.block_files import BlockInfo, read_info, write_info
from megaframe.data.streaming.corpus import (
    Block,
    Corpus,
    Position,
    StreamOrder,
    find_corpus,
    parse_description,
    write_description,
)
from megaframe.data.streaming.plan_blocks import UNNEEDED, StoredBlock, choose_victim, rank_blocks
from megaframe.data.streaming.prepare_blocks import prepare_blocks
from megaframe.data.token_file_record import TokenizerRecord
from megaframe.errors import UserError

SHARDS = st.lists(st.integers(1, 4), min_size=1, max_size=6)
"""Blocks of each shard."""


def make_corpus(shards):
    files = tuple((f"{n}.jsonl", BLOCK) for n in range(len(shards)))
    record = TokenizerRecord("bytes", "bytes")
    return Corpus("root", "root", "text", files, CorpusFormat(), record, 256, BLOCK)


def list_order(order, shards, count):
    """Return the first blocks of an order, in it."""
    blocks, position = [], Position(0, 0, 0)
    for _ in range(count):
        blocks.append((position, order.find_block(position)))
        last = blocks[-1][1].number + 1 == shards[blocks[-1][1].shard]
        position = order.find_next(position, is_last=last)
    return blocks


class TestRanks:
    @settings(max_examples=60, deadline=None)
    @given(SHARDS, st.data())
    def test_blocks_are_ranked_by_when_they_are_needed(self, shards, data):
        order = StreamOrder(make_corpus(shards), data.draw(st.integers(0, 3)))
        blocks = list_order(order, shards, 2 * sum(shards))
        at = data.draw(st.integers(0, sum(shards) - 1))
        there = data.draw(st.sets(st.sampled_from([block for _, block in blocks])))
        stored = {
            ("d", block): StoredBlock(1, block.number + 1 == shards[block.shard]) for block in there
        }
        position = blocks[at][0]
        demand = Demand("d", 0, position, position, reads_ahead=True)
        ranked = rank_blocks([demand], stored, lambda digest, seed: order, 10**9)
        following = [block for _, block in blocks[at:]]
        reached = []
        for block in following[: sum(shards)]:
            if block in reached:
                break  # the whole corpus is there
            reached.append(block)
            if block not in there:
                break
        assert [ranked.ranks["d", block] for block in reached] == list(range(len(reached)))
        assert len(ranked.ranks) == len(reached)
        missing = [("d", block) for block in reached if block not in there]
        assert list(ranked.missing) == missing

    def test_one_that_a_reader_waits_for_comes_first(self):
        shards = [3, 3]
        order = StreamOrder(make_corpus(shards), 0)
        blocks = list_order(order, shards, 6)
        stored = {("d", block): StoredBlock(10, block.number == 2) for _, block in blocks[:3]}
        start = blocks[0][0]
        ahead = Demand("d", 0, start, start, reads_ahead=True)
        waiting = Demand("d", 0, start, blocks[4][0], reads_ahead=False)
        ranked = rank_blocks([ahead, waiting], stored, lambda digest, seed: order, 1000)
        assert list(ranked.missing) == [("d", blocks[4][1]), ("d", blocks[3][1])]
        assert choose_victim(ranked.ranks, stored, 0) == ("d", blocks[2][1])

    def test_a_reader_looks_no_further_ahead_than_there_is_room(self):
        shards = [9]
        order = StreamOrder(make_corpus(shards), 0)
        blocks = list_order(order, shards, 9)
        stored = {("d", block): StoredBlock(10, False) for _, block in blocks[:8]}
        start = blocks[0][0]
        demand = Demand("d", 0, start, start, reads_ahead=True)
        ranked = rank_blocks([demand], stored, lambda digest, seed: order, 35)
        assert len(ranked.ranks) == 4 and not ranked.missing

    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.integers(0, 4), max_size=4), st.integers(0, 1), st.integers(0, 4))
    def test_no_block_makes_room_for_one_that_is_needed_less(self, ranks, unneeded, rank):
        blocks = len(ranks) + unneeded
        stored = {("d", Block(n, 0)): StoredBlock(1, True) for n in range(blocks)}
        ranked = {("d", Block(n, 0)): value for n, value in enumerate(ranks)}
        victim = choose_victim(ranked, stored, rank)
        worst = max((ranked.get(key, UNNEEDED) for key in stored), default=0)
        assert (victim is None) == (worst <= rank)
        assert victim is None or ranked.get(victim, UNNEEDED) == worst


class TestBlocks:
    @pytest.mark.parametrize("part_bytes", [1 << 12, 1 << 22])
    def test_blocks_do_not_depend_on_their_parts(self, part_bytes, tmp_path, monkeypatch):
        """Plain files only: of others a part is what is cut at once, which must not change."""
        monkeypatch.setattr(block_parts, "PART_BYTES", part_bytes)
        texts = make_texts(700)
        write_lines(tmp_path / "corpus" / "a.jsonl", texts)
        data = configure(tmp_path, tmp_path / "corpus").data
        corpus = find_corpus(data.sources[0], data)
        prepare_blocks(corpus, str(tmp_path / "blocks"))
        files = sorted((tmp_path / "blocks").glob("*.bin"))
        tokens = [IndexedDataset(str(path)[:-4]).tokens for path in files]
        assert len(files) > 1
        assert (np.concatenate(tokens) == encode(texts)).all()

    def test_an_interrupted_call_continues(self, tmp_path):
        texts = make_texts(900)
        write_lines(tmp_path / "corpus" / "a.jsonl", texts)
        data = configure(tmp_path, tmp_path / "corpus").data
        corpus = find_corpus(data.sources[0], data)

        def stop(done):
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            prepare_blocks(corpus, str(tmp_path / "blocks"), report=stop)
        counts = prepare_blocks(corpus, str(tmp_path / "blocks"))
        assert 0 < counts.documents < 900
        prepare_blocks(corpus, str(tmp_path / "whole"))
        names = sorted(path.name for path in (tmp_path / "whole").iterdir())
        assert names == sorted(path.name for path in (tmp_path / "blocks").iterdir())
        for name in names:
            both = [(tmp_path / folder / name).read_bytes() for folder in ("whole", "blocks")]
            assert both[0] == both[1]

    def test_a_folder_of_something_else_is_refused(self, tmp_path):
        write_lines(tmp_path / "corpus" / "a.jsonl", make_texts(9))
        data = configure(tmp_path, tmp_path / "corpus").data
        corpus = find_corpus(data.sources[0], data)
        with pytest.raises(UserError, match=r"holds 'a.jsonl' and is not the begun folder"):
            prepare_blocks(corpus, str(tmp_path / "corpus"))

    def test_a_shard_without_a_document_is_a_block(self, tmp_path):
        (tmp_path / "corpus").mkdir()
        (tmp_path / "corpus" / "a.jsonl").write_text("\n\n")
        data = configure(tmp_path, tmp_path / "corpus").data
        prepare_blocks(find_corpus(data.sources[0], data), str(tmp_path / "blocks"))
        info = read_info(str(tmp_path / "blocks" / "00000000-00000000"))
        assert info == BlockInfo(is_last=True, is_empty=True)


class TestDescriptions:
    def test_they_come_back_as_they_were(self, tmp_path):
        corpus = make_corpus([1, 2])
        assert parse_description(write_description(corpus)) == corpus
        moved = parse_description(write_description(corpus), "elsewhere")
        assert (moved.root, moved.kind, moved.name) == ("elsewhere", "blocks", "root")
        assert moved.compute_digest() == corpus.compute_digest()
        info = BlockInfo(True, False, 3, 4, 5, 6, ("a:1: x",))
        write_info(str(tmp_path / "b"), info)
        assert read_info(str(tmp_path / "b")) == info

    @pytest.mark.parametrize(
        "change",
        [
            {"version": 2},
            {"kind": "other"},
            {"files": [["../a", 1]]},
            {"files": [["a", -1]]},
            {"files": [["a", 1.5]]},
            {"files": 3},
            {"name": None},
            {"tokenizer": {"name": "bytes"}},
            {"more": 1},
        ],
    )
    def test_damaged_ones_are_refused(self, change, tmp_path):
        described = {**json.loads(write_description(make_corpus([1]))), **change}
        with pytest.raises(ValueError):
            parse_description(json.dumps(described).encode())
        (tmp_path / "blocks").mkdir()
        (tmp_path / "blocks" / "stream.json").write_text(json.dumps(described))
        data = configure(tmp_path, tmp_path / "blocks").data
        with pytest.raises(UserError, match=r"stream.json describes no blocks"):
            find_corpus(data.sources[0], data)

    @pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"is_last": 1}', b"\xff"])
    def test_damaged_blocks_are_named(self, content, tmp_path):
        (tmp_path / "b.json").write_bytes(content)
        with pytest.raises(InputError, match=r"b.json does not say what is in a block"):
            read_info(str(tmp_path / "b"))
