"""Tokenizers: text to token ids and back, one small interface over four kinds of vocabulary.

Text never becomes a control token. If the library allows it, `<|endoftext|>` within a document is
encoded as ordinary text, so only the writer of a token file ends documents. Each tokenizer encodes
on one thread; parallelism comes from the processes that use it.

    kind           path                         end of document (`eod`)
    sentencepiece  a .model file                its eos id, usually `</s>`
    hf             a tokenizer.json             see `end_of_document.py`; hf:PATH?eod=TOKEN names it
    tiktoken       a rank file, .tiktoken       <|endoftext|>: the id that the published vocabulary
                                                of this size uses, else the first id without a token
    bytes          none                         256, after the 256 bytes
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from megaframe.data.end_of_document import EOD_OPTION, find_end_of_document
from megaframe.data.tiktoken_ranks import GPT2_PATTERN, MAX_VOCAB, PUBLISHED_RANKS, parse_ranks
from megaframe.data.tokenizer_description import (
    check_sentencepiece,
    format_description,
    read_description,
)
from megaframe.errors import UserError
from megaframe.io.untrusted import open_file

_LARGEST_FILE = 1 << 26
"""Bytes. Libraries take some 50 times as much memory; published files have up to 40 MB."""
_LONGEST_REASON = 300
_PROBE = "a"
"""A text without a space; where its tokens have one, the tokenizer has put it there."""


class Tokenizer(ABC):
    """Text to token ids and back.

    Attributes:
        vocab_size: All ids are smaller.
        eod: The id that ends a document.
        fingerprint: Equal for tokenizers that give the same ids: of the same kind, file and end of
            document, wherever the file lies.
    """

    vocab_size: int
    eod: int
    fingerprint: str

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.integer]]:
        """Return the token ids of each text, without `eod`."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of these ids. Control tokens are skipped."""

    @abstractmethod
    def count_token_bytes(self) -> NDArray[np.int32]:
        """Return the number of UTF-8 bytes of text that each id represents, i32[vocab_size]; 0 for
        control tokens.

        Bits per byte is the loss in bits divided by this, both summed over the same tokens.
        """

    def count_first_bytes(self) -> NDArray[np.int32]:
        """Return the same for a token at the beginning of a text. Some tokenizers put a space
        before each text, which is not part of it."""
        counts = self.count_token_bytes()
        marked = self._list_spaced_tokens()
        counts[marked] -= 1
        return counts

    def _list_spaced_tokens(self) -> list[int]:
        """Return the tokens that begin with a space, if the tokenizer puts one before each text;
        else nothing."""
        return []

    def digest_vocabulary(self) -> str:
        """Return a digest of the pieces by id and of `eod`, which files of different kinds of one
        model share; empty if pieces of this kind are not comparable."""
        return ""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of one text, without `eod`."""
        return self.encode_batch([text])[0].tolist()

    def find_id(self, token: str) -> int | None:
        """Return the id of a token by its name, or None if there is no such token."""
        return None


class ByteTokenizer(Tokenizer):
    """The bytes of UTF-8 as ids 0 to 255, and 256 for the end of a document."""

    def __init__(self) -> None:
        self.vocab_size, self.eod, self.fingerprint = 257, 256, "bytes"

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.integer]]:
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(token for token in ids if token < 256).decode(errors="replace")

    def count_token_bytes(self) -> NDArray[np.int32]:
        return np.array([1] * 256 + [0], np.int32)


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model. The `▁` of a piece counts as one byte, the space that it represents,
    except where the model puts it before a text (its `add_dummy_prefix`)."""

    def __init__(self, path: str) -> None:
        sentencepiece = import_library("sentencepiece", "")
        content = read_file(path)
        check_sentencepiece(path, content)
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_proto=content)
        except (RuntimeError, OSError, ValueError, TypeError):
            raise UserError(f"{path} is not a SentencePiece model") from None
        # Without a pool, every batch call would start a new thread, with cold caches each time.
        self._pool = sentencepiece.ThreadPool(1)
        self.vocab_size = self._model.get_piece_size()
        self.eod = self._model.eos_id()
        if self.eod < 0:
            raise UserError(
                f"{path} has no eos piece to end documents with (eos_id={self.eod}); train it "
                f"with eos_id of 0 or more"
            )
        self.fingerprint = _compute_fingerprint("sentencepiece", content)

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.integer]]:
        return self._model.encode(list(texts), thread_pool=self._pool, return_type="numpy")

    def decode(self, ids: Sequence[int]) -> str:
        return self._model.decode([int(token) for token in ids])

    def count_token_bytes(self) -> NDArray[np.int32]:
        return np.array([self._count_bytes(token) for token in range(self.vocab_size)], np.int32)

    def digest_vocabulary(self) -> str:
        pieces = map(self._model.id_to_piece, range(self.vocab_size))
        return _digest_pieces(dict(enumerate(pieces)), self.eod)

    def find_id(self, token: str) -> int | None:
        piece: int = self._model.piece_to_id(token)  # that of `unk` if there is none
        return piece if self._model.id_to_piece(piece) == token else None

    def _count_bytes(self, token: int) -> int:
        model = self._model
        if model.is_control(token) or model.is_unknown(token) or model.is_unused(token):
            return 0
        if model.is_byte(token):
            return 1
        return len(model.id_to_piece(token).replace("▁", " ").encode())

    def _list_spaced_tokens(self) -> list[int]:
        if not self._model.encode(_PROBE, out_type=str)[0].startswith("▁"):
            return []
        pieces = map(self._model.id_to_piece, range(self.vocab_size))
        return [token for token, piece in enumerate(pieces) if piece.startswith("▁")]


