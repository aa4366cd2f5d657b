"""Preprocessing: every format, any number of workers, runs that are killed and continued."""

import csv
import gzip
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from patience import is_running, wait_until
from preprocess_runs import decode_documents, interrupt_run, run
from slow_cases import slow

from megaframe.data.indexed_dataset import IndexedDataset
from megaframe.data.preprocessing import decompress, input_shards, preprocess
from megaframe.data.preprocessing.corpus_files import CorpusFile, CorpusFormat
from megaframe.data.preprocessing.documents import read_documents
from megaframe.data.preprocessing.preprocess import PreprocessJob, encode_documents, map_ordered
from megaframe.data.tokenizer import ByteTokenizer
from megaframe.errors import UserError

TOOLS = Path(__file__).parents[3] / "tools"
OUTPUT = ["out.bin", "out.idx", "out.tokens.json"]
DOCUMENTS = ["first\nline two", "naïve ☃", "x" * 50, "a\r\nb", "last"]


def make_jsonl(documents, key="text"):
    return "".join(f"{json.dumps({'id': 1, key: text})}\n" for text in documents).encode()


def write_as(path, documents):
    """Write documents in the format that the file name's suffixes say."""
    name = path.name
    if ".parquet" in name:
        table = pyarrow.table({"n": range(len(documents)), "text": documents})
        pyarrow.parquet.write_table(table, path, row_group_size=2)
        return path
    if ".csv" in name or ".tsv" in name:
        lines = io.StringIO(newline="")
        writer = csv.writer(lines, "excel-tab" if ".tsv" in name else "excel")
        writer.writerows([("n", "text"), *enumerate(documents)])
        content = lines.getvalue().encode()
    else:
        content = make_jsonl(documents) if ".jsonl" in name else "\n\n".join(documents).encode()
    if name.endswith(".gz"):
        content = gzip.compress(content)
    if name.endswith(".zst"):
        content = zstandard.compress(content)
    path.write_bytes(content)
    return path


def read_content(prefix):
    return tuple(Path(f"{prefix}{suffix}").read_bytes() for suffix in (".bin", ".idx"))


def read(path, size, **options):
    file = CorpusFile(str(path), CorpusFormat(**options))
    shards = input_shards.split_file(file, size)
    return [text for shard in shards for text in read_documents(shard)]


@pytest.mark.parametrize(
    "name",
    [
        "c.jsonl",
        "c.jsonl.gz",
        "c.jsonl.zst",
        "c.parquet",
        "c.txt",
        "c.txt.gz",
        "c.txt.zst",
        "c.csv",
    ],
)
def test_every_format_gives_the_same_documents(tmp_path, name):
    path = write_as(tmp_path / name, DOCUMENTS)
    result = run([path], tmp_path / "out", split_blank_lines=True)
    assert decode_documents(tmp_path / "out") == DOCUMENTS
    file = IndexedDataset(str(tmp_path / "out"))
    assert file.tokens[file.lengths[0] - 1] == 256  # the end-of-document token
    assert (result.total.documents, result.total.tokens) == (len(DOCUMENTS), file.tokens.size)
    assert result.total.disk_bytes == path.stat().st_size
    assert sorted(os.listdir(tmp_path)) == sorted([name, *OUTPUT])


def test_files_keep_their_order_and_may_be_mixed(tmp_path):
    names = ["b.txt", "a.jsonl", "c.parquet", "d.jsonl.zst"]
    inputs = [write_as(tmp_path / name, [f"{name} 1", f"{name} 2"]) for name in names]
    run(inputs, tmp_path / "out")
    expected = ["b.txt 1\n\nb.txt 2"] + [f"{name} {n}" for name in names[1:] for n in (1, 2)]
    assert decode_documents(tmp_path / "out") == expected


def test_without_eod_and_with_another_key(tmp_path):
    (tmp_path / "c.jsonl").write_bytes(make_jsonl(["ab", "c"], key="body"))
    run([tmp_path / "c.jsonl"], tmp_path / "out", append_eod=False, key="body")
    file = IndexedDataset(str(tmp_path / "out"))
    assert (file.tokens.tolist(), file.lengths.tolist()) == ([97, 98, 99], [2, 1])


TEXTS = st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=40), max_size=20)


