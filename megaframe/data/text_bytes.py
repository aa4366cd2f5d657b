"""How many bytes of text tokens represent, for bits per byte.

The text is the user's own: a space that a tokenizer puts before each text is not part of it, and a
special token represents nothing.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megaframe.data.tokenizer import Tokenizer


class TextBytes:
    """The bytes of text that tokens represent.

    A tokenizer that changes texts before it divides them (Unicode normal forms, runs of spaces) is
    taken at its word: the bytes are those of the changed text, which is all that its tokens say.

    Args:
        tokenizer: Which made the tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._eod = tokenizer.eod
        # Ids that the tokenizer does not have, which a model may have, represent nothing.
        self._counts = np.append(tokenizer.count_token_bytes(), 0).astype(np.int64)
        self._first_counts = np.append(tokenizer.count_first_bytes(), 0).astype(np.int64)

    def count(
        self,
        tokens: NDArray[np.integer],
        previous: NDArray[np.integer],
        begins: NDArray[np.bool_] | None = None,
    ) -> NDArray[np.int64]:
        """Return the bytes of each token.

        Args:
            tokens: Ids; none is negative.
            previous: The token before each. One after an end of document begins a text.
            begins: Where else a text begins.
        """
        first = previous == self._eod
        if begins is not None:
            first = first | begins
        ids = np.minimum(tokens, self._counts.size - 1)
        return np.where(first, self._first_counts[ids], self._counts[ids])

    def count_sequence(
        self, tokens: NDArray[np.integer], begins: NDArray[np.bool_] | None = None
    ) -> NDArray[np.int64]:
        """Return the bytes of each token of a sequence, whose first one begins a text."""
        return self.count(tokens, np.append(self._eod, tokens[:-1]), begins)
