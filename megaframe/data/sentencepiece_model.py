"""Reads a SentencePiece model file as data: its pieces, and how it normalises text.

The library does not tell how a model normalises. The file is a protocol buffer
(sentencepiece_model.proto), of whose wire format this is the part that such files use. The module
for it in sentencepiece's wheel refuses a protobuf older than the one it was made with (7.36.1 for
0.2.3), which sentencepiece does not install and other programs of an environment may not take.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

from megaframe.errors import UserError

_VARINT, _EIGHT_BYTES, _LENGTH, _FOUR_BYTES = 0, 1, 2, 5
_LONGEST_VARINT = 10
"""Bytes of an integer of 64 bits."""
_LARGEST_TAG = 1 << 32
"""The library takes the lower 32 bits of a larger one."""
_KINDS = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}


class PieceType(IntEnum):
    """The types of pieces, by their numbers in the file."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class TextPiece:
    """A piece; its id is its place in the file.

    Attributes:
        score: As the library sums it, rounded to fp32.
    """

    text: str
    score: float
    type: PieceType


@dataclass(frozen=True)
class SentencePieceModel:
    """The content of a model file.

    Attributes:
        kind: One of unigram, bpe, word, char.
        charsmap: The compiled rules that replace characters, empty without any.
        dummy_prefix: Whether to put a space before every text.
        remove_extra_whitespaces: Whether to remove spaces at both ends, and all but one inside.
        escape_whitespaces: Whether pieces have `▁` for a space.
        whitespace_as_suffix: Whether the dummy prefix is a suffix.
    """

    kind: str
    pieces: list[TextPiece]
    byte_fallback: bool
    charsmap: bytes
    dummy_prefix: bool
    remove_extra_whitespaces: bool
    escape_whitespaces: bool
    whitespace_as_suffix: bool

    def select_pieces(self, *types: PieceType) -> list[tuple[int, TextPiece]]:
        """Return the pieces of some types, with their ids."""
        return [(i, piece) for i, piece in enumerate(self.pieces) if piece.type in types]


def parse_model(path: str, content: bytes) -> SentencePieceModel:
    """Parse a model file that the library has loaded.

    Raises:
        UserError: For anything in it that this reader does not know.
    """
    try:
        fields = list(parse_fields(content))
        messages = {
            field: dict(parse_fields(_expect_bytes(data)))
            for field, data in fields
            if field in (2, 3)
        }
        trainer, normaliser = messages.get(2, {}), messages.get(3, {})
        return SentencePieceModel(
            kind=_KINDS[_expect_number(trainer.get(3, 1))],
            pieces=[_parse_piece(_expect_bytes(data)) for field, data in fields if field == 1],
            byte_fallback=bool(trainer.get(35, 0)),
            charsmap=_expect_bytes(normaliser.get(2, b"")),
            dummy_prefix=bool(normaliser.get(3, 1)),
            remove_extra_whitespaces=bool(normaliser.get(4, 1)),
            escape_whitespaces=bool(normaliser.get(5, 1)),
            whitespace_as_suffix=bool(trainer.get(24, 0)),
        )
    except (ValueError, KeyError, IndexError, struct.error) as error:
        raise UserError(f"{path}: not a SentencePiece model of a known form: {error}") from None


def _parse_piece(data: bytes) -> TextPiece:
    fields = dict(parse_fields(data))
    (score,) = struct.unpack("<f", _expect_bytes(fields.get(2, bytes(4))))
    kind = PieceType(_expect_number(fields.get(3, PieceType.NORMAL)))
    return TextPiece(_expect_bytes(fields[1]).decode(), score, kind)


def parse_fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the number and value of each field of a message: an integer, or bytes.

    Raises:
        ValueError: For what is no message of the wire format, or has groups.
        IndexError: If it ends within a field.
    """
    offset = 0
    while offset < len(data):
        tag, offset = _parse_varint(data, offset)
        number, wire = tag >> 3, tag & 7
        if tag >= _LARGEST_TAG:
            raise ValueError(f"field {number}")
        if wire == _VARINT:
            value, offset = _parse_varint(data, offset)
            yield number, value
            continue
        if wire == _LENGTH:
            size, offset = _parse_varint(data, offset)
        elif wire in (_FOUR_BYTES, _EIGHT_BYTES):
            size = 4 if wire == _FOUR_BYTES else 8
        else:
            raise ValueError(f"wire type {wire}")
        yield number, data[offset : offset + size]
        offset += size


def _parse_varint(data: bytes, offset: int) -> tuple[int, int]:
    value = 0
    for number in range(_LONGEST_VARINT):
        byte = data[offset + number]
        value |= (byte & 127) << 7 * number
        if byte < 128:
            return value, offset + number + 1
    raise ValueError(f"an integer of more than {_LONGEST_VARINT} bytes")


def _expect_bytes(value: int | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("a number where bytes are expected")
    return value


def _expect_number(value: int | bytes) -> int:
    if not isinstance(value, int):
        raise ValueError("bytes where a number is expected")
    return value
