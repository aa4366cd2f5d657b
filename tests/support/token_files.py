"""Token files for the tests, written by hand from the description of the format."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, models

CODES = {"u1": 1, "i4": 4, "f4": 7, "u2": 8}


def write_token_file(
    prefix: Path | str,
    documents: Sequence[Sequence[Sequence[int]]],
    dtype: str = "u2",
    pointers: Sequence[int] | None = None,
) -> str:
    """Write `documents`, each a list of sequences of token ids; return the prefix."""
    sequences = [sequence for document in documents for sequence in document]
    item = np.dtype(dtype).itemsize
    lengths = [len(sequence) for sequence in sequences]
    starts = np.concatenate([[0], np.cumsum(lengths)])[: len(lengths)] * item
    ends = np.concatenate([[0], np.cumsum([len(document) for document in documents])])
    flat = [token for sequence in sequences for token in sequence]
    Path(f"{prefix}.bin").write_bytes(np.array(flat, dtype).tobytes())
    Path(f"{prefix}.idx").write_bytes(
        struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, CODES[dtype], len(sequences), len(ends))
        + np.array(lengths, "<i4").tobytes()
        + np.array(starts if pointers is None else pointers, "<i8").tobytes()
        + ends.astype("<i8").tobytes()
    )
    return str(prefix)


def make_counting_documents(lengths: Sequence[int], first: int = 0) -> list[list[list[int]]]:
    """Return one-sequence documents whose tokens count up from `first` across all documents."""
    bounds = np.concatenate([[0], np.cumsum(lengths)]) + first
    return [[list(range(a, b))] for a, b in pairwise(bounds)]


def write_tokenizer(folder, special=(), added=(), file="tokenizer.json", **beside):
    """Write a tokenizer.json with these added tokens, and JSON files beside it."""
    names = [*special, *added, "a", "b"]
    vocab = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="a"))
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in added])
    tokenizer.save(str(folder / file))
    for name, content in beside.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return f"hf:{folder / file}"
