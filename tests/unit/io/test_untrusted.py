"""Files and texts from elsewhere: what is no plain file is refused at once, what is nested or
aliased without bound is refused, and messages drive no terminal and repeat no secret."""

import argparse
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaframe.errors import UserError, report_errors
from megaframe.io import untrusted
from megaframe.io.untrusted import (
    MAX_DEPTH,
    escape_unprintable,
    make_integer_parser,
    mask_secrets,
    open_file,
    parse_json,
    parse_yaml,
    read_file,
)


def test_only_regular_files_are_opened_and_nothing_is_waited_for(tmp_path):
    (tmp_path / "file").write_bytes(b"text")
    (tmp_path / "link").symlink_to("file")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "endless").symlink_to("/dev/zero")
    (tmp_path / "loop").symlink_to("loop")
    for name in ("file", "link"):
        with open_file(tmp_path / name) as file:
            assert file.read() == b"text"
    for name in ("pipe", "endless", ".", "loop", "nowhere", "x" * 300, "nul\0", "half\ud800"):
        with pytest.raises(OSError) as error:
            open_file(f"{tmp_path}/{name}")
        assert error.value.strerror and "\0" not in str(error.value.filename)


def test_a_file_over_its_limit_is_not_read(tmp_path):
    path = tmp_path / "sparse"
    path.write_bytes(b"12345")
    assert read_file(path, 5) == b"12345"
    os.truncate(path, 1 << 40)
    with pytest.raises(OSError, match="larger than 5 bytes"):
        read_file(path, 5)


def test_json_and_yaml_are_bounded(monkeypatch):
    deepest = b"[" * MAX_DEPTH + b"]" * MAX_DEPTH
    assert parse_json(deepest) == parse_yaml(deepest)
    for depth in (MAX_DEPTH + 1, 100_000):
        with pytest.raises(ValueError, match="nested more than"):
            parse_json(b"[" * depth + b"]" * depth)
        with pytest.raises(ValueError, match="line 1: nested more than"):
            parse_yaml(b"[" * depth + b"]" * depth)
    monkeypatch.setattr(untrusted, "MAX_NODES", 5000)
    assert len(parse_yaml(b"[" + b"1," * 4999 + b"]")) == 4999
    with pytest.raises(ValueError, match="more than 5,000 keys and values"):
        parse_yaml(b"[" + b"1," * 5000 + b"]")
    with pytest.raises(ValueError, match="line 2: alias"):
        parse_yaml(b"a: &a [x]\nb: [*a, *a]")
    for text in (b"a: b\n? {hunter22@host", b"hunter22@host: \0", b"hunter22@host: \xff"):
        with pytest.raises(ValueError) as error:  # half of a URL's secret has no known form
            parse_yaml(text)
        assert "hunter22" not in str(error.value)
    assert parse_json(b"1" * 400) == float("1" * 400) and parse_json(b"9" * 5000) == float("inf")
    tagged = b"{a: ~, b: 1_000, c: !!python/object:os.system x, ? [k] : v}"
    assert parse_yaml(tagged) == {"a": None, "b": "1_000", "c": "x"}


@given(st.text() | st.sampled_from(["\x1b[31m\x07", "\ud800", "a\u202eb", "one\ntwo\r", "\x9b"]))
def test_what_is_shown_drives_no_terminal(text):
    escaped = escape_unprintable(text)
    assert all(character.isprintable() or character == "\n" for character in escaped)
    assert escape_unprintable(escaped.encode().decode()) == escaped
    assert str(UserError(text)) == escape_unprintable(mask_secrets(text))


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("see s3://key:PA/SS@WORD@bucket/x.", "see s3://***@bucket/x."),
        ("https://TOKEN@host/x and sftp://user@host", "https://***@host/x and sftp://user@host"),
        (
            "'https://host/x?sig=SECRET' 'abfs://box/x#SECRET'",
            "'https://host/x?***' 'abfs://box/x#***'",
        ),
        ("https:/user:SECRET@host s3:/bucket/x?k=SECRET", "https:/***@host s3:/bucket/x?***"),
        ("AKIAABCDEFGHIJKLMNOP, Signature=abc%2F1 x", "***, Signature=*** x"),
        ("hf_" + "aB3" * 12, "***"),
        (
            "https://host/x, s3://bucket/x: no such thing?",
            "https://host/x, s3://bucket/x: no such thing?",
        ),
    ],
)
def test_secrets_are_masked_by_their_form(text, masked):
    assert mask_secrets(text) == masked
    assert str(UserError(text)) == masked


def test_secrets_of_settings_are_masked_by_their_names():
    settings = {
        "AWS_SECRET_KEY": "abcdef",
        "client": [{"token": "longer-abcdef"}],
        "user": "name42",
    }
    assert mask_secrets("longer-abcdef abcdef name42", settings) == "*** *** name42"


@pytest.mark.parametrize("text", ["0", "-1", "1_000", "١٢", "1.0", "", "65536", "9" * 5000, "²"])
def test_a_number_in_an_argument_is_in_its_range(text, capsys):
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=make_integer_parser(1, 65535))
    assert parser.parse_args(["--port", "65535"]).port == 65535
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(["--port", text])
    assert ended.value.code == 2 and "from 1 to 65535" in capsys.readouterr().err


def test_a_name_that_no_file_can_have_is_one_line(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended, report_errors():
        (tmp_path / ("x" * 300)).is_dir()
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith(": File name too long\n")
    with pytest.raises(FileNotFoundError), report_errors():  # which another try may mend
        (tmp_path / "nowhere").read_bytes()
