"""The folder of an unfinished run may be somebody else's: nothing outside of it is touched, nothing
in it that is not of a run is deleted, and a damaged journal is one message or a part done again."""

import json
import os
import shutil

import pytest
import xxhash
from preprocess_runs import decode_documents, interrupt_run, run

from megaframe.errors import UserError

TEXTS = [f"document {number} {'x' * 30}" for number in range(40)]
LOCK, JOURNAL = "out.parts/lock", "out.parts/journal.jsonl"


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim/file").write_text("precious")
    yield path
    assert os.listdir(tmp_path / "victim") == ["file"]
    assert (tmp_path / "victim/file").read_text() == "precious"


@pytest.mark.parametrize("name", ["out.parts", LOCK, JOURNAL, "out.parts/tokens.bin"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_planted_link_is_neither_followed_nor_emptied(corpus, name, overwrite):
    link = corpus.parent / name
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(corpus.parent / ("victim" if name == "out.parts" else "victim/file"))
    if name.endswith("tokens.bin"):  # a link in a folder that begins anew is deleted itself
        run([corpus], corpus.parent / "out", overwrite=overwrite)
        return
    with pytest.raises(UserError, match=rf"cannot write .*{link.name}: A symbolic link"):
        run([corpus], corpus.parent / "out", overwrite=overwrite)
    assert link.is_symlink() and not list(corpus.parent.glob("out.[bi]*"))


@pytest.mark.parametrize("name", [LOCK, JOURNAL])
def test_a_pipe_is_not_waited_for(corpus, name):
    (corpus.parent / "out.parts").mkdir()
    os.mkfifo(corpus.parent / name)
    with pytest.raises(UserError, match="Not a regular file"):
        run([corpus], corpus.parent / "out")


def test_a_folder_of_the_user_with_such_a_name_keeps_its_files(corpus):
    own = corpus.parent / "out.parts/part-000.jsonl"
    own.parent.mkdir()
    own.write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(UserError, match=r"holds 'part-000.jsonl', which is not of an unf"):
            run([corpus], corpus.parent / "out", overwrite=overwrite)
    assert os.listdir(own.parent) == [own.name] and own.read_text() == "mine"


@pytest.mark.parametrize("line", [b"{", b"[]", b"7", b"[" * 100_000, b"\xff", b"null", b"x" * 1000])
def test_a_journal_whose_first_line_is_damaged_is_one_message(corpus, line):
    (corpus.parent / "out.parts").mkdir()
    (corpus.parent / JOURNAL).write_bytes(line + b"\n{}\n")
    with pytest.raises(UserError, match=r"journal.jsonl is damaged; begin again with --overwrite"):
        run([corpus], corpus.parent / "out")
    run([corpus], corpus.parent / "out", overwrite=True)
    assert decode_documents(corpus.parent / "out") == TEXTS


VALUES = (None, True, -1, 0, 2**70, 0.5, float("nan"), "x", [], {}, [None, None])


def test_a_damaged_part_is_done_again(corpus, small_parts):
    output, folder = corpus.parent / "out", corpus.parent / "out.parts"
    interrupt_run(corpus, output, 1500)
    copy = corpus.parent / "copy"
    folder.rename(copy)
    first, *lines = (copy / "journal.jsonl").read_text().splitlines()
    entry = json.loads(lines[0])
    changes = [{key: value} for key in entry for value in VALUES]
    for change in [*changes, *({key: ...} for key in entry)]:
        shutil.copytree(copy, folder)
        changed = {key: value for key, value in (entry | change).items() if value is not ...}
        written = "\n".join([first, json.dumps(changed), *lines[1:], ""])
        (folder / "journal.jsonl").write_text(written)
        run([corpus], output, overwrite=False)
        assert decode_documents(output) == TEXTS, change
        for suffix in (".bin", ".idx"):
            os.unlink(f"{output}{suffix}")


def test_a_part_is_not_longer_than_its_file(corpus, small_parts):
    interrupt_run(corpus, corpus.parent / "out", 1500)
    path = corpus.parent / JOURNAL
    first, line = path.read_text().splitlines()
    with open(corpus.parent / "out.parts/tokens.bin", "rb") as file:
        checksum = xxhash.xxh3_128_hexdigest(file.read())  # what an attacker would write
    entry = json.loads(line) | {"tokens": 2**50}
    entry["checksums"][0] = checksum
    path.write_text(f"{first}\n{json.dumps(entry)}\n")
    assert run([corpus], corpus.parent / "out").resumed.tokens == 0
    assert decode_documents(corpus.parent / "out") == TEXTS
