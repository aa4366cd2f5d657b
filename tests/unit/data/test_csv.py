"""CSV and TSV: every text comes back however the file is cut, and a bad row is named.

Tests `megaframe.data.preprocessing.csv_rows`.
"""

import csv
import gzip
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaframe.data.preprocessing.corpus_files import CorpusFile, CorpusFormat
from megaframe.data.preprocessing.documents import read_documents
from megaframe.data.preprocessing.input_shards import split_file
from megaframe.errors import UserError


def read(path, size, key="text"):
    shards = split_file(CorpusFile(str(path), CorpusFormat(key)), size)
    return [text for shard in shards for text in read_documents(shard)]


def format_rows(rows, **dialect):
    lines = io.StringIO(newline="")
    csv.writer(lines, **dialect).writerows(rows)
    return lines.getvalue()


PIECES = st.sampled_from(['"', ",", "\t", "\n", "\r", "\r\n", "a", "ß", " ", "\u2028", "\x85", "☃"])
TEXTS = st.lists(st.lists(PIECES, max_size=8).map("".join), max_size=12)


@given(
    texts=TEXTS,
    size=st.integers(1, 60),
    end=st.sampled_from(["\n", "\r\n"]),
    suffix=st.sampled_from([".csv", ".tsv", ".csv.gz"]),
    mark=st.sampled_from([b"", b"\xef\xbb\xbf"]),
    last=st.booleans(),
)
def test_the_cut_into_blocks_changes_no_text(
    tmp_path_factory, texts, size, end, suffix, mark, last
):
    path = tmp_path_factory.mktemp("csv") / f"c{suffix}"
    separator = "\t" if suffix == ".tsv" else ","
    rows = [("a\nb", "text", "c"), *((number, text, "x") for number, text in enumerate(texts))]
    # With \n as its line end, Python's writer leaves \r without quotation marks, as rows cannot be.
    quoting = csv.QUOTE_ALL if end == "\n" else csv.QUOTE_MINIMAL
    content = format_rows(rows, lineterminator=end, quoting=quoting, delimiter=separator)
    data = mark + (content if last else content.removesuffix(end)).encode()
    path.write_bytes(gzip.compress(data) if suffix.endswith(".gz") else data)
    assert read(path, size) == texts
    shards = list(split_file(CorpusFile(str(path)), size))
    assert sum(shard.disk_bytes for shard in shards) == path.stat().st_size * bool(texts)
    assert all(shard.size >= size for shard in shards[:-1])


def test_blank_lines_are_no_rows_and_columns_may_have_spaces_around_their_names(tmp_path):
    (tmp_path / "c.csv").write_text("n, text\n\n1,a\n\n\n2,b\n\n")
    assert read(tmp_path / "c.csv", 1) == ["a", "b"]


GOOD = "".join(f'{number},"one,\ntwo"\n' for number in range(20))  # 40 lines after the first
BAD = {
    "too many fields": (f"n,text\n{GOOD}1,a,b\n", r"c\.csv:42: a row with 3 fields.* 2 columns"),
    "too few fields": (f"n,text\n{GOOD}1\n{GOOD}", r"c\.csv:42: a row with 1 fields"),
    "no such column": (f"n,body\n{GOOD}", r"no column 'text' in the first row.*: n, body .*--key"),
    "another separator": ("n;text\n1;a\n", r"there are: n;text .*csv are separated by commas"),
    "twice": ("text,text\n", r"2 columns are named 'text'"),
    "an escaped quotation mark": (f'n,text\n{GOOD}1,"a \\"b\\""\n', r"c\.csv:42: .*written twice"),
    "an open quotation mark": (f'n,text\n{GOOD}1,"a\n{GOOD}', r"c\.csv:42 \(to line 43\): .*twice"),
    "open to the end": (f'n,text\n{GOOD}1,"a\nb\nc', r"c\.csv:42 \(to line 44\): .*never closed"),
    "an old line end": (f"n,text\n{GOOD}1,a\r2,b\n", r"c\.csv:42: .*carriage return"),
    "not UTF-8": (f"n,text\n{GOOD}1,".encode() + b"a\xffb\n", r"c\.csv:42: byte 0xff is not UTF-8"),
    "a name that is not UTF-8": (b"n,t\xe9xt\n", r"c\.csv:1: byte 0xe9 .*WINDOWS-1252"),
    "UTF-16": ("n,text\n1,a\n".encode("utf-16"), r"c\.csv:1: .*(-f UTF-16|line contains NUL)"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_row_is_named_with_its_line_wherever_the_file_is_cut(tmp_path, name):
    content, message = BAD[name]
    data = content if isinstance(content, bytes) else content.encode()
    (tmp_path / "c.csv").write_bytes(data)
    for size in (1, 30, 1 << 20):
        with pytest.raises(UserError, match=message):
            read(tmp_path / "c.csv", size)


def test_no_row_is_too_long_for_memory(tmp_path, monkeypatch):
    for module in ("csv_rows", "decompress"):
        monkeypatch.setattr(f"megaframe.data.preprocessing.{module}.LONGEST_DOCUMENT", 1000)
    path = tmp_path / "c.csv.gz"
    for text in ("x" * 2000, "x\n" * 1000, ",".join("x" * 1000)):
        path.write_bytes(gzip.compress(f'text,n\nfine,1\n"{text}",2\n'.encode()))
        with pytest.raises(UserError, match=r"c\.csv\.gz(:3)?: .*more than 1000 bytes"):
            read(path, 100)


def test_no_row_has_too_many_fields_for_memory(tmp_path):
    (tmp_path / "c.csv.gz").write_bytes(gzip.compress(b"text\nfine\n" + b"," * (5 << 20)))
    with pytest.raises(UserError, match=r"c\.csv\.gz:3: a row of more than 5,242,880 fields"):
        read(tmp_path / "c.csv.gz", 100)


def test_the_end_of_the_file_is_the_end_of_a_field(tmp_path):
    (tmp_path / "c.csv").write_text("text\n")
    assert read(tmp_path / "c.csv", 9) == []
    (tmp_path / "c.csv").write_text('text\n""\n"a"')
    assert read(tmp_path / "c.csv", 9) == ["", "a"]
