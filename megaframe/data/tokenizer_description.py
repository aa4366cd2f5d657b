"""What a `tokenizer.json` or a SentencePiece model may ask of its library, which trusts the file.

A few words in it can make the library take any amount of memory, loop, or end the process: a chain
of replacements that doubles a text forty times, a piece of a million characters. The file is
therefore parsed and bounded here. Hugging Face's library is given what was checked, written anew,
without the parts that decide on no id.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterator, Mapping
from typing import Any

from megaframe.data.sentencepiece_model import parse_fields
from megaframe.errors import UserError
from megaframe.io.untrusted import parse_json

Description = Mapping[str, Any]

_TEXT_PARTS = ("normalizer", "pre_tokenizer")
_PARTS = (*_TEXT_PARTS, "decoder")
_MOST_OBJECTS = 1000
_LONGEST_TEXTS = 100_000
"""Characters of all texts in the parts. A pattern is a few hundred characters long."""
_LARGEST_GROWTH = 256
"""Most characters that become of one. The normal form NFKC makes 18 of one."""
_LONGEST_PIECE = 1000
_LARGEST_TRIE = 12 << 20
"""Bytes of the pieces of a unigram model; the library takes up to 350 times as many."""
_LARGEST_ADDED = 4 << 20
"""Characters of all added tokens."""
_LONGEST_WORD = 10_000
"""Characters of a word that WordPiece divides, in time that grows with their square."""
_PIECE, _NORMALIZERS, _CHARSMAP = 1, (3, 5), 2
"""Fields of a SentencePiece model, and of its normalizer and denormalizer."""
_LONGEST_PIECE_MESSAGE = 4 * _LONGEST_PIECE + 32
"""Bytes of a piece with its score and type."""


def read_description(path: str, content: bytes) -> dict[str, Any]:
    """Parse a tokenizer.json.

    Raises:
        UserError: If it is none, or asks for more than a tokenizer needs; no message quotes a file
            that is no tokenizer.
    """
    try:
        description = parse_json(content)
    except ValueError as error:
        raise UserError(f"{path} is not a tokenizer.json: {error}") from None
    model = description.get("model") if isinstance(description, dict) else None
    if not isinstance(model, dict) or not isinstance(model.get("vocab"), dict | list):
        raise UserError(f"{path} is not a tokenizer.json: it has no model with a vocab")
    problem = next(_find_problems(description, model), None)
    if problem:
        raise UserError(f"{path}: {problem}")
    return description


def format_description(description: Description) -> bytes:
    """Return the file that the library is given."""
    keys = ("version", "added_tokens", "model", *_PARTS)
    return json.dumps({key: description[key] for key in keys if key in description}).encode()


def check_sentencepiece(path: str, content: bytes) -> None:
    """Check a SentencePiece model.

    Raises:
        UserError: If it is none, or asks for more than a tokenizer needs.
    """
    try:
        problem = next(_find_model_problems(content), None)
    except (ValueError, IndexError):
        raise UserError(f"{path} is not a SentencePiece model") from None
    if problem:
        raise UserError(f"{path}: {problem}")


def _find_model_problems(content: bytes) -> Iterator[str]:
    """Find what is too large. Of what is there twice, the library takes a part of each."""
    for number, value in parse_fields(content):
        if not isinstance(value, bytes):
            continue
        if number == _PIECE and len(value) > _LONGEST_PIECE_MESSAGE:
            yield f"a piece has {len(value)} bytes; the most is {_LONGEST_PIECE_MESSAGE}"
        elif number in _NORMALIZERS:
            for inner, charsmap in parse_fields(value):
                growth = _measure_charsmap(charsmap) if isinstance(charsmap, bytes) else 1
                if inner == _CHARSMAP and growth > _LARGEST_GROWTH:
                    yield (
                        f"its rules can make {growth} characters of one; the most is "
                        f"{_LARGEST_GROWTH}"
                    )


def _find_problems(description: Description, model: Description) -> Iterator[str]:
    yield from _find_large_pieces(model["vocab"])
    yield from _find_bad_merges(model)
    yield from _find_large_added(description.get("added_tokens"))
    settings = {key: value for key, value in model.items() if key not in ("vocab", "merges")}
    parts = [settings, *(description.get(part) for part in _PARTS)]
    yield from _find_large_parts(parts)
    for names in (_TEXT_PARTS, ("decoder",)):
        yield from _find_growth(names, [description.get(name) for name in names])
    longest = model.get("max_input_chars_per_word")
    if isinstance(longest, int | float) and longest > _LONGEST_WORD:
        yield f"max_input_chars_per_word={longest} is more than {_LONGEST_WORD}"


def _find_large_pieces(vocab: dict[str, Any] | list[Any]) -> Iterator[str]:
    """Find pieces that are too long, and too many bytes of those of a unigram model, which is the
    only one that lists them with a score."""
    if isinstance(vocab, dict):
        pieces = list(vocab)
    else:
        pieces = [entry[0] for entry in vocab if isinstance(entry, list) and entry]
        pieces = [piece for piece in pieces if isinstance(piece, str)]
    longest = max(map(len, pieces), default=0)
    if longest > _LONGEST_PIECE:
        yield f"a piece has {longest} characters; the most is {_LONGEST_PIECE}"
    size = sum(len(piece.encode(errors="replace")) for piece in pieces)
    if isinstance(vocab, list) and size > _LARGEST_TRIE:
        yield f"the pieces of its unigram model have {size} bytes; the most is {_LARGEST_TRIE}"


def _find_bad_merges(model: Description) -> Iterator[str]:
    """Find a merge from whose second part the library would cut a prefix that is not there."""
    prefix, merges = model.get("continuing_subword_prefix"), model.get("merges")
    if not prefix or not isinstance(prefix, str) or not isinstance(merges, list):
        return
    for number, merge in enumerate(merges):
        words = merge.split(" ") if isinstance(merge, str) else merge
        second = words[-1] if isinstance(words, list) and words else None
        if not isinstance(second, str) or not second.startswith(prefix):
            yield (
                f"the second part of merge {number} does not begin with the "
                f"continuing_subword_prefix of {len(prefix)} characters"
            )


def _find_large_added(tokens: Any) -> Iterator[str]:
    contents = [
        token["content"]
        for token in (tokens if isinstance(tokens, list) else [])
        if isinstance(token, dict) and isinstance(token.get("content"), str)
    ]
    longest, size = max(map(len, contents), default=0), sum(map(len, contents))
    if longest > _LONGEST_PIECE:
        yield f"an added token has {longest} characters; the most is {_LONGEST_PIECE}"
    if size > _LARGEST_ADDED:
        yield f"added tokens have {size} characters; the most is {_LARGEST_ADDED}"


def _find_large_parts(parts: list[Any]) -> Iterator[str]:
    objects = list(_list_objects(parts))
    if len(objects) > _MOST_OBJECTS:
        yield f"it has {len(objects)} normalizers and the like; the most is {_MOST_OBJECTS}"
    size = sum(
        len(value)
        for part in objects
        for key, value in part.items()
        if isinstance(value, str) and key != "precompiled_charsmap"
    )
    if size > _LONGEST_TEXTS:
        yield f"the texts of its parts have {size} characters; the most is {_LONGEST_TEXTS}"


def _list_objects(value: Any) -> Iterator[Description]:
    if isinstance(value, dict):
        yield value
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _list_objects(inner)


def _find_growth(names: tuple[str, ...], parts: list[Any]) -> Iterator[str]:
    growth = 1
    for part in _list_objects(parts):
        growth = min(growth * _measure_growth(part), 10**9)
    if growth > _LARGEST_GROWTH:
        yield (
            f"its {' and '.join(names)} can make {growth} characters of one; the most is "
            f"{_LARGEST_GROWTH}"
        )


def _measure_growth(part: Description) -> int:
    """Return how many characters a part makes of one at most. The library knows some parts by
    their keys alone."""
    content, pattern = part.get("content"), part.get("pattern")
    if isinstance(content, str) and pattern is not None:
        # A regular expression can match between any two characters.
        between = not isinstance(pattern, dict) or not pattern.get("String")
        return len(content) + 1 if between and content else max(1, len(content))
    if isinstance(part.get("precompiled_charsmap"), str):
        return _measure_encoded_charsmap(part["precompiled_charsmap"])
    spaced = part.get("type") in ("ByteLevel", "Metaspace")
    return 2 if spaced or "add_prefix_space" in part or "prepend_scheme" in part else 1


def _measure_encoded_charsmap(encoded: str) -> int:
    try:
        return _measure_charsmap(base64.b64decode(encoded))
    except (binascii.Error, ValueError):
        return 1  # the library refuses it


def _measure_charsmap(content: bytes) -> int:
    """Return the length of the longest replacement. They follow a trie, whose bytes are counted by
    the first four."""
    replacements = content[4 + int.from_bytes(content[:4], "little") :]
    return max(1, *(len(text.decode(errors="replace")) for text in replacements.split(b"\0")))