@given(TEXTS, st.integers(1, 200), st.sampled_from(["", ".gz", ".zst"]), st.booleans())
def test_the_cut_into_pieces_changes_no_jsonl_document(
    tmp_path_factory, documents, size, suffix, end
):
    path = tmp_path_factory.mktemp("cut") / f"c.jsonl{suffix}"
    data = make_jsonl(documents) if end else make_jsonl(documents)[:-1]
    path.write_bytes({"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}[suffix](data))
    assert read(path, size) == documents


LINES = st.lists(st.sampled_from(["a", "bc", "", " \t", "d\r", "\r", "  e"]), max_size=25)


@given(LINES, st.integers(1, 20))
def test_the_cut_into_pieces_changes_no_paragraph(tmp_path_factory, lines, size):
    expected, paragraph = [], []
    for line in [*lines, ""]:
        if line.strip():
            paragraph.append(line)
        elif paragraph:
            expected.append("\n".join(paragraph).strip("\r\n"))
            paragraph = []
    path = tmp_path_factory.mktemp("cut") / "c.txt"
    path.write_bytes("\n".join(lines).encode())
    before, decompress._READ = decompress._READ, 3
    try:
        assert read(path, size, split_blank_lines=True) == expected
    finally:
        decompress._READ = before


def test_marks_and_lone_surrogates_do_not_stop_a_run(tmp_path):
    (tmp_path / "c.jsonl").write_bytes(
        b"\xef\xbb\xbf" + rb'{"text": "a\ud83d\ude00"}' + b"\n\n" + rb'{"text": "b\ud800"}'
    )
    run([tmp_path / "c.jsonl"], tmp_path / "out")
    assert decode_documents(tmp_path / "out") == ["a😀", "b\ufffd"]


@pytest.mark.parametrize("name", ["c.jsonl", slow("c.jsonl.zst"), slow("c.parquet"), slow("c.csv")])
def test_workers_do_not_change_a_byte(tmp_path, small_parts, name):
    documents = [f"document {n} " * (n % 7) for n in range(300)]
    path = write_as(tmp_path / name, documents)
    single_worker = run([path, path], tmp_path / "one")
    two = run([path, path], tmp_path / "two", workers=2)
    assert read_content(tmp_path / "one") == read_content(tmp_path / "two")
    assert single_worker == two
    assert single_worker.total.empty == 2 * sum(not text for text in documents)
    assert decode_documents(tmp_path / "one") == [text for text in documents if text] * 2


@pytest.mark.parametrize("damaged", [".bin", ".idx", "nothing"])
def test_an_interrupted_run_continues_from_its_finished_parts(tmp_path, small_parts, damaged):
    path = write_as(tmp_path / "c.jsonl", [f"document {n} " * (n % 7) for n in range(300)])
    uninterrupted = run([path], tmp_path / "whole")
    job = interrupt_run(path, tmp_path / "out", 4 * 1500)
    parts = tmp_path / "out.parts"
    lines = (parts / "journal.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines[1:]]
    with open(parts / "journal.jsonl", "a") as journal:
        journal.write('{"checksums": 17, "docum')  # a line torn by a kill
    (parts / "00000004.bin.999999.unfinished").write_bytes(b"half a part of a worker")
    for suffix, begun in ((".bin", b"half"), (".idx", b"a part")):
        with open(parts / f"tokens{suffix}", "ab") as file:
            file.write(begun)
    if damaged != "nothing":  # the third part
        place = {".bin": 2 * sum(entry["tokens"] for entry in entries[:2]),
                 ".idx": 34 + 4 * sum(entry["documents"] for entry in entries[:2])}  # fmt: skip
        content_now = bytearray((parts / f"tokens{damaged}").read_bytes())
        content_now[place[damaged]] ^= 1
        (parts / f"tokens{damaged}").write_bytes(content_now)
    with pytest.raises(UserError, match=r"unfinished run with other append_eod; .*--overwrite"):
        run([path], tmp_path / "out", append_eod=False)
    progress = []
    result = preprocess.preprocess(job, report=lambda done, disk_bytes: progress.append(done))
    assert progress[0] == result.resumed
    assert result.resumed.disk_bytes == 1500 * (4 if damaged == "nothing" else 2)
    assert result.total == uninterrupted.total
    assert read_content(tmp_path / "out") == read_content(tmp_path / "whole")
    assert not parts.exists()


def test_an_interrupted_run_of_rows_continues(tmp_path, small_parts, monkeypatch):
    monkeypatch.setattr(decompress, "_READ", 100)
    path = write_as(tmp_path / "c.csv", [f'row {n},\n"' * (n % 7) for n in range(900)])
    run([path], tmp_path / "whole")
    job = interrupt_run(path, tmp_path / "out", 4 * 1500)
    result = preprocess.preprocess(job)
    assert 6000 <= result.resumed.size < result.total.size / 2
    assert read_content(tmp_path / "out") == read_content(tmp_path / "whole")


@pytest.mark.parametrize("renamed", [[], [".bin"], [".bin", ".idx"]])
def test_a_kill_between_the_last_renames_loses_nothing(tmp_path, small_parts, monkeypatch, renamed):
    path = write_as(tmp_path / "c.jsonl", [f"document {n} " * 9 for n in range(100)])
    run([path], tmp_path / "whole")
    write_as(tmp_path / "old.jsonl", ["old"])
    run([tmp_path / "old.jsonl"], tmp_path / "out")
    rename, renames_done = os.replace, []

    def killed(source, target):
        if len(renames_done) == len(renamed):
            raise KeyboardInterrupt
        renames_done.append(os.path.splitext(target)[1])
        rename(source, target)

    monkeypatch.setattr(os, "replace", killed)
    if len(renamed) == 2:
        monkeypatch.setattr(
            "megaframe.data.preprocessing.journal.delete_file",
            lambda path, inside: killed(path, path),
        )
    with pytest.raises(KeyboardInterrupt):
        run([path], tmp_path / "out", overwrite=True)
    assert renames_done == renamed
    monkeypatch.undo()
    monkeypatch.setattr(preprocess, "_SMALLEST_PART", 1500)
    result = run([path], tmp_path / "out")
    assert result.resumed == result.total
    assert read_content(tmp_path / "out") == read_content(tmp_path / "whole")
    assert not (tmp_path / "out.parts").exists()


def test_killing_the_tool_at_any_moment_loses_nothing(tmp_path):
    documents = [f"document {n} " * 300 for n in range(8000)]
    path = write_as(tmp_path / "c.jsonl", documents)  # about 30 MB, eight parts
    tool = [sys.executable, str(TOOLS / "preprocess_data.py"), "--input", str(path)]
    command = [*tool, "--tokenizer", "bytes", "--workers", "2", "--output", str(tmp_path / "out")]
    first = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    journal = tmp_path / "out.parts" / "journal.jsonl"
    while first.poll() is None and not (journal.exists() and b"checksums" in journal.read_bytes()):
        time.sleep(0.01)
    children = Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().split()
    os.kill(first.pid, signal.SIGKILL)
    assert first.wait() == -signal.SIGKILL
    assert len(children) >= 2
    wait_until(lambda: not any(map(is_running, children)))  # no orphans
    assert not list(tmp_path.glob("out.bin")) and not list(tmp_path.glob("out.idx"))
    finished = subprocess.run(command, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    assert "8,000 documents" in finished.stdout and "done by an earlier run" in finished.stdout
    run([path], tmp_path / "whole")
    assert read_content(tmp_path / "out") == read_content(tmp_path / "whole")
    whole = [name.replace("out", "whole") for name in OUTPUT]
    assert sorted(os.listdir(tmp_path)) == ["c.jsonl", *OUTPUT, *whole]


def test_an_existing_file_is_kept_unless_told_otherwise(tmp_path):
    path = write_as(tmp_path / "c.jsonl", ["a"])
    run([path], tmp_path / "out")
    before = read_content(tmp_path / "out")
    write_as(path, ["b"])
    with pytest.raises(UserError, match=r"out\.idx already exists; .*--overwrite"):
        run([path], tmp_path / "out")
    assert read_content(tmp_path / "out") == before
    assert sorted(os.listdir(tmp_path)) == ["c.jsonl", *OUTPUT]
    run([path], tmp_path / "out", overwrite=True)
    assert decode_documents(tmp_path / "out") == ["b"]


GOOD = b'{"text": "fine"}\n'
BAD = {
    "bad json": ("c.jsonl", GOOD * 2 + b'{"text": \n', r"c\.jsonl:3: not JSON"),
    "bad json, compressed": ("c.jsonl.gz", gzip.compress(GOOD * 2 + b"{"), r"gz:3: not JSON"),
    "missing key": ("c.jsonl", GOOD + b'{"texts": "x"}', r":2: no key 'text'; .*--key texts"),
    "an array": ("c.json", b'[\n  {"text": "a"}\n]', r":1: not JSON: .*whole object \(`jq -c"),
    "not an object": ("c.jsonl", b"[1]", r":1: an object .* is needed, not an array"),
    "not a text": ("c.jsonl", b'{"text": 5}', r":1: key 'text' holds a number"),
    "not UTF-8": ("c.txt", b"a\nb\xff", r"c\.txt:2: byte 0xff is not UTF-8"),
    "no file": ("c.jsonl", None, r"cannot read .*c\.jsonl: No such file"),
    "unknown suffix": ("c.md", b"a", r"unknown kind of file '\.md'.*--format jsonl"),
    "empty file": ("c.jsonl", b"", r"corpus is empty"),
    "empty documents": ("c.jsonl", b'{"text": ""}', r"corpus is empty: 1 documents without"),
    "truncated gzip": ("c.jsonl.gz", gzip.compress(GOOD * 999)[:-12], r"truncated"),
    "truncated zstandard": ("c.jsonl.zst", zstandard.compress(os.urandom(999))[:-9], r"truncated"),
    "not gzip": ("c.jsonl.gz", GOOD, r"not what its suffix says"),
    "not zstandard": ("c.jsonl.zst", GOOD, r"not what its suffix says"),
    "not parquet": ("c.parquet", GOOD, r"not a whole Parquet file"),
    "deep json": ("c.jsonl", b"[" * 200_000, r":1: not JSON"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named_and_leaves_nothing(tmp_path, name):
    file, data, message = BAD[name]
    if data is not None:
        (tmp_path / file).write_bytes(data)
    with pytest.raises(UserError, match=message):
        run([tmp_path / file], tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


def test_a_tokenizer_that_makes_no_token_of_any_text_is_named(tmp_path):
    end = {"id": 0, "content": "<|endoftext|>", "special": True, "normalized": False}
    end |= {"single_word": False, "lstrip": False, "rstrip": False}
    model = {"type": "BPE", "vocab": {"<|endoftext|>": 0}, "merges": []}
    description = {"version": "1.0", "added_tokens": [end], "model": model}
    (tmp_path / "tokenizer.json").write_text(json.dumps(description))
    (tmp_path / "c.jsonl").write_bytes(GOOD * 3)
    with pytest.raises(UserError, match=r"tokenizer hf:.*makes no token of .* 3 documents without"):
        run([tmp_path / "c.jsonl"], tmp_path / "out", tokenizer=f"hf:{tmp_path}/tokenizer.json")
    assert not list(tmp_path.glob("out*"))


def test_a_bad_line_has_its_number_in_a_later_part_and_from_a_worker(tmp_path, small_parts):
    (tmp_path / "c.jsonl").write_bytes(GOOD * 700 + b"{\n" + GOOD * 700)
    for workers in (1, 2):
        with pytest.raises(UserError, match=r"c\.jsonl:701: not JSON"):
            run([tmp_path / "c.jsonl"], tmp_path / "out", workers)
        assert not list(tmp_path.glob("out*"))
    (tmp_path / "c.jsonl.zst").write_bytes(zstandard.compress(GOOD * 700 + b"{\n"))
    with pytest.raises(UserError, match=r"zst:701: not JSON"):
        run([tmp_path / "c.jsonl.zst"], tmp_path / "out")


def test_parquet_columns_are_checked(tmp_path):
    path = tmp_path / "c.parquet"
    table = pyarrow.table({"body": ["a", None], "n": [1, 2]})
    pyarrow.parquet.write_table(table, path)
    for key, message in (
        ("text", r"no column 'text'; there are: body, n"),
        ("n", r"column 'n' holds int64"),
        ("body", r"'body' holds nothing in row 1 of row group 0"),
    ):
        with pytest.raises(UserError, match=message):
            run([path], tmp_path / "out", key=key)


def test_a_document_that_memory_should_not_hold_is_refused(tmp_path, monkeypatch):
    for module in ("decompress", "documents", "input_shards"):
        monkeypatch.setattr(f"megaframe.data.preprocessing.{module}.LONGEST_DOCUMENT", 2000)
    monkeypatch.setattr(decompress, "_READ", 512)
    monkeypatch.setattr(preprocess, "_SMALLEST_PART", 100)
    for name in ("c.jsonl", "c.jsonl.gz", "c.txt"):
        path = write_as(tmp_path / name, ["x" * 5000])
        with pytest.raises(UserError, match=r"a document of more than 2000 bytes"):
            run([path], tmp_path / "out")


class OutOfVocabularyTokenizer(ByteTokenizer):
    def encode_batch(self, texts):
        return [np.array([257])]


def test_ids_beyond_the_vocabulary_are_refused():
    with pytest.raises(UserError, match="ids from 257 to 257, but its vocabulary has 257"):
        encode_documents(OutOfVocabularyTokenizer(), ["a"], append_eod=False)


def kill_this_process(number):
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_dead_worker_is_a_message_not_a_wait():
    with pytest.raises(UserError, match="one of 2 worker processes died"):
        list(map_ordered(kill_this_process, [(n,) for n in range(3)], 2))


def test_few_tasks_are_taken_before_their_results(tmp_path):
    pending, most = 0, 0

    def tasks():
        nonlocal pending
        for n in range(30):
            pending += 1
            yield (n,)

    numbers = []
    for number in map_ordered(abs, tasks(), 2):
        numbers.append(number)
        most = max(most, pending - len(numbers))
    assert numbers == list(range(30))
    assert most <= 5


def test_two_runs_of_one_output_exclude_each_other(tmp_path):
    path = write_as(tmp_path / "c.jsonl", ["a"])
    job = PreprocessJob((CorpusFile(str(path)),), "bytes", str(tmp_path / "out"))
    errors = []

    def meanwhile(done, disk_bytes):
        with pytest.raises(UserError, match="another process is writing") as error:
            run([path], tmp_path / "out")
        errors.append(error)

    preprocess.preprocess(job, report=meanwhile)
    assert errors and decode_documents(tmp_path / "out") == ["a"]


def run_tool(name, *options):
    command = [sys.executable, str(TOOLS / name), *map(str, options)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.slow
def test_the_tools_make_the_demo_data(tmp_path):
    corpus, prefix = tmp_path / "demo.jsonl", tmp_path / "demo"
    assert run_tool("demo_corpus.py", "--output", corpus, "--megabytes", 0.5).returncode == 0
    first = corpus.read_bytes()
    assert 0.3e6 < sum(len(json.loads(line)["text"]) for line in first.splitlines()) <= 0.5e6
    run_tool("demo_corpus.py", "--output", corpus, "--megabytes", 0.5)
    assert corpus.read_bytes() == first
    trained = run_tool(
        "train_tokenizer.py", "--input", corpus, "--vocab", 1000, "--output", prefix
    )  # fmt: skip
    assert trained.returncode == 0, trained.stderr
    name = f"sentencepiece:{prefix}.model"
    process = run_tool(
        "preprocess_data.py", "--input", corpus, "--tokenizer", name, "--output", prefix
    )
    assert process.returncode == 0, process.stderr
    file = IndexedDataset(str(prefix))
    assert f"{len(file)} documents, {file.tokens.size:,} tokens" in process.stdout
    refused = run_tool(
        "preprocess_data.py", "--input", corpus, "--tokenizer", name, "--output", prefix
    )
    assert refused.returncode == 2
    assert refused.stderr.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in refused.stderr


def test_a_flipped_bit_in_a_page_of_parquet_is_noticed(tmp_path):
    path = tmp_path / "c.parquet"
    table = pyarrow.table({"text": ["one text", "another text"]})
    plain = {"compression": "none", "use_dictionary": False, "write_page_checksum": True}
    pyarrow.parquet.write_table(table, path, **plain)
    data = bytearray(path.read_bytes())
    data[data.index(b"\x0c\0\0\0another") + 5] ^= 1  # not in the statistics
    path.write_bytes(data)
    with pytest.raises(UserError, match="not a whole Parquet file"):
        read(path, 1 << 20)


def test_a_pipe_and_a_device_are_no_corpus(tmp_path):
    os.mkfifo(tmp_path / "c.jsonl")
    (tmp_path / "d.txt").symlink_to("/dev/zero")
    for name in ("c.jsonl", "d.txt"):
        with pytest.raises(UserError, match="Not a regular file"):
            read(tmp_path / name, 1 << 20)
