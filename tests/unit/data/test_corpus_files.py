"""Which files a corpus has: folders, their order, what is left out, and a key for each input."""

import argparse
import inspect
import os
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaframe.data.preprocessing.corpus_files import (
    CorpusFile,
    CorpusFormat,
    add_reading_options,
    list_corpus_files,
    list_readings,
)
from megaframe.data.preprocessing.preprocess import PreprocessJob, preprocess
from megaframe.errors import UserError


def write(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("text")


def list_below(folder, **options):
    files, notes = list_corpus_files([CorpusFile(str(folder), CorpusFormat(**options))])
    return [os.path.relpath(file.path, folder) for file in files], notes


def test_a_folder_is_all_its_files_of_known_kinds_in_the_order_of_their_paths(tmp_path):
    known = ["a.csv", "b/c.txt.gz", "b/d/e.jsonl", "b/f.parquet", "g.tsv", "mine.parts/j.txt"]
    write(tmp_path, *reversed(known), "b/notes.md", "b/x.md", "README")
    write(tmp_path, ".git/x.txt", ".hidden.txt", "old.tokens.json", "old.parts/journal.jsonl")
    names, notes = list_below(tmp_path)
    assert names == known
    assert notes == [
        f"{tmp_path}: 6 files (text 2, csv 1, jsonl 1, parquet 1, tsv 1); left out 3 of other "
        "kinds (.md 2, no suffix 1)"
    ]


@given(
    st.lists(st.lists(st.sampled_from("aB.-é1"), min_size=1, max_size=3).map("".join), max_size=8)
)
def test_the_order_is_that_of_the_paths_whatever_the_order_of_writing(tmp_path_factory, names):
    folder = tmp_path_factory.mktemp("folder")
    write(folder, *(f"x{name}/{number}.txt" for number, name in enumerate(names)), "y.txt")
    below = [path.split(os.sep) for path in list_below(folder)[0]]
    assert below == sorted(below)
    assert len(below) == len(names) + 1


def test_a_format_reads_all_files_of_a_folder(tmp_path):
    write(tmp_path, "a.md", "b/c", "d.csv")
    files, notes = list_corpus_files([CorpusFile(str(tmp_path), CorpusFormat(format="text"))])
    assert [file.reading.format for file in files] == ["text"] * 3
    assert notes == [f"{tmp_path}: 3 files (text 3)"]


def test_links_to_files_are_read_and_those_to_folders_are_told(tmp_path):
    write(tmp_path, "real/a.txt")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a.txt").symlink_to(tmp_path / "real/a.txt")
    (folder / "back").symlink_to(folder)
    (folder / "gone.txt").symlink_to(tmp_path / "nowhere")
    names, (note,) = list_below(folder)
    assert names == ["a.txt", "gone.txt"]  # what is gone is an error when it is read
    assert "links to folders 1" in note


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ((), r"folder has no file to read$"),
        ((".x.txt",), r"folder has no file to read$"),
        (
            ("a.md", "b/c.pdf", "d.md"),
            r"no file of a known kind, but 3 .*\.md 2, \.pdf 1.*--format",
        ),
    ],
)
def test_a_folder_without_a_text_is_one_message(tmp_path, names, message):
    (tmp_path / "folder").mkdir()
    write(tmp_path / "folder", *names)
    with pytest.raises(UserError, match=message):
        list_below(tmp_path / "folder")
    with pytest.raises(UserError, match="nowhere: there is no such file or folder"):
        list_below(tmp_path / "nowhere")


def parse(*words):
    parser = argparse.ArgumentParser()
    add_reading_options(parser)
    parser.add_argument("--input", nargs="+")
    options = parser.parse_args(words)
    return [(file.path, file.reading.key) for file in list_readings(options, options.input)]


def test_a_key_is_of_all_inputs_or_each_has_its_own():
    assert parse("--input", "a", "b") == [("a", "text"), ("b", "text")]
    assert parse("--key", "body", "--input", "a", "b") == [("a", "body"), ("b", "body")]
    assert parse("--input", "a", "b", "--key", "c", "d") == [("a", "c"), ("b", "d")]
    with pytest.raises(UserError, match=r"--key gives 2 keys \(c, d\) for 3 of --input; give one"):
        parse("--input", "a", "b", "e", "--key", "c", "d")


def test_the_output_of_a_folder_may_lie_in_it_and_a_run_again_reads_the_same(tmp_path):
    write(tmp_path, "a.txt", "b/c.txt")
    for overwrite in (False, True):
        files, _ = list_corpus_files([CorpusFile(str(tmp_path))])
        job = PreprocessJob(tuple(files), "bytes", str(tmp_path / "tokens"))
        result = preprocess(job, overwrite=overwrite)
        assert result.total.documents == 2


def test_folders_may_be_nested_deeper_than_calls_of_python(tmp_path):
    deep = f"{'a/' * 150}b.txt"
    write(tmp_path, deep, "c.txt")
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack()) + 100)
    try:
        names, _ = list_below(tmp_path)
    finally:
        sys.setrecursionlimit(limit)
    assert names == [deep, "c.txt"]
