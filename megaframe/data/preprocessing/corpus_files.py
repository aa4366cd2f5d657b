"""The files of a corpus: which ones a command names, and how each is read.

A folder stands for all files below it that are read by their suffix, in the order of their paths.
What is hidden in it, and the token files and unfinished runs that preprocessing leaves, are no part
of a corpus. No link to a folder is followed, because it may lead back.

    jsonl    .jsonl .json .ndjson   an object per line; the text is one of its keys
    csv      .csv                   a row per document below one of names; the text is a column
    tsv      .tsv                   the same with tabs
    parquet  .parquet               a row per document; the text is a column of strings
    text     .txt .text             the whole file is one document or, with `split_blank_lines`,
                                    each paragraph is one; blank lines separate paragraphs
All but Parquet files may also end in .gz or .zst. Files and folders may be under URLs that fsspec
knows, such as s3:// and https://, and are read from there as they are.
"""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import BinaryIO, get_args

from megaframe.config.data import TextFormat as Format
from megaframe.config.url import find_url_mistake, is_url
from megaframe.data.preprocessing.journal import JOURNAL, PARTS
from megaframe.data.token_file_record import SUFFIX
from megaframe.errors import UserError
from megaframe.io.remote_path import RemoteEntry, RemotePath
from megaframe.io.untrusted import escape_unprintable, open_file

FORMATS: tuple[Format, ...] = get_args(Format)
COMPRESSED = (".gz", ".zst")
_SUFFIXES: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".json": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".txt": "text",
    ".text": "text",
}
_MOST_KINDS, _MOST_NAMES = 8, 5


class InputError(UserError):
    """An input file that cannot be read as a corpus."""


@dataclass(frozen=True)
class CorpusFormat:
    """How to read files of a corpus.

    Attributes:
        key: Key of a jsonl object, or column of a CSV, TSV or Parquet file, that has the text.
        format: Format of the files; `auto` goes by each file's suffix.
        split_blank_lines: Plain text has a document per paragraph, not per file.
        skip_broken: Leave out rows that cannot be used, and plain text that is not UTF-8, and count
            them, instead of refusing the first.
        where: Conditions on the fields of a row, all of which hold for the rows that are read; see
            `row_filters.py`.
    """

    key: str = "text"
    format: Format = "auto"
    split_blank_lines: bool = False
    skip_broken: bool = False
    where: tuple[str, ...] = ()


@dataclass(frozen=True)
class CorpusFile:
    """A file of a corpus, and how it is read."""

    path: str
    reading: CorpusFormat = CorpusFormat()

    def resolve_format(self) -> CorpusFile:
        """Return the same with the format that `auto` means.

        Raises:
            InputError: For an unknown suffix.
        """
        if self.reading.format != "auto":
            return self
        format = _find_format(self.path)
        if format is not None:
            return replace(self, reading=replace(self.reading, format=format))
        raise InputError(
            f"{self.path}: unknown kind of file {_find_suffix(self.path)!r}; {_describe_known()}"
        )


def add_reading_options(parser: argparse.ArgumentParser, option: str = "--input") -> None:
    """Add the options that say how a corpus is read. option: that which names its files."""
    add = parser.add_argument
    add("--key", nargs="+", default=["text"], metavar="KEY", help="jsonl key or column of the "
        f"text: one for all, or one for each {option} (default: text)")  # fmt: skip
    add("--format", choices=FORMATS, default="auto", help="of all files (default: by suffix)")
    add("--split-blank-lines", action="store_true", help="plain text: a document per paragraph")
    add("--where", nargs="+", default=[], metavar="CONDITION", help="read rows for which all hold, "
        "such as lang=en 'score>=0.5'")  # fmt: skip
    add("--skip-broken", action="store_true", help="leave out and count rows that cannot be used")