class HuggingFaceTokenizer(Tokenizer):
    """A `tokenizer.json` of Hugging Face's tokenizers. Its special tokens represent no bytes.

    eod_name: the token whose id is `eod`.

    Args:
        path: Of the file.
        eod_name: The token that ends documents; if empty, `find_end_of_document` finds it.
    """

    def __init__(self, path: str, eod_name: str = "") -> None:
        # The library's own threads would compete with the worker processes for cores.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        library = import_library("tokenizers", "hf")
        self._path = path
        self._description = read_description(path, read_file(path))
        with _report_failures(path):
            self._model = library.Tokenizer.from_buffer(format_description(self._description))
        self._model.encode_special_tokens = True
        vocab = self._model.get_vocab(with_added_tokens=True)
        self._names = {token: name for name, token in vocab.items()}
        self.vocab_size = max(self._names, default=-1) + 1
        if self.vocab_size > MAX_VOCAB:
            raise UserError(
                f"{path} has a token with id {self.vocab_size - 1}; ids are below {MAX_VOCAB}"
            )
        added = self._model.get_added_tokens_decoder().values()
        special = {token.content for token in added if token.special}
        self.eod_name = find_end_of_document(path, vocab, special, eod_name)
        self.eod = vocab[self.eod_name]
        self.fingerprint = _compute_fingerprint("hf", self._list_essentials())

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.integer]]:
        with _report_failures(self._path):
            encodings = self._model.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        ids = [int(token) for token in ids if token != self.eod]  # which need not be special
        with _report_failures(self._path):
            return self._model.decode(ids, skip_special_tokens=True)

    def count_token_bytes(self) -> NDArray[np.int32]:
        added = self._model.get_added_tokens_decoder()
        count_bytes = self._measure_piece()
        counts = np.zeros(self.vocab_size, np.int32)
        for token, name in self._names.items():
            if token not in added:
                counts[token] = count_bytes(name)
            elif not added[token].special:
                counts[token] = len(name.encode())
        counts[self.eod] = 0
        return counts

    def _list_spaced_tokens(self) -> list[int]:
        # U+0120 is a blank in the alphabet of ByteLevel.
        spaces = ("▁", "Ġ")
        with _report_failures(self._path):
            probed = self._model.encode(_PROBE, add_special_tokens=False).tokens
        if not probed or not probed[0].startswith(spaces):
            return []
        added = self._model.get_added_tokens_decoder()
        return [
            token
            for token, name in self._names.items()
            if name.startswith(spaces) and token not in added
        ]

    def digest_vocabulary(self) -> str:
        return _digest_pieces(self._names, self.eod)

    def find_id(self, token: str) -> int | None:
        piece: int | None = self._model.token_to_id(token)
        return piece

    def list_control_tokens(self) -> list[str]:
        """Return the names of all special tokens."""
        added = self._model.get_added_tokens_decoder().values()
        return [token.content for token in added if token.special]

    def encode_with_control_tokens(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the ids of a text in which the names of special tokens are these tokens, as what a
        chat template makes is read, and the characters that each is of: first and end."""
        self._model.encode_special_tokens = False
        try:
            return self.encode_with_places(text)
        finally:
            self._model.encode_special_tokens = True

    def encode_with_places(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the ids of a text, and the characters that each is of: first and end."""
        with _report_failures(self._path):
            encoding = self._model.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def _list_essentials(self) -> bytes:
        """Return what of the file decides on ids, in one form however it is written: transformers
        writes it anew when it saves a model, with the lengths that were last in use."""
        ignored = ("version", "truncation", "padding", "post_processor", "decoder")
        essential = {key: self._description[key] for key in self._description if key not in ignored}
        return json.dumps([essential, self.eod_name], sort_keys=True).encode()

    def _measure_piece(self) -> Callable[[str], int]:
        """Return a function that gives the number of bytes of a piece. Vocabularies write bytes
        either as one character each (ByteLevel), or as text with `▁` and `<0xAB>`."""
        text = json.dumps([self._description.get(k) for k in ("pre_tokenizer", "decoder")])
        if '"ByteLevel"' in text:
            return len
        fallback = bool((self._description.get("model") or {}).get("byte_fallback"))

        def count_bytes(piece: str) -> int:
            if fallback and len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
                return 1
            return len(piece.removeprefix("##").replace("▁", " ").encode())

        return count_bytes


class TiktokenTokenizer(Tokenizer):
    """A rank file of tiktoken, with a token in base64 and its rank on each line."""

    def __init__(self, path: str) -> None:
        tiktoken = import_library("tiktoken", "data")
        content = read_file(path)
        self._ranks = parse_ranks(path, content)
        used_ranks = set(self._ranks.values())
        free = next(rank for rank in range(len(used_ranks) + 1) if rank not in used_ranks)
        pattern, self.eod = PUBLISHED_RANKS.get(len(self._ranks), (GPT2_PATTERN, free))
        if self.eod in used_ranks:
            self.eod = free
        self.vocab_size = max(self.eod, *used_ranks) + 1
        self._model = tiktoken.Encoding(
            os.path.basename(path),
            pat_str=pattern,
            mergeable_ranks=self._ranks,
            special_tokens={"<|endoftext|>": self.eod},
        )
        self._used_ranks = used_ranks
        self.fingerprint = _compute_fingerprint("tiktoken", content)

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.integer]]:
        return [self._model.encode_to_numpy(text, disallowed_special=()) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return self._model.decode([int(token) for token in ids if token in self._used_ranks])

    def count_token_bytes(self) -> NDArray[np.int32]:
        counts = np.zeros(self.vocab_size, np.int32)
        for token, rank in self._ranks.items():
            counts[rank] = len(token)
        return counts


_KINDS: dict[str, Callable[[str], Tokenizer]] = {
    "sentencepiece": SentencePieceTokenizer,
    "hf": HuggingFaceTokenizer,
    "tiktoken": TiktokenTokenizer,
}
_SUFFIXES = {".model": "sentencepiece", ".json": "hf", ".tiktoken": "tiktoken"}


def split_name(name: str) -> tuple[str, str, str]:
    """Return the kind of a tokenizer, the path of its file, and the token that ends documents if
    the name has one; empty texts where it does not."""
    kind, _, path = name.partition(":")
    if kind != "hf":
        return kind, path, ""
    path, _, eod_name = path.partition(EOD_OPTION)
    return kind, path, eod_name


def load_tokenizer(name: str) -> Tokenizer:
    """Load the tokenizer `KIND:PATH`, or `bytes`.

    Raises:
        UserError: For an unknown kind, a file that is missing or of another format, a vocabulary
            without an end of document, or a library that is not installed.
    """
    kind, path, eod_name = split_name(name)
    colon = ":" in name
    if name == "bytes":
        return ByteTokenizer()
    if kind == "hf" and path:
        return HuggingFaceTokenizer(path, eod_name)
    if kind in _KINDS and path:
        return _KINDS[kind](path)
    kinds = [f"{known}:PATH" for known in _KINDS] + ["bytes"]
    if kind in _KINDS or kind == "bytes":
        problem = "takes no path" if kind == "bytes" else "has no path"
        nearest = "bytes" if kind == "bytes" else f"{kind}:PATH"
    elif colon:
        problem = f"has the unknown kind {kind!r}"
        close = get_close_matches(kind, [*_KINDS, "bytes"], n=1, cutoff=0.0)
        nearest = f"{close[0]}:{path}" if close[0] != "bytes" else "bytes"
    else:
        problem = "has no kind"
        guess = _SUFFIXES.get(os.path.splitext(name)[1])
        nearest = f"{guess}:{name}" if guess else get_close_matches(name, kinds, 1, 0.0)[0]
    raise UserError(f"tokenizer {name!r} {problem}; use {', '.join(kinds)} (nearest: {nearest})")


def import_library(name: str, extra: str) -> ModuleType:
    """Import an optional library.

    Raises:
        UserError: With the extra of megaframe that installs it.
    """
    try:
        return importlib.import_module(name)
    except ImportError:
        package = f"megaframe[{extra}]" if extra else "megaframe"
        raise UserError(f"{name} is not installed; run: pip install '{package}'") from None


def read_file(path: str) -> bytes:
    """Return the content of a tokenizer's file.

    Raises:
        UserError: If it is empty, too large or unreadable.
    """
    try:
        size = os.stat(path).st_size
        if not 0 < size <= _LARGEST_FILE:
            raise UserError(
                f"tokenizer file {path} has {size} bytes; between 1 and {_LARGEST_FILE} are read"
            )
        with open_file(path) as file:
            return file.read()
    except OSError as error:
        raise UserError(
            f"cannot read tokenizer file {path}: {error.strerror} (data.tokenizer, or "
            "--tokenizer); tools/train_tokenizer.py makes one of text"
        ) from None


@contextmanager
def _report_failures(path: str) -> Iterator[None]:
    """Return a context that turns all errors of the library of tokenizer.json into `UserError`. A
    panic of its Rust is a `BaseException` without a public type."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = str(error).removeprefix("Cannot instantiate Tokenizer from buffer: ")
        raise UserError(f"{path}: tokenizers cannot use it: {reason[:_LONGEST_REASON]}") from None


def _compute_fingerprint(kind: str, content: bytes) -> str:
    return f"{kind}:{hashlib.sha256(content).hexdigest()[:32]}"


def _digest_pieces(pieces: Mapping[int, str], eod: int) -> str:
    content = json.dumps([sorted(pieces.items()), eod]).encode()
    return hashlib.sha256(content).hexdigest()[:32]
