"""The folder of an unfinished preprocessing run: the token file so far, and a journal of its parts.

Parts are appended in order, so each token is written once. The first line of the journal describes
the run and its input files; each further line is a part, with its counts and the checksums of what
it added. Nothing is flushed to disk until the file is finished, because with a fast tokenizer
flushing would take longer than everything else. What a kill or a power failure leaves half written
is not in the journal or fails its checksum, and is cut off with everything after it.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from megaframe.data.indexed_dataset import HEADER
from megaframe.data.indexed_dataset_writer import IndexedDatasetWriter, write_failure
from megaframe.data.token_file_record import TokenFileRecord, TokenizerRecord, write_record
from megaframe.errors import UserError
from megaframe.io.regular_file import (
    delete_file,
    list_folder,
    make_folder,
    open_append,
    open_update,
)
from megaframe.io.untrusted import open_file, parse_json, read_file

JournalEntry = dict[str, Any]
_FINISHING: JournalEntry = {"finishing": True}
"""The last line of the journal. Once it is written, files with the final names are of this run."""
PARTS, JOURNAL = ".parts", "journal.jsonl"
"""End of the name of the folder, and the name of the journal in it."""
_LOCK = "lock"
_OWN_NAMES = re.compile(
    r"lock|journal\.jsonl|tokens\.(bin|idx)|[0-9]{8,}\.(bin|idx)(\.[0-9]+\.unfinished)?"
)
_DOCUMENTS_READ = 4096
_LARGEST_JOURNAL = 1 << 30
"""Bytes; a line has about 200 and a part up to 16 MB, so this is enough for 80 TB."""


@dataclass(frozen=True)
class CorpusCounts:
    """Counts of one part, or sums over several.

    Attributes:
        documents: Number of documents in the token file.
        empty: Number of documents without a token, which are left out.
        tokens: Number of tokens.
        size: Bytes of input after decompression.
        disk_bytes: Bytes of input as stored on disk.
        broken: Number of rows that cannot be used, which are left out.
        filtered: Number of rows for which a condition does not hold, which are left out.
        duplicates: Number of documents with the same tokens as one before, which are left out.
    """

    documents: int = 0
    empty: int = 0
    tokens: int = 0
    size: int = 0
    disk_bytes: int = 0
    broken: int = 0
    filtered: int = 0
    duplicates: int = 0

    def __add__(self, other: CorpusCounts) -> CorpusCounts:
        return CorpusCounts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


@dataclass(frozen=True)
class EncodedDocuments:
    """Consecutive documents in the form in which the token file stores them.

    Attributes:
        tokens: Tokens of all documents, back to back.
        lengths: Number of tokens of each document, i32[documents].
        empty: Number of documents without a token, which are left out.
        broken: Number of rows that cannot be used, which are left out.
        named: What is wrong with the first of these.
        filtered: Number of rows for which a condition does not hold, which are left out.
        duplicates: Number of documents that were there before, which are left out.
    """

    tokens: NDArray
    lengths: NDArray[np.int32]
    empty: int
    broken: int = 0
    named: tuple[str, ...] = ()
    filtered: int = 0
    duplicates: int = 0


class PreprocessJournal:
    """The folder `OUTPUT.parts`, locked by one run at a time.

    parts: number of finished parts. total: their counts. home: the folder that it is in, below
    which no link is followed.
    """

    def __init__(self, output: str, dtype: np.dtype) -> None:
        self.path, self.home = f"{output}{PARTS}", os.path.dirname(output) or "."
        self.parts, self.total = 0, CorpusCounts()
        self._output, self._dtype = output, dtype
        self._journal = os.path.join(self.path, JOURNAL)
        self._prefix = os.path.join(self.path, "tokens")

    def make(self) -> None:
        """Make the folder if it is missing, and see that it is none of somebody else."""
        os.makedirs(self.home, exist_ok=True)
        make_folder(self.path, inside=self.home)
        self._list_own_names()

    def start(self, manifest: JournalEntry, overwrite: bool) -> None:
        """Continue the interrupted run with this manifest, or begin a new one.

        Args:
            manifest: Describes the job; a run continues only with an equal one.
            overwrite: Drop an unfinished run with another manifest, and replace existing output.

        Raises:
            UserError: If the folder contains an unfinished run with another manifest, or the output
                exists, unless `overwrite` is given.
        """
        journal = self._read(overwrite)
        previous = journal[0][0] if journal else None
        if previous == manifest:
            self._continue(journal)
        elif previous is not None and not overwrite:
            differing = [name for name in manifest if previous.get(name) != manifest[name]]
            raise UserError(
                f"{self.path} holds an unfinished run with other {' and '.join(differing)}; repeat "
                f"that run, or drop it with --overwrite"
            )
        else:
            final = [f"{self._output}{suffix}" for suffix in (".idx", ".bin")]
            existing = [path for path in final if os.path.lexists(path)]
            if existing and not overwrite:
                raise UserError(f"{existing[0]} already exists; replace it with --overwrite")
            self._clear(_LOCK)
            self._record(manifest)
        self._writer = IndexedDatasetWriter(
            self._output,
            self._dtype,
            resume_prefix=self._prefix,
            documents=self.total.documents,
            tokens=self.total.tokens,
        )

    def append(self, counts: CorpusCounts, batches: Iterable[EncodedDocuments]) -> None:
        """Append the next part.

        Args:
            counts: Counts of its input; those of the batches are added here.
            batches: The encoded documents of the part, in order.
        """
        tokens, lengths = xxhash.xxh3_128(), xxhash.xxh3_128()
        for batch in batches:
            self._writer.append_batch(batch.tokens, batch.lengths)
            tokens.update(batch.tokens.data)
            lengths.update(batch.lengths.data)
            documents, tokens_read = batch.lengths.size, batch.tokens.size
            left_out = CorpusCounts(
                broken=batch.broken, filtered=batch.filtered, duplicates=batch.duplicates
            )
            counts += CorpusCounts(documents, batch.empty, tokens_read) + left_out
        self._writer.flush()
        self._record({"checksums": [tokens.hexdigest(), lengths.hexdigest()], **asdict(counts)})
        self.parts += 1
        self.total += counts

    def read_finished(self) -> Iterator[EncodedDocuments]:
        """Yield the documents of the finished parts, a few thousand at a time."""
        tokens_path, index_path = self._list_files()
        with open_file(index_path, inside=self.home) as file:
            file.seek(HEADER.size)
            content = file.read(4 * self.total.documents)
        lengths = np.frombuffer(content, "<i4")
        with open_file(tokens_path, inside=self.home) as file:
            for start in range(0, lengths.size, _DOCUMENTS_READ):
                part = lengths[start : start + _DOCUMENTS_READ]
                content = file.read(int(part.sum(dtype=np.int64)) * self._dtype.itemsize)
                yield EncodedDocuments(np.frombuffer(content, self._dtype), part, 0)

    def finish(self, tokenizer: TokenizerRecord, eod: int) -> None:
        """Complete the token file, rename it to its final name and remove the folder.

        Args:
            tokenizer: Which made the tokens.
            eod: The id that ends its documents.
        """
        self._record(_FINISHING)
        self._writer.finish()
        total = self.total
        counts = total.documents, total.tokens, total.duplicates
        write_record(self._output, TokenFileRecord(tokenizer, eod, *counts))
        self.remove()

    def close(self) -> None:
        """Close the token file and leave what is finished, so that the job can be continued."""
        self._writer.abandon()

    def remove(self) -> None:
        """Delete the folder."""
        self._clear()
        os.rmdir(self.path)

    def remove_if_new(self) -> None:
        """Remove the folder if no run has begun in it."""
        if set(self._list_own_names()) <= {_LOCK}:
            self.remove()

    def _record(self, entry: JournalEntry) -> None:
        with open_append(self._journal, inside=self.home) as file:
            file.write(f"{json.dumps(entry)}\n".encode())

    def _read(self, overwrite: bool) -> list[tuple[JournalEntry, int]]:
        """Return the valid lines at the start of the journal, and the byte where each ends.

        Raises:
            UserError: If not even the first line is valid, unless `overwrite` is given.
        """
        try:
            content = read_file(self._journal, _LARGEST_JOURNAL, inside=self.home)
        except FileNotFoundError:
            return []
        journal: list[tuple[JournalEntry, int]] = []
        end = 0
        for line in content.split(b"\n")[:-1]:
            end += len(line) + 1
            entry = _parse_entry(line, first=not journal)
            if entry is None:
                break
            journal.append((entry, end))
        if content and not journal and not overwrite:
            raise UserError(f"{self._journal} is damaged; begin again with --overwrite")
        return journal

    def _continue(self, journal: list[tuple[JournalEntry, int]]) -> None:
        """Keep the parts up to the first whose checksums do not match, and cut off the rest."""
        if journal[-1][0] == _FINISHING:
            self._undo_renames()
            journal.pop()
        parts = [entry for entry, _ in journal[1:]]
        sizes = [entry["tokens"] * self._dtype.itemsize for entry in parts]
        tokens = self._list_checksums(".bin", 0, sizes)
        lengths = self._list_checksums(
            ".idx", HEADER.size, [4 * entry["documents"] for entry in parts]
        )
        for entry, *checksums in zip(parts, tokens, lengths, strict=False):
            if entry["checksums"] != checksums:
                break
            self.parts += 1
            self.total += CorpusCounts(
                **{field.name: entry[field.name] for field in fields(CorpusCounts)}
            )
        with open_update(self._journal, inside=self.home) as file:
            file.truncate(journal[self.parts][1])
        self._clear(_LOCK, *map(os.path.basename, (self._journal, *self._list_files())))

    def _list_checksums(self, suffix: str, offset: int, sizes: Iterable[int]) -> Iterator[str]:
        """Yield the checksums of consecutive ranges of an unfinished file, as far as it has them.

        offset: start of the first range. sizes: bytes of each range.
        """
        path = f"{self._prefix}{suffix}"
        with suppress(FileNotFoundError), open_file(path, inside=self.home) as file:
            file.seek(offset)
            for size in sizes:
                digest = xxhash.xxh3_128()
                while size and (chunk := file.read(min(size, 1 << 20))):
                    digest.update(chunk)
                    size -= len(chunk)
                if size:
                    return
                yield digest.hexdigest()

    def _list_files(self) -> tuple[str, str]:
        return f"{self._prefix}.bin", f"{self._prefix}.idx"

    def _undo_renames(self) -> None:
        """Undo the renames of a run that was killed after the first of them, before it ended."""
        for path in self._list_files():
            if not os.path.lexists(path):
                with suppress(FileNotFoundError):
                    os.replace(f"{self._output}{path.removeprefix(self._prefix)}", path)

    def _clear(self, *keep: str) -> None:
        journal = os.path.basename(self._journal)
        names = set(self._list_own_names()) - set(keep)
        for name in sorted(names, key=journal.__eq__):  # the journal last, for one who is killed
            delete_file(os.path.join(self.path, name), inside=self.home)

    def _list_own_names(self) -> list[str]:
        """Return the names in the folder.

        Raises:
            UserError: If one of them is not of a run, because all of them will be deleted.
        """
        names = list_folder(self.path, inside=self.home)
        foreign = sorted(name for name in names if not _OWN_NAMES.fullmatch(name))
        if foreign:
            raise UserError(
                f"{self.path} holds {foreign[0]!r}, which is not of an unfinished run; move it "
                "away, or give another --output"
            )
        return names


def _parse_entry(line: bytes, *, first: bool) -> JournalEntry | None:
    """Return a line of the journal, or None if it is damaged. first: whether it describes the run,
    and not a part."""
    try:
        entry = parse_json(line)
    except ValueError:
        return None
    if not isinstance(entry, dict):
        return None
    counts = [entry.get(field.name) for field in fields(CorpusCounts)]
    is_part = isinstance(entry.get("checksums"), list) and all(
        type(count) is int and count >= 0 for count in counts
    )
    return entry if first or is_part or entry == _FINISHING else None


@contextmanager
def open_journal(
    output: str, dtype: np.dtype, manifest: JournalEntry, overwrite: bool
) -> Iterator[PreprocessJournal]:
    """Create or continue `OUTPUT.parts` and lock it.

    Args:
        output: Path of the output, without suffix.
        dtype: Dtype of the tokens in `OUTPUT`.
        manifest: See `PreprocessJournal.start`.
        overwrite: See `PreprocessJournal.start`.

    Raises:
        UserError: From `PreprocessJournal.start`, for failed writes, and if another process has
            locked it.
    """
    folder = PreprocessJournal(output, dtype)
    try:
        folder.make()
        with open_update(os.path.join(folder.path, _LOCK), inside=folder.home) as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(f"another process is writing {output}") from None
            try:
                folder.start(manifest, overwrite)
            except UserError:
                folder.remove_if_new()
                raise
            try:
                yield folder
            finally:
                folder.close()
    except OSError as error:
        raise UserError(write_failure(error.filename or output, error)) from None