def list_readings(
    options: argparse.Namespace, inputs: Sequence[str], option: str = "--input"
) -> list[CorpusFile]:
    """Return each input with the way to read it.

    Args:
        options: What the options of `add_reading_options` gave.
        inputs: Files and folders.
        option: That which gave them.

    Raises:
        UserError: If there are neither one key nor as many as inputs.
    """
    keys: Sequence[str] = options.key
    if len(keys) not in (1, len(inputs)):
        raise UserError(
            f"--key gives {len(keys)} keys ({', '.join(keys)}) for {len(inputs)} of {option}; give "
            "one for all, or one for each in the same order (plain text has none: any word)"
        )
    keys = keys if len(keys) > 1 else [*keys] * len(inputs)
    shared = CorpusFormat(
        "", options.format, options.split_blank_lines, options.skip_broken, tuple(options.where)
    )
    return [
        CorpusFile(path, replace(shared, key=key)) for path, key in zip(inputs, keys, strict=True)
    ]


def list_corpus_files(inputs: Iterable[CorpusFile]) -> tuple[list[CorpusFile], list[str]]:
    """Return the files of a corpus, each with its format, and a line for each folder that says
    what was found.

    Args:
        inputs: Files and folders, and how they are read.

    Raises:
        InputError: For what does not exist, a file of an unknown kind, and a folder without a file
            that is read.
    """
    files: list[CorpusFile] = []
    notes: list[str] = []
    for given in inputs:
        paths = _list_paths(given.path)
        if paths == [given.path.rstrip("/")]:
            files.append(given.resolve_format())
            continue
        found, left_out = _select_files(given, paths)
        if not found:
            raise InputError(_describe_empty_folder(given.path, left_out))
        kinds = Counter[str](file.reading.format for file in found)
        note = f"{given.path}: {len(found):,} files ({_format_counts(kinds)})"
        if left_out:
            note += f"; left out {left_out.total():,} of other kinds ({_format_counts(left_out)})"
        files += found
        notes.append(escape_unprintable(note))
    return files, notes


def list_files(path: str) -> list[tuple[str, int]]:
    """Return the path and the size in bytes of all that may be of a corpus: a file, or all files
    below a folder, in the order of their names.

    Raises:
        InputError: For what does not exist or cannot be read.
    """
    if is_url(path):
        return [(entry.url, entry.size) for entry in _list_urls(path)]
    files = [file for file in _list_paths(path) if not os.path.isdir(file)]
    return [(file, measure_input(file)[0]) for file in files]


def list_names(files: Sequence[CorpusFile]) -> str:
    """Return the names of files for a message: the first ones, and how many more there are."""
    names = ", ".join(file.path for file in files[:_MOST_NAMES])
    return f"{names} and {len(files) - _MOST_NAMES:,} more" * (len(files) > _MOST_NAMES) or names


def open_input(path: str, buffering: int = -1) -> BinaryIO:
    """Open a file of a corpus for reading, here or under a URL.

    Args:
        path: The file.
        buffering: As of `open`.

    Raises:
        InputError: For a URL that is refused.
        OSError: For a file that cannot be read.
    """
    if not is_url(path):
        return open_file(path, buffering)
    from megaframe.io.remote_reader import open_remote_file

    return open_remote_file(parse_url(path), buffering)


def parse_url(text: str) -> RemotePath:
    """Return the file or folder that a URL names. Raises `InputError` for one that is refused."""
    mistake = find_url_mistake(text)
    if mistake is None:
        try:
            from megaframe.io.remote_requests import find_scheme_mistake
        except ImportError:
            raise InputError(f"{text}: URLs need: pip install 'megaframe[cloud]'") from None
        mistake = find_scheme_mistake(RemotePath(text))
    if mistake is not None:
        raise InputError(mistake)
    return RemotePath(text.rstrip("/"))


def measure_input(path: str) -> tuple[int, int]:
    """Return a file's size in bytes and modification time in nanoseconds, 0 under a URL.

    Raises:
        InputError: If it cannot be read.
    """
    try:
        if is_url(path):
            from megaframe.io.remote_reader import measure_remote_file

            return measure_remote_file(parse_url(path)), 0
        with open_file(path) as file:
            status = os.fstat(file.fileno())
            return status.st_size, status.st_mtime_ns
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None


