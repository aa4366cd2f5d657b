"""Token files compared with bytes built by hand from the format's table, and damaged files."""

import os
import resource
import struct
import subprocess
import sys
from contextlib import suppress
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megaframe.data.indexed_dataset import IndexedDataset, choose_token_dtype
from megaframe.data.indexed_dataset_writer import IndexedDatasetWriter, name_unfinished
from megaframe.data.preprocessing.corpus_files import CorpusFile
from megaframe.errors import UserError
from megaframe.inference.evaluation import read_sequence

CODES = {"u1": 1, "i1": 2, "i2": 3, "i4": 4, "i8": 5, "f8": 6, "f4": 7, "u2": 8}


def make_idx_bytes(code, lengths, pointers, documents, version=1, magic=b"MMIDIDX\x00\x00"):
    """Return the bytes of an .idx, field by field, independently of the code under test."""
    head = magic + struct.pack("<Q", version) + struct.pack("<B", code)
    counts = struct.pack("<QQ", len(lengths), len(documents))
    body = struct.pack(f"<{len(lengths)}i", *lengths) + struct.pack(f"<{len(pointers)}q", *pointers)
    return head + counts + body + struct.pack(f"<{len(documents)}q", *documents)


def make(folder, name="f", code=8, tokens=(1, 2, 3, 4, 5), dtype="<u2", **index):
    """Write a token file, by default of two documents, [1 2 3] and [4 5]; return its prefix."""
    prefix = str(folder / name)
    fields = {"lengths": [3, 2], "pointers": [0, 6], "documents": [0, 1, 2]} | index
    (folder / f"{name}.idx").write_bytes(make_idx_bytes(code, **fields))
    (folder / f"{name}.bin").write_bytes(np.array(tokens, dtype).tobytes())
    return prefix


def write(prefix, documents, dtype="u2"):
    with IndexedDatasetWriter(str(prefix), np.dtype(dtype)) as writer:
        for document in documents:
            writer.append(document)
    return str(prefix)


def read_content(prefix):
    return tuple(Path(f"{prefix}{suffix}").read_bytes() for suffix in (".bin", ".idx"))


def test_writer_makes_the_bytes_of_the_format(tmp_path):
    write(tmp_path / "w", [[1, 2, 3], [4, 5]])
    assert read_content(tmp_path / "w") == read_content(make(tmp_path))
    assert sorted(os.listdir(tmp_path)) == ["f.bin", "f.idx", "w.bin", "w.idx"]


@pytest.mark.parametrize("name, code", CODES.items())
def test_every_dtype_is_read_and_written(tmp_path, name, code):
    dtype = np.dtype(f"<{name}")
    pointers = [0, 3 * dtype.itemsize]
    by_hand = make(tmp_path, code=code, dtype=dtype, pointers=pointers)
    file = IndexedDataset(by_hand)
    assert file.dtype == file.tokens.dtype == dtype
    assert file.tokens.tolist() == [1, 2, 3, 4, 5]
    assert read_content(write(tmp_path / "w", [[1, 2, 3], [4, 5]], dtype)) == read_content(by_hand)


def test_two_byte_tokens_end_where_megatrons_do():
    sizes = [1, 65499, 65500, 65536, 2**20]
    assert [str(choose_token_dtype(size)) for size in sizes] == ["uint16"] * 2 + ["int32"] * 3


def test_reader_gives_documents_of_several_sequences_in_any_place(tmp_path):
    prefix = make(tmp_path, lengths=[2, 0, 3], pointers=[6, 4, 0], documents=[0, 0, 2, 3])
    file = IndexedDataset(prefix)
    assert len(file) == 3
    assert [file.get_sequence(n).tolist() for n in range(3)] == [[4, 5], [], [1, 2, 3]]
    assert file.documents.tolist() == [0, 0, 2, 3]
    with pytest.raises(IndexError):
        file.get_sequence(3)
    with pytest.raises(IndexError):
        file.get_sequence(-1)


def test_sequences_in_order_have_one_place(tmp_path):
    prefix = make(tmp_path, lengths=[2, 0, 3], pointers=[0, 4, 4], documents=[0, 0, 2, 3])
    file = IndexedDataset(prefix)
    spans = [file.locate_tokens(*span) for span in ((0, 3), (1, 3), (2, 2), (0, 2))]
    assert spans == [(0, 5), (2, 3), (0, 0), (0, 2)]


