"""Which tokenizer made a token file, so that no other one reads it.

Megatron's format has no place for that, so a small JSON file lies beside the two files of the
format: PREFIX.tokens.json. What counts in it is the tokenizer's fingerprint; its name is for
messages. Files of earlier versions and of other programs have none, and are taken as they are. So
is a token file that was written again by something else since: the record no longer has its size.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from megaframe.data.tokenizer import Tokenizer
from megaframe.errors import UserError
from megaframe.io.untrusted import parse_json, read_file

SUFFIX = ".tokens.json"
_VERSION = 1
_LARGEST_FILE = 1 << 16


@dataclass(frozen=True)
class TokenizerRecord:
    """A tokenizer: its name as a user gave it, its fingerprint (see `Tokenizer`), and the digest of
    its vocabulary, which records of earlier versions do not have.

    A model often comes with two files of its tokenizer, such as tokenizer.json and tokenizer.model.
    Their fingerprints differ, but an id means the same text in both if their vocabularies are one.
    """

    name: str
    fingerprint: str
    vocabulary: str = ""

    def is_same(self, other: TokenizerRecord) -> bool:
        """Return whether ids of both mean the same text."""
        kinds = [record.fingerprint.partition(":")[0] for record in (self, other)]
        if kinds[0] == kinds[1]:
            return self.fingerprint == other.fingerprint
        return bool(self.vocabulary) and self.vocabulary == other.vocabulary


@dataclass(frozen=True)
class TokenFileRecord:
    """What a token file was made with.

    Attributes:
        tokenizer: Which made its tokens.
        eod: The id that ends documents.
        documents: Number of documents in the file.
        tokens: Number of tokens in the file.
        duplicates: Documents of the text that were left out, as others have the same tokens.
    """

    tokenizer: TokenizerRecord
    eod: int
    documents: int
    tokens: int
    duplicates: int = 0


def record_tokenizer(name: str, tokenizer: Tokenizer) -> TokenizerRecord:
    """Return the record of a tokenizer. name: Its KIND:PATH."""
    return TokenizerRecord(name, tokenizer.fingerprint, tokenizer.digest_vocabulary())


def read_recorded_tokenizer(state: Mapping[str, Any]) -> TokenizerRecord | None:
    """Return the tokenizer that the state of a loader records, or None if it records none.

    Raises:
        UserError: If it is not what a loader records.
    """
    recorded = state.get("tokenizer")
    if recorded is None:
        return None
    try:
        return parse_tokenizer(recorded)
    except (ValueError, TypeError, KeyError):
        raise UserError(
            "the data state of the checkpoint is damaged: its tokenizer is no name and fingerprint"
        ) from None


def write_record(prefix: str, record: TokenFileRecord) -> None:
    """Write the record of a token file beside it. prefix: Its path without suffix."""
    path, temporary = f"{prefix}{SUFFIX}", f"{prefix}{SUFFIX}.{os.getpid()}.unfinished"
    with suppress(FileNotFoundError):
        os.unlink(temporary)
    try:
        with open(temporary, "x", encoding="utf-8") as file:
            file.write(json.dumps({"version": _VERSION, **asdict(record)}, indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(temporary)


def read_record(prefix: str, documents: int, tokens: int) -> TokenFileRecord | None:
    """Return the record of a token file, or None if there is none.

    Args:
        prefix: Path of the file without suffix.
        documents: Number of its documents; another one in the record shows that it is of an
            earlier file.
        tokens: Number of its tokens; the same.

    Raises:
        UserError: If there is a record that cannot be read.
    """
    path = f"{prefix}{SUFFIX}"
    try:
        content = parse_json(read_file(path, _LARGEST_FILE))
        record = _parse_record(content)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, TypeError, KeyError):
        raise UserError(
            f"{path} is no record of a token file; bring it back, or delete it, and nothing is "
            "known of the tokenizer"
        ) from None
    return record if (record.documents, record.tokens) == (documents, tokens) else None


def _parse_record(content: Any) -> TokenFileRecord:
    """Return the record in a JSON value. Raises what comes of another value."""
    counts = [content[name] for name in ("eod", "documents", "tokens")]
    counts.append(content.get("duplicates", 0))
    if not all(type(count) is int for count in counts):
        raise ValueError
    return TokenFileRecord(parse_tokenizer(content["tokenizer"]), *counts)


def parse_tokenizer(content: Any) -> TokenizerRecord:
    """Return the tokenizer that parsed JSON records. Raises `ValueError`, `TypeError` or `KeyError`
    if it records none."""
    texts = [content["name"], content["fingerprint"], content.get("vocabulary", "")]
    if not all(type(text) is str for text in texts):
        raise ValueError
    return TokenizerRecord(*texts)


def check_same_tokenizer(
    used: Iterable[tuple[str, TokenizerRecord | None]], remedy: str
) -> TokenizerRecord | None:
    """Check that everything in a run has the same tokenizer.

    Args:
        used: What has a tokenizer, as words for messages, and which one, if it is known.
        remedy: What to do about different ones, for the message; {name} becomes the name of the
            second.

    Returns:
        The tokenizer, or None if nothing says which it is.

    Raises:
        UserError: If two are different.
    """
    first: tuple[str, TokenizerRecord] | None = None
    for user, record in used:
        if record is None:
            continue
        if first is None:
            first = user, record
        elif not record.is_same(first[1]):
            user_before, before = first
            other = "that file has changed" if record.name == before.name else "they differ"
            raise UserError(
                f"{user_before} has the tokenizer {before.name}, and {user} has {record.name}: "
                f"{other} ({before.fingerprint}, {record.fingerprint}), so ids mean other text; "
                f"{remedy.replace('{name}', record.name)}"
            )
    return first[1] if first else None