def suggest_keys(key: str, names: list[str]) -> str:
    """Return a text, for the message about a missing key, that names those that there are.

    Args:
        key: The key that is missing.
        names: The keys or columns that there are.
    """
    nearest = get_close_matches(key, names, n=1, cutoff=0.0)
    listed = ", ".join(name[:60] for name in names[:20]) or "none"
    return f"there are: {listed}" + (f" (nearest: --key {nearest[0][:60]})" if nearest else "")


def _list_paths(path: str) -> list[str]:
    """Return the paths of all that may be of a corpus in a folder, in order, or that of a file."""
    if is_url(path):
        return [entry.url for entry in _list_urls(path)]
    if not os.path.lexists(path):
        raise InputError(f"{path}: there is no such file or folder")
    return list(_walk(path)) if os.path.isdir(path) else [path]


def _list_urls(url: str) -> list[RemoteEntry]:
    root = parse_url(url)
    from megaframe.io.remote_reader import list_remote_files

    try:
        found = list_remote_files(root)
    except OSError as error:
        raise InputError(f"cannot read {url}: {error.strerror}") from None
    below = sorted((entry.url.removeprefix(str(root)).split("/"), entry) for entry in found)
    return [
        entry
        for names, entry in below
        if not any(name.startswith(".") for name in names) and not entry.url.endswith(SUFFIX)
    ]


def _select_files(
    folder: CorpusFile, paths: Iterable[str]
) -> tuple[list[CorpusFile], Counter[str]]:
    """Return the files among these paths of a folder that are read, and the number of others by
    suffix."""
    found: list[CorpusFile] = []
    left_out: Counter[str] = Counter()
    for path in paths:
        file = CorpusFile(path, folder.reading)
        if not is_url(path) and os.path.isdir(path):
            left_out["links to folders"] += 1
        elif folder.reading.format != "auto" or _find_format(path):
            found.append(file.resolve_format())
        else:
            left_out[_find_suffix(path) or "no suffix"] += 1
    return found, left_out


def _walk(folder: str) -> Iterator[str]:
    """Yield the paths of what may be of a corpus below a folder: files, and links to folders."""
    waiting = _list_folder(folder)
    while waiting:
        entry = waiting.pop()
        if entry.name.startswith(".") or entry.name.endswith(SUFFIX):
            continue
        if not entry.is_dir(follow_symlinks=False):
            yield entry.path
        elif not (entry.name.endswith(PARTS) and os.path.lexists(f"{entry.path}/{JOURNAL}")):
            waiting += _list_folder(entry.path)


def _list_folder(folder: str) -> list[os.DirEntry[str]]:
    """Return what is in a folder, the last name first."""
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name, reverse=True)
    except OSError as error:
        raise InputError(f"cannot read {folder}: {error.strerror}") from None


def _find_format(path: str) -> Format | None:
    """Return the format that a file's suffix means, if it means one."""
    stem, suffix = os.path.splitext(path)
    return _SUFFIXES.get(os.path.splitext(stem)[1] if suffix in COMPRESSED else suffix)


def _find_suffix(path: str) -> str:
    """Return the suffix of a file, before one of compression."""
    stem, suffix = os.path.splitext(path)
    return os.path.splitext(stem)[1] + suffix if suffix in COMPRESSED else suffix


def _describe_known() -> str:
    return (
        f"known are {', '.join(_SUFFIXES)}, also with {' or '.join(COMPRESSED)}, or name it with "
        f"--format {'|'.join(FORMATS[1:])}"
    )


def _describe_empty_folder(path: str, left_out: Counter[str]) -> str:
    if not left_out:
        return f"{path} has no file to read"
    return (
        f"{path} has no file of a known kind, but {left_out.total():,} of others "
        f"({_format_counts(left_out)}); {_describe_known()}, which then is that of all of them"
    )


def _format_counts(counts: Counter[str]) -> str:
    """Return counts by kind, the most frequent first."""
    listed = [f"{kind[:60]} {count:,}" for kind, count in counts.most_common(_MOST_KINDS)]
    return ", ".join(listed + ["..."] * (len(counts) > _MOST_KINDS))