def test_sequences_that_overlap_are_read_only_one_by_one(tmp_path):
    """A small file could otherwise have more tokens than any memory."""
    prefix = make(tmp_path, lengths=[5] * 9, pointers=[0] * 9, documents=[0, 9])
    with pytest.raises(UserError, match="sequences 0 and after do not follow one another"):
        IndexedDataset(prefix).locate_tokens(0, 9)
    with pytest.raises(UserError, match="do not follow one another"):
        read_sequence(CorpusFile(f"{prefix}.bin"), None)


def test_unaligned_sequences_are_read(tmp_path):
    prefix = str(tmp_path / "f")
    (tmp_path / "f.idx").write_bytes(make_idx_bytes(8, [1, 1], [1, 4], [0, 1, 2]))
    (tmp_path / "f.bin").write_bytes(b"\x00\x05\x00\x00\x07\x00")
    assert [IndexedDataset(prefix).get_sequence(n).tolist() for n in (0, 1)] == [[5], [7]]


def test_close_lets_go_of_the_mapping(tmp_path):
    file = IndexedDataset(write(tmp_path / "w", [[1, 2]]))
    mapping = file.tokens._mmap
    file.close()
    mapping.close()  # raises while an array still uses it


BROKEN = {
    "magic": ({"magic": b"PK\x03\x04 a zip"}, "not the index of a token file"),
    "version": ({"version": 2}, "version 2; only version 1"),
    "dtype code": ({"code": 9}, "dtype code 9"),
    "pointer beyond the end": ({"pointers": [0, 8]}, "sequence 1 has 2 tokens at byte 8.* 10 byte"),
    "pointer that overflows": ({"pointers": [0, 2**63 - 2]}, "sequence 1 has 2 tokens"),
    "negative pointer": ({"pointers": [-2, 6]}, "sequence 0 has 3 tokens at byte -2"),
    "negative length": ({"lengths": [3, -2]}, "sequence 1 has -2 tokens"),
    "tokens that nothing names": ({"lengths": [3, 1]}, "10 bytes.* end at 8"),
    "documents that start late": ({"documents": [1, 1, 2]}, "from 1 to 2, not from 0 to 2"),
    "documents that end early": ({"documents": [0, 1, 1]}, "from 0 to 1, not from 0 to 2"),
    "unsorted documents": ({"documents": [0, 2, 1, 2]}, "document index 2 is 1, below.* 2"),
    "no document indices": ({"documents": []}, "no document indices"),
    "other item size": ({"code": 4}, "10 bytes.* int32 tokens of 4 bytes"),
    "bytes not a multiple": ({"tokens": [1] * 3, "dtype": "u1"}, "3 bytes"),
    "nothing at all": (
        {"lengths": [], "pointers": [], "documents": [0], "tokens": []},
        r"empty \(0 sequences in .idx, 0 bytes in .bin\)",
    ),
    "empty documents only": (
        {"lengths": [0], "pointers": [0], "documents": [0, 1], "tokens": []},
        r"empty \(1 sequences",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_refused_with_its_numbers(tmp_path, name):
    changes, message = BROKEN[name]
    prefix = make(tmp_path, **changes)
    with pytest.raises(UserError, match=message) as error:
        IndexedDataset(prefix)
    assert prefix in str(error.value)


@given(st.data())
def test_no_truncation_goes_unnoticed(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("truncated")
    prefix = make(folder)
    suffix = data.draw(st.sampled_from([".bin", ".idx"]))
    path = Path(f"{prefix}{suffix}")
    os.truncate(path, data.draw(st.integers(0, path.stat().st_size - 1)))
    with pytest.raises(UserError, match=r"truncated|empty"):
        IndexedDataset(prefix)


def test_foreign_tails_and_missing_files_are_named(tmp_path):
    prefix = make(tmp_path)
    with open(f"{prefix}.idx", "ab") as file:
        file.write(b"abc")
    with pytest.raises(UserError, match=r"too long: 85 bytes.* take 82"):
        IndexedDataset(prefix)
    make(tmp_path)
    with open(f"{prefix}.idx", "ab") as file:
        file.write(b"\x00\x01")
    with pytest.raises(UserError, match="multimodal"):
        IndexedDataset(prefix)
    with pytest.raises(UserError, match=r"f\.bin\.idx.*leave the suffix out: .*f$"):
        IndexedDataset(f"{prefix}.bin")
    make(tmp_path)
    os.unlink(f"{prefix}.bin")
    with pytest.raises(UserError, match=r"cannot open .*f\.bin"):
        IndexedDataset(prefix)


DOCUMENTS = st.lists(st.lists(st.integers(0, 65535), max_size=9), max_size=12)


@given(DOCUMENTS, st.data())
def test_a_kept_file_is_continued_behind_what_was_whole(tmp_path_factory, documents, data):
    folder = tmp_path_factory.mktemp("kept")
    num_complete = data.draw(st.integers(0, len(documents)))
    unfinished_prefix = str(folder / "unfinished")
    options = {"dtype": np.dtype("u2"), "resume_prefix": unfinished_prefix}
    with (
        pytest.raises(KeyboardInterrupt),
        IndexedDatasetWriter(str(folder / "f"), **options) as first,
    ):
        for document in [*documents, *[[7]] * 40]:  # longer than what replaces it
            first.append(document)
        raise KeyboardInterrupt
    assert sorted(os.listdir(folder)) == ["unfinished.bin", "unfinished.idx"]
    tokens = sum(map(len, documents[:num_complete]))
    with IndexedDatasetWriter(
        str(folder / "f"), **options, documents=num_complete, tokens=tokens
    ) as second:
        for document in documents[num_complete:]:
            second.append(document)
    assert read_content(folder / "f") == read_content(write(folder / "whole", documents))
    assert len(os.listdir(folder)) == 4


@settings(max_examples=20)
@given(DOCUMENTS)
def test_a_batch_is_its_documents_one_by_one(tmp_path_factory, documents):
    folder = tmp_path_factory.mktemp("batch")
    with IndexedDatasetWriter(str(folder / "batch"), np.dtype("u2")) as writer:
        lengths = np.array([len(document) for document in documents], np.int64)
        writer.append_batch(np.array(list(chain(*documents)), np.int32), lengths)
    assert read_content(folder / "batch") == read_content(write(folder / "single", documents))


def test_a_token_that_does_not_fit_is_refused_not_wrapped(tmp_path):
    for token in (65536, -1):
        with pytest.raises(UserError, match=f"{token}.*uint16 holds 0 to 65535"):
            write(tmp_path / "w", [[1], [token]])
    assert os.listdir(tmp_path) == []


def test_an_interrupted_writer_leaves_the_old_file(tmp_path):
    prefix = write(tmp_path / "w", [[1, 2]])
    before = read_content(prefix)
    with pytest.raises(KeyboardInterrupt), IndexedDatasetWriter(prefix, np.dtype("u2")) as writer:
        writer.append([3])
        raise KeyboardInterrupt
    assert read_content(prefix) == before
    assert sorted(os.listdir(tmp_path)) == ["w.bin", "w.idx"]


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_full_disk_is_said_and_cleaned_up(tmp_path, suffix):
    prefix = str(tmp_path / "w")
    with (
        pytest.raises(UserError, match="the disk is full"),
        IndexedDatasetWriter(prefix, np.dtype("u2")) as writer,
    ):
        name = name_unfinished(f"{prefix}{suffix}")
        (descriptor,) = (
            path.name for path in Path("/proc/self/fd").iterdir() if leads_to(path, name)
        )
        with open("/dev/full", "wb") as full:  # refuses every write, like a full disk
            os.dup2(full.fileno(), int(descriptor))
        for _ in range(3):
            writer.append(np.zeros(100_000, np.uint16))
    assert os.listdir(tmp_path) == []


def leads_to(link, name):
    with suppress(OSError):
        return os.readlink(link) == name


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_planted_link_is_not_written_through(tmp_path, suffix):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    os.symlink("victim", name_unfinished(str(tmp_path / f"w{suffix}")))
    os.symlink("victim", tmp_path / f"w{suffix}")
    prefix = write(tmp_path / "w", [[1, 2]])
    assert IndexedDataset(prefix).get_sequence(0).tolist() == [1, 2]
    assert victim.read_text() == "precious"


def test_a_file_that_outgrows_its_limit_leaves_nothing(tmp_path):
    code = (
        "import numpy as np\n"
        "from megaframe.data.indexed_dataset_writer import IndexedDatasetWriter\n"
        "from megaframe.errors import report_errors\n"
        f"with report_errors(), IndexedDatasetWriter({str(tmp_path / 'm')!r}, np.dtype('u2')) as "
        "writer:\n"
        "    for _ in range(3): writer.append(np.zeros(50_000, np.uint16))"
    )
    process = subprocess.run(
        [sys.executable, "-c", code],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000)),
        capture_output=True,
        text=True,
    )
    assert process.returncode == 2
    assert process.stderr.startswith("error: cannot write") and "File too large" in process.stderr
    assert not list(tmp_path.glob("m*"))
