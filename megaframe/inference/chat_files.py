"""Files of chats as a token file with a weight file: what `tools/preprocess_chat.py` does.

Both files get their final names at the end, the weights first: a token file that is there without
its weights would train on everything.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megaframe.checkpoint.convert.huggingface.tokenizer_settings import MAX_TEMPLATE
from megaframe.data.indexed_dataset import choose_token_dtype
from megaframe.data.indexed_dataset_writer import IndexedDatasetWriter
from megaframe.data.label_weights import MASK_DTYPE, SUFFIX, WEIGHT_DTYPE
from megaframe.data.preprocessing.decompress import check_length, decompress
from megaframe.data.token_file_record import TokenFileRecord, record_tokenizer, write_record
from megaframe.data.tokenizer import HuggingFaceTokenizer, load_tokenizer
from megaframe.errors import UserError
from megaframe.inference.chat import ChatFormat, find_chat_format
from megaframe.inference.chat_tokens import (
    ChatRow,
    WeightedTokens,
    encode_chats,
    encode_spans,
    parse_chat_row,
)
from megaframe.io.untrusted import parse_json, read_file

_ROWS = 256
"""Rows of which the template makes texts in one process, whose start takes a tenth of a second."""
_NAMED = 5
"""Broken rows that are named."""


@dataclass(frozen=True)
class ChatJob:
    """What to encode.

    Attributes:
        inputs: Files with a row of JSON on each line, which may be compressed.
        tokenizer: hf:PATH.
        output: Token file without its suffix.
        weighted: Whether rows may give weights other than 0 and 1.
        skip_broken: Leave out rows that cannot be used, instead of refusing the first.
        template: File of a chat template; None for that beside the tokenizer.
    """

    inputs: Sequence[str]
    tokenizer: str
    output: str
    weighted: bool = False
    skip_broken: bool = False
    template: str | None = None


@dataclass
class ChatCounts:
    """What was encoded.

    Attributes:
        documents: Rows.
        tokens: Their tokens.
        counted: Tokens that count, those with a weight above 0.
        broken: Rows that were left out.
        problems: What is wrong with the first of these, with file and line.
    """

    documents: int = 0
    tokens: int = 0
    counted: int = 0
    broken: int = 0
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Row:
    place: str
    content: bytes


def preprocess_chats(
    job: ChatJob, overwrite: bool = False, report: Callable[[ChatCounts], None] = lambda done: None
) -> ChatCounts:
    """Write the token file and the weight file of chats. After an error neither is there.

    Args:
        job: What to encode.
        overwrite: Replace the files if they are there.
        report: Called after every few hundred rows.

    Raises:
        UserError: The files are there, no row can be used, or one cannot and `skip_broken` is off.
    """
    tokenizer = load_tokenizer(job.tokenizer)
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        raise UserError(
            f"--tokenizer {job.tokenizer} does not tell the place of a token in its text; use that "
            "of a tokenizer.json: hf:FOLDER/tokenizer.json"
        )
    finals = [f"{job.output}{part}.{kind}" for part in ("", SUFFIX) for kind in ("bin", "idx")]
    if not overwrite and (there := [path for path in finals if os.path.lexists(path)]):
        raise UserError(f"{there[0]} is there; --overwrite replaces it, or name another --output")
    encoder, counts = _Encoder(job, tokenizer), ChatCounts()
    with ExitStack() as files:
        # Left in reverse order: the weights get their names first.
        tokens_file = IndexedDatasetWriter(job.output, choose_token_dtype(tokenizer.vocab_size))
        files.enter_context(tokens_file)
        dtype = WEIGHT_DTYPE if job.weighted else MASK_DTYPE
        weights_file = files.enter_context(IndexedDatasetWriter(job.output + SUFFIX, dtype))
        for documents in _group(encoder.encode(_read_rows(job.inputs), counts)):
            lengths = np.array([document.ids.size for document in documents])
            ids = np.concatenate([document.ids for document in documents])
            weights = np.concatenate([document.weights for document in documents])
            tokens_file.append_batch(ids, lengths)
            weights_file.append_batch(weights.astype(dtype), lengths)
            counts.documents += len(documents)
            counts.tokens += ids.size
            counts.counted += int((weights > 0).sum())
            report(counts)
        if not counts.documents:
            raise UserError("; ".join([f"no row of {job.inputs[0]} can be used", *counts.problems]))
    record = record_tokenizer(job.tokenizer, tokenizer)
    write_record(
        job.output, TokenFileRecord(record, tokenizer.eod, counts.documents, counts.tokens)
    )
    return counts


def _group(documents: Iterator[WeightedTokens]) -> Iterator[list[WeightedTokens]]:
    group: list[WeightedTokens] = []
    for document in documents:
        group.append(document)
        if len(group) == _ROWS:
            yield group
            group = []
    if group:
        yield group


def _read_rows(paths: Sequence[str]) -> Iterator[_Row]:
    """Yield the lines of files that are not blank."""
    for path in paths:
        parts, length, number = [], 0, 1
        for chunk, _ in decompress(path):
            first, *others = chunk.split(b"\n")
            parts.append(first)
            length += len(first)
            check_length(f"{path}:{number}", length)
            for start in others:  # the line before it has ended
                line = b"".join(parts)
                if line.strip():
                    yield _Row(f"{path}:{number}", line)
                parts, length, number = [start], len(start), number + 1
        line = b"".join(parts)
        if line.strip():
            yield _Row(f"{path}:{number}", line)


class _Encoder:
    """Turns rows into documents, and counts those that cannot be used."""

    def __init__(self, job: ChatJob, tokenizer: HuggingFaceTokenizer) -> None:
        self._job, self._tokenizer = job, tokenizer
        self._form: ChatFormat | None = None

    def encode(self, rows: Iterator[_Row], counts: ChatCounts) -> Iterator[WeightedTokens]:
        """Yield the documents of rows, in their order.

        Raises:
            UserError: A row cannot be used, and these are not to be left out.
        """
        waiting: list[tuple[_Row, ChatRow]] = []
        for row in rows:
            try:
                value = _parse(row)
                if isinstance(value, dict) and "spans" in value:
                    yield from self._encode_waiting(waiting, counts)
                    waiting = []
                    yield self._check(encode_spans(self._tokenizer, value))
                    continue
                waiting.append((row, parse_chat_row(value)))
            except UserError as error:
                self._leave_out(row, error, counts)
            if len(waiting) == _ROWS:
                yield from self._encode_waiting(waiting, counts)
                waiting = []
        yield from self._encode_waiting(waiting, counts)

    def _encode_waiting(
        self, waiting: Sequence[tuple[_Row, ChatRow]], counts: ChatCounts
    ) -> Iterator[WeightedTokens]:
        """Yield the documents of chats, together if none of them is wrong."""
        if not waiting:
            return
        if self._form is None:
            template = None if self._job.template is None else _read_template(self._job.template)
            self._form = find_chat_format(self._job.tokenizer, self._tokenizer, template)
        try:
            documents = encode_chats(self._form, [chat for _, chat in waiting])
            for document in documents:
                self._check(document)
        except UserError as error:
            if len(waiting) == 1:
                self._leave_out(waiting[0][0], error, counts)
                return
            half = len(waiting) // 2
            yield from self._encode_waiting(waiting[:half], counts)
            yield from self._encode_waiting(waiting[half:], counts)
            return
        yield from documents

    def _check(self, document: WeightedTokens) -> WeightedTokens:
        """Return the document. Raises `UserError` if it has nothing to learn, or weights that were
        not expected."""
        weights = document.weights
        if not weights.any():
            raise UserError("no token of the row counts")
        if not self._job.weighted and not np.isin(weights, (0, 1)).all():
            other = float(weights[~np.isin(weights, (0, 1))][0])
            raise UserError(f"the row has the weight {other:g}; --weighted takes such weights")
        return document

    def _leave_out(self, row: _Row, error: UserError, counts: ChatCounts) -> None:
        problem = f"{row.place}: {error}"
        if not self._job.skip_broken:
            raise UserError(f"{problem}; --skip-broken leaves out rows that cannot be used")
        counts.broken += 1
        if len(counts.problems) < _NAMED:
            counts.problems.append(problem)


def _read_template(path: str) -> str:
    try:
        return read_file(path, MAX_TEMPLATE).decode()
    except OSError as error:
        raise UserError(f"cannot read --template {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"--template {path} is not UTF-8 at byte {error.start}") from None


def _parse(row: _Row) -> Any:
    try:
        return parse_json(row.content)
    except UnicodeDecodeError as error:
        byte = row.content[error.start]
        raise UserError(f"byte 0x{byte:02x} is not UTF-8") from None
    except ValueError as error:
        raise UserError(f"not JSON: {error}") from None
