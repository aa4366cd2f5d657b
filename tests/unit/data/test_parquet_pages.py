"""Pages of Parquet are measured by the headers that a reader obeys, and rows are decoded a few at a
time where pages are large."""

import io

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaframe.data.preprocessing import decompress, documents, parquet_file
from megaframe.data.preprocessing.corpus_files import CorpusFile, InputError
from megaframe.data.preprocessing.documents import read_documents
from megaframe.data.preprocessing.input_shards import split_file
from megaframe.data.preprocessing.parquet_pages import measure_largest_page

TEXTS = [f"text {number % 7} " * (number % 50) for number in range(3000)]
WAYS = {
    "plain": {"use_dictionary": False, "compression": "none"},
    "dictionary": {"compression": "zstd"},
    "version 2": {"data_page_version": "2.0", "compression": "snappy"},
    "delta": {"use_dictionary": False, "column_encoding": {"text": "DELTA_BYTE_ARRAY"}},
    "checksums": {"write_page_checksum": True, "write_statistics": False},
}


def write(path, texts, **options):
    """Write a column `text`, with pages of 4 kB unless told otherwise, and another column."""
    table = pyarrow.table({"number": range(len(texts)), "text": texts})
    pyarrow.parquet.write_table(table, path, **{"data_page_size": 4096, **options})
    return str(path)


def read(path):
    shards = split_file(CorpusFile(path), 1 << 20)
    return [text for shard in shards for text in read_documents(shard)]


def measure(path):
    """Return the largest page of each row group."""
    with pyarrow.parquet.ParquetFile(path) as file:
        groups = range(file.num_row_groups)
        return [parquet_file.measure_pages(path, file.metadata, [g], "text") for g in groups]


@pytest.mark.parametrize("way", WAYS)
def test_the_largest_page_bounds_a_row_and_not_more(tmp_path, way):
    path = write(tmp_path / "c.parquet", TEXTS, **WAYS[way], row_group_size=1000)
    for number, page in enumerate(measure(path)):
        texts = TEXTS[1000 * number : 1000 * (number + 1)]
        assert max(map(len, texts)) <= page <= 4096 + 1024 * max(map(len, texts))
    assert read(path) == TEXTS


def test_a_page_of_plain_texts_has_their_bytes_and_four_for_each_length(tmp_path):
    path = write(tmp_path / "c.parquet", ["ab", "cde"], **WAYS["plain"], data_page_version="2.0")
    (page,) = measure(path)
    # Whether the two rows are null takes two bytes: a run of two, and its value.
    assert page == 2 + (4 + 2) + (4 + 3)


def test_a_dictionary_that_each_row_repeats_is_decoded_row_by_row(tmp_path, monkeypatch):
    """A few kilobytes on disk, of which 512 rows would be 512 times a megabyte."""
    text = "x" * (1 << 20)
    repeated = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 512), [text])
    table = pyarrow.table({"text": repeated})
    path = str(tmp_path / "c.parquet")
    pyarrow.parquet.write_table(table, path, compression="zstd", store_schema=False)
    assert measure(path) == [len(text) + 4]
    monkeypatch.setattr(documents, "_ROW_BYTES", 1 << 20)
    before = pyarrow.total_allocated_bytes()
    (shard,) = split_file(CorpusFile(path), 1 << 20)
    texts = read_documents(shard)
    for _ in range(20):
        assert next(texts) == text
        assert pyarrow.total_allocated_bytes() - before < 10 << 20
    texts.close()


def test_a_page_that_memory_should_not_hold_is_refused_with_both_numbers(tmp_path, monkeypatch):
    path = write(tmp_path / "c.parquet", ["x" * 10_000] * 3, compression="gzip")
    monkeypatch.setattr(parquet_file, "LARGEST_PAGE", 9000)
    with pytest.raises(InputError, match=r"page of 10004 bytes; .* memory is 9000: write it with"):
        read(path)


def test_a_document_of_a_large_page_is_measured_before_it_is_decoded(tmp_path, monkeypatch):
    path = write(tmp_path / "c.parquet", ["a", "x" * 10_000, "b"])
    monkeypatch.setattr(documents, "_ROW_BYTES", 1)
    assert read(path) == ["a", "x" * 10_000, "b"]
    monkeypatch.setattr(decompress, "LONGEST_DOCUMENT", 9999)
    with pytest.raises(InputError, match="row 1: a document of more than 9999 bytes"):
        read(path)


@given(st.binary(max_size=60))
def test_any_bytes_are_a_size_or_an_error(content):
    try:
        assert measure_largest_page(io.BytesIO(content), 0, len(content), 10) >= 0
    except ValueError as error:
        assert "page" in str(error)


def test_a_header_has_a_largest_size_and_depth():
    long = b"\x18\xff\xff\xff\xff\x0f"  # a binary of 4 GB
    for content, message in ((long, "more than 1048576 bytes"), (b"\x1c" * 100, "nested more")):
        with pytest.raises(ValueError, match=message):
            measure_largest_page(io.BytesIO(content), 0, 100, 1)
