"""The folder of an unfinished preprocessing run: the token file so far, and a journal of its parts.

Parts are appended in order, so that each token is written once. The first line of the journal says
what the run makes of which files; each further one is the next part, with its counts and the
checksum of what it added. Nothing here waits for the disk until the file is finished, which would
cost more than all else beside a fast tokenizer: what a kill or a loss of power leaves half written
is not in the journal or fails its checksum, and is cut off with all that follows.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from megaframe.data.indexed import TokenFileWriter, write_failure
from megaframe.data.token_index import HEADER
from megaframe.errors import UserError

Manifest = dict[str, Any]
_FINISHING: Manifest = {"finishing": True}
"""The last line of the journal: what has the final names from here on is of this run."""


@dataclass(frozen=True)
class Counts:
    """What a part, or all of them, came to.

    empty:      documents without a token, which are left out.
    size:       bytes of input without compression.
    disk_bytes: bytes of input as it lies on the disk.
    """

    documents: int = 0
    empty: int = 0
    tokens: int = 0
    size: int = 0
    disk_bytes: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


@dataclass(frozen=True)
class Batch:
    """Documents that follow one another, as the token file holds them.

    tokens:  of all of them, back to back.
    lengths: tokens of each, i32[documents].
    empty:   documents without a token, which are left out.
    """

    tokens: NDArray
    lengths: NDArray[np.int32]
    empty: int


class PartsFolder:
    """`OUTPUT.parts`, held by one run at a time. `total` counts its first `parts` parts."""

    def __init__(self, output: str, dtype: np.dtype) -> None:
        self.path = f"{output}.parts"
        self.parts, self.total = 0, Counts()
        self._output, self._dtype = output, dtype
        self._journal = os.path.join(self.path, "journal.jsonl")
        self._kept = os.path.join(self.path, "tokens")

    def start(self, manifest: Manifest, overwrite: bool) -> None:
        """Continue the interrupted run of this manifest, or begin one. Raises `UserError`."""
        journal = self._read()
        found = journal[0][0] if journal else None
        if found == manifest:
            self._continue(journal)
        elif found is not None and not overwrite:
            differing = [name for name in manifest if found.get(name) != manifest[name]]
            raise UserError(
                f"{self.path} holds an unfinished run with other {' and '.join(differing)}; repeat "
                f"that run, or drop it with --overwrite"
            )
        else:
            final = [f"{self._output}{suffix}" for suffix in (".idx", ".bin")]
            existing = [path for path in final if os.path.exists(path)]
            if existing and not overwrite:
                raise UserError(f"{existing[0]} already exists; replace it with --overwrite")
            self._clear("lock")
            self._record(manifest)
        self._writer = TokenFileWriter(
            self._output,
            self._dtype,
            kept=self._kept,
            documents=self.total.documents,
            tokens=self.total.tokens,
        )

    def append(self, counts: Counts, batches: Iterable[Batch]) -> None:
        """Append the next part. counts: of its input; what the batches hold is added here."""
        tokens, lengths = xxhash.xxh3_128(), xxhash.xxh3_128()
        for batch in batches:
            self._writer.append_batch(batch.tokens, batch.lengths)
            tokens.update(batch.tokens.data)
            lengths.update(batch.lengths.data)
            counts += Counts(batch.lengths.size, batch.empty, batch.tokens.size)
        self._writer.hand_over()
        self._record({"checksums": [tokens.hexdigest(), lengths.hexdigest()], **asdict(counts)})
        self.parts += 1
        self.total += counts

    def finish(self) -> None:
        """Complete the token file, give it its name and remove the folder."""
        self._record(_FINISHING)
        self._writer.finish()
        self.remove()

    def close(self) -> None:
        self._writer.abandon()

    def remove(self) -> None:
        shutil.rmtree(self.path)

    def remove_if_new(self) -> None:
        """Remove the folder if no run has begun in it."""
        if not os.path.exists(self._journal):
            self.remove()

    def _record(self, entry: Manifest) -> None:
        with open(self._journal, "a", encoding="utf-8") as file:
            file.write(f"{json.dumps(entry)}\n")

    def _read(self) -> list[tuple[Manifest, int]]:
        """The lines of the journal as far as it is whole, and the byte where each ends."""
        try:
            with open(self._journal, "rb") as file:
                lines = file.read().split(b"\n")[:-1]
        except FileNotFoundError:
            return []
        journal, end = [], 0
        for line in lines:
            end += len(line) + 1
            try:
                journal.append((json.loads(line), end))
            except ValueError:
                break
        return journal

    def _continue(self, journal: list[tuple[Manifest, int]]) -> None:
        """Keep the first parts as far as the token file holds what the journal says."""
        if journal[-1][0] == _FINISHING:
            self._take_back()
            journal.pop()
        parts = [entry for entry, _ in journal[1:]]
        sizes = [entry["tokens"] * self._dtype.itemsize for entry in parts]
        tokens = _digests(f"{self._kept}.bin", 0, sizes)
        lengths = _digests(
            f"{self._kept}.idx", HEADER.size, [4 * entry["documents"] for entry in parts]
        )
        for entry, *found in zip(parts, tokens, lengths, strict=False):
            if entry["checksums"] != found:
                break
            self.parts += 1
            self.total += Counts(**{field.name: entry[field.name] for field in fields(Counts)})
        os.truncate(self._journal, journal[self.parts][1])
        self._clear("lock", *map(os.path.basename, (self._journal, *self._files())))

    def _files(self) -> tuple[str, str]:
        return f"{self._kept}.bin", f"{self._kept}.idx"

    def _take_back(self) -> None:
        """Undo the renames of a run that was killed between the first of them and its end."""
        for path in self._files():
            if not os.path.exists(path):
                with suppress(FileNotFoundError):
                    os.replace(f"{self._output}{path.removeprefix(self._kept)}", path)

    def _clear(self, *keep: str) -> None:
        for name in set(os.listdir(self.path)) - set(keep):
            os.unlink(os.path.join(self.path, name))


def _digests(path: str, offset: int, sizes: Iterable[int]) -> Iterator[str]:
    """Checksums of successive stretches of a file; none when it is missing."""
    with suppress(FileNotFoundError), open(path, "rb") as file:
        file.seek(offset)
        for size in sizes:
            digest = xxhash.xxh3_128()
            while size and (chunk := file.read(min(size, 1 << 20))):
                digest.update(chunk)
                size -= len(chunk)
            yield digest.hexdigest()


@contextmanager
def parts_folder(
    output: str, dtype: np.dtype, manifest: Manifest, overwrite: bool
) -> Iterator[PartsFolder]:
    """Make or continue `OUTPUT.parts` and hold it. Raises `UserError`, also for failed writes.

    dtype: of the tokens in `OUTPUT`.
    """
    folder = PartsFolder(output, dtype)
    try:
        os.makedirs(folder.path, exist_ok=True)
        with open(os.path.join(folder.path, "lock"), "w") as lock:
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
        raise UserError(write_failure(output, error)) from None
