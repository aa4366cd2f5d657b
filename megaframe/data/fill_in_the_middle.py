"""Fill-in-the-middle: documents whose middle comes last, so that a model learns to fill a gap.

A document is cut at two random tokens into prefix, middle and suffix, and becomes, with three
special tokens (Bavarian et al. 2022, "Efficient training of language models to fill in the
middle"), one of

    PREFIX prefix SUFFIX suffix MIDDLE middle       prefix-suffix-middle (PSM)
    PREFIX SUFFIX suffix MIDDLE prefix middle       suffix-prefix-middle (SPM), their second form

and what ends the document stays behind it. The special tokens take the place of the last three
tokens of the document, so nothing else in the sample moves. What of a document is in a sample is
treated as a document. Everything random depends on the seed, the number of the sample in the
training order and the document's place in it, and on nothing else.

Shape suffixes: N samples, T tokens of a sample and the one after it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megaframe.config.data import DataConfig, DataSourceConfig
from megaframe.data.tokenizer import Tokenizer, load_tokenizer
from megaframe.data.transforms import make_generator
from megaframe.errors import UserError

Numbers = NDArray[np.int64]
_PLACE = 1 << 63  # transforms have the first ones
_SPECIAL_TOKENS = 3


@dataclass(frozen=True)
class FillInTheMiddle:
    """What becomes of the documents of a source.

    Attributes:
        rate: Share of documents that are changed.
        spm_rate: Share of these that become SPM.
        special: The ids of PREFIX, SUFFIX and MIDDLE.
        eod: The id that ends documents.
        seed: Of the run.
    """

    rate: float
    spm_rate: float
    special: tuple[int, int, int]
    eod: int
    seed: int

    def apply(
        self,
        tokens_NT: Numbers,
        weights_NT: NDArray | None,
        beginnings_NT: NDArray[np.bool_],
        samples_N: Numbers,
    ) -> None:
        """Change samples in place. The weight of a special token as a label is that of the token
        that it announces.

        Args:
            tokens_NT: Tokens.
            weights_NT: Their weights as labels; None if all are 1.
            beginnings_NT: Where documents begin.
            samples_N: Number of each sample in the training order.
        """
        for row, number in enumerate(samples_N.tolist()):
            starts = np.union1d(np.flatnonzero(beginnings_NT[row]), [0])
            ends = np.append(starts[1:], tokens_NT.shape[1])
            draws = make_generator(self.seed, number, _PLACE).random((starts.size, 4))
            for place in np.flatnonzero(draws[:, 0] < self.rate).tolist():
                document = slice(int(starts[place]), int(ends[place]))
                of_document = None if weights_NT is None else weights_NT[row, document]
                self._change(tokens_NT[row, document], of_document, draws[place, 1:])

    def _change(self, tokens: Numbers, weights: NDArray | None, draws: NDArray) -> None:
        """Change a document in place. draws: three random numbers in [0, 1)."""
        body = tokens.size - int(tokens[-1] == self.eod)
        length = body - _SPECIAL_TOKENS
        if length < 1:
            return
        cuts = np.sort((draws[1:] * (length + 1)).astype(np.int64))
        order, special_at = _order_parts(length, *cuts.tolist(), is_spm=draws[0] < self.spm_rate)
        tokens[:body] = tokens[order]
        tokens[list(special_at)] = self.special
        if weights is not None:
            weights[:body] = weights[order]


def _order_parts(
    length: int, low: int, high: int, *, is_spm: bool
) -> tuple[Numbers, tuple[int, int, int]]:
    """Return the place in the document of each token of the result, where a special token has that
    of the token that it announces; and the places in the result of the special tokens.

    Args:
        length: Tokens of the document.
        low: Its first token that is of the middle.
        high: Its first token that is of the suffix.
        is_spm: Whether the suffix comes first.
    """
    prefix, middle, suffix = np.split(np.arange(length), (low, high))
    announced = [high, high, 0] if is_spm else [0, high, low]
    first, second, third = np.split(np.minimum(announced, length - 1), 3)
    if is_spm:
        parts, places = (first, second, suffix, third, prefix, middle), (0, 1, 2 + suffix.size)
    else:
        parts = (first, prefix, second, suffix, third, middle)
        places = (0, 1 + low, 2 + low + suffix.size)
    return np.concatenate(parts), places


def find_fill_in_the_middle(
    source: DataSourceConfig, data: DataConfig, eod: int | None, seed: int
) -> FillInTheMiddle | None:
    """Return what `fim` of a source asks for; None if it has none.

    Args:
        source: The source.
        data: The section of the run.
        eod: The id that ends its documents, if the source says so.
        seed: Of the run.

    Raises:
        UserError: The tokenizer does not have a token, or nothing says what ends documents.
    """
    keys, name = source.fim, f"data.sources, fim of {source.path}"
    if keys is None:
        return None
    tokenizer = load_tokenizer(data.tokenizer) if data.tokenizer else None
    first, second, third = (
        _find_token(f"{name}: {key}", getattr(keys, key), tokenizer)
        for key in ("prefix", "suffix", "middle")
    )
    if isinstance(data.document_ends, int):
        eod = data.document_ends
    elif tokenizer is not None:
        eod = tokenizer.eod
    if eod is None:
        raise UserError(
            f"{name}: nothing says which token ends documents, which stays behind them; give "
            "data.tokenizer, or data.document_ends=ID"
        )
    if len({first, second, third, eod}) <= _SPECIAL_TOKENS:
        raise UserError(
            f"{name}: prefix, suffix and middle are the tokens {first}, {second} and {third}, and "
            f"documents end with {eod}; give four different ones"
        )
    return FillInTheMiddle(keys.rate, keys.spm_rate, (first, second, third), eod, seed)


def _find_token(name: str, token: int | str, tokenizer: Tokenizer | None) -> int:
    """Return the id of a token. name: of its key. Raises `UserError` for one that there is not."""
    if isinstance(token, int):
        return token
    found = tokenizer.find_id(token) if tokenizer else None
    if found is None:
        why = "data.tokenizer has no such token" if tokenizer else "there is no data.tokenizer"
        raise UserError(f"{name}={token}, and {why}; name a token of it, or give its id")
    return found
