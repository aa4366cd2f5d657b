"""Rank files of tiktoken: tokens with their ranks, and what the published ones do not contain."""

from __future__ import annotations

import base64

from megaframe.errors import UserError

MAX_VOCAB = 1 << 24

GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
_CL100K_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
_LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_O200K_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PUBLISHED_RANKS: dict[int, tuple[str, int]] = {
    100256: (_CL100K_PATTERN, 100257),
    128000: (_LLAMA3_PATTERN, 128001),
    199998: (_O200K_PATTERN, 199999),
}
"""By number of ranks in a published .tiktoken file: its split pattern and end-of-document id, which
the file does not contain. Source: tiktoken_ext/openai_public.py and llama3's tokenizer.py. All
other files, among them GPT-2 (r50k) and p50k, use `GPT2_PATTERN` and the first free id, which is
the right one for these two."""


def parse_ranks(path: str, content: bytes) -> dict[bytes, int]:
    """Parse a rank file into ranks by token.

    Raises:
        UserError: For invalid lines, ranks that are used twice, and bytes without a rank, because
            some text could then not be encoded. It quotes no line: a config can name any file.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), 1):
        if not line:
            continue
        try:
            encoded, rank_text = line.split()
            token, rank = base64.b64decode(encoded, validate=True), int(rank_text)
        except ValueError:
            raise UserError(f"{path}:{number}: not a token in base64 and its rank") from None
        if not token or token in ranks:
            raise UserError(f"{path}:{number}: a token that is empty or repeated")
        if not 0 <= rank < MAX_VOCAB:
            raise UserError(f"{path}:{number}: a rank outside 0 to {MAX_VOCAB - 1}")
        ranks[token] = rank
    missing = sum(bytes([byte]) not in ranks for byte in range(256))
    if missing:
        raise UserError(f"{path}: {missing} of the 256 single bytes have no rank")
    different = len(set(ranks.values()))
    if different != len(ranks):
        raise UserError(f"{path}: {len(ranks)} tokens share {different} ranks; each needs its own")
    return ranks
