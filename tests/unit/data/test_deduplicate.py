"""Documents with the same tokens are kept once.

Tests `megaframe.data.preprocessing.deduplicate`.
"""

import json
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from preprocess_runs import decode_documents

from megaframe.data.preprocessing import deduplicate, preprocess
from megaframe.data.preprocessing.corpus_files import CorpusFile, CorpusFormat
from megaframe.data.preprocessing.deduplicate import DigestTable
from megaframe.data.preprocessing.preprocess import PreprocessJob


@given(st.lists(st.lists(st.integers(0, 40)), max_size=8))
def test_a_table_is_a_set(batches):
    """Hashes that want the same slots, the pair of zeros among them, and growth."""
    table, seen = DigestTable(), {(0, 1)}
    table._slots = np.zeros((4, 2), np.uint64)
    table.add(np.array([[0, 1]], np.uint64))
    for batch in batches:
        pairs = [(4 * (n % 5), n) for n in batch]
        is_new = table.add(np.array(pairs, np.uint64).reshape(-1, 2))
        for pair, new in zip(pairs, is_new.tolist(), strict=True):
            stored = pair if any(pair) else (1, 1)
            assert new == (stored not in seen)
            seen.add(stored)
    assert table.count == len(seen) and 3 * table.count <= 2 * len(table._slots)


def write_texts(folder):
    """Write two files with few different texts; return the files, and each text once in order."""
    draw = random.Random(3)
    choices = [f"text {draw.random()} " * draw.randint(1, 4) for _ in range(60)]
    texts = [[draw.choice(choices) for _ in range(150)] for _ in range(2)]
    files = []
    for name, lines in zip("ab", texts, strict=True):
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in lines))
        files.append(CorpusFile(str(path), CorpusFormat()))
    return tuple(files), list(dict.fromkeys(texts[0] + texts[1]))


def read_bytes(prefix):
    return [
        prefix.with_name(prefix.name + end).read_bytes() for end in (".bin", ".idx", ".tokens.json")
    ]


def test_the_first_is_kept_whatever_the_workers_and_after_an_interruption(
    tmp_path, small_parts, monkeypatch
):
    files, kept = write_texts(tmp_path)

    def run(name, workers=1, **options):
        job = PreprocessJob(files, "bytes", str(tmp_path / name), deduplicate=True)
        return preprocess.preprocess(job, workers, **options)

    def stop(done, disk_bytes):
        if done.disk_bytes > disk_bytes / 2:
            raise KeyboardInterrupt

    result = run("one")
    assert decode_documents(tmp_path / "one") == kept
    assert result.total.documents == len(kept) and result.total.duplicates == 300 - len(kept)
    record = json.loads((tmp_path / "one.tokens.json").read_text())
    assert record["duplicates"] == 300 - len(kept)
    run("two", workers=2)
    monkeypatch.setattr(preprocess, "_BATCH", 1000)
    with pytest.raises(KeyboardInterrupt):
        run("again", report=stop)
    assert 0 < run("again").resumed.duplicates < 300 - len(kept)
    assert read_bytes(tmp_path / "one") == read_bytes(tmp_path / "two")
    assert read_bytes(tmp_path / "one") == read_bytes(tmp_path / "again")


def test_a_document_takes_at_most_72_bytes():
    table, draw = DigestTable(), np.random.default_rng(0)
    for _ in range(40):
        table.add(draw.integers(1, 1 << 63, (5000, 2), np.uint64))
        assert table._slots.nbytes <= max(48 * table.count, 16 * deduplicate._FIRST_SLOTS)
