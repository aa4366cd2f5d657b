"""Weights of labels, from a file beside a token file: PREFIX.weights.bin and PREFIX.weights.idx.

The file is an indexed dataset of the same sequences and documents whose numbers are, instead of
tokens, how much each token counts as a label: 0 for none, as of what a user says to an assistant.
uint8 is a mask of 0 and 1; float32 has any numbers of 0 or more.
"""

from __future__ import annotations

import os
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from megaframe.data.indexed_dataset import IndexedDataset
from megaframe.errors import UserError

SUFFIX = ".weights"
MASK_DTYPE, WEIGHT_DTYPE = np.dtype("u1"), np.dtype("<f4")


def open_label_weights(prefix: str, tokens: IndexedDataset) -> IndexedDataset | None:
    """Return the weights of a token file, or None if there is no such file.

    Args:
        prefix: Path of the token file without suffix.
        tokens: The token file.

    Raises:
        UserError: The file is damaged, has other sequences, or numbers of another type.
    """
    path = prefix + SUFFIX
    if not (os.path.lexists(f"{path}.idx") or os.path.lexists(f"{path}.bin")):
        return None
    weights = IndexedDataset(path)
    if weights.dtype not in (MASK_DTYPE, WEIGHT_DTYPE):
        raise UserError(
            f"{path} holds {weights.dtype}; weights of labels are float32, or uint8 for a mask"
        )
    for what, own, other in (
        ("sequences", weights.lengths, tokens.lengths),
        ("documents", weights.documents, tokens.documents),
        ("sequences", _locate(weights), _locate(tokens)),
    ):
        if own.size != other.size or (own != other).any():
            raise UserError(
                f"{path}.idx has {own.size:,} {what} of {weights.tokens.size:,} numbers, and "
                f"{prefix}.idx {other.size:,} of {tokens.tokens.size:,} tokens, or in another "
                "place; write both files from the same text, or delete one with its .bin"
            )
    return weights


def _locate(file: IndexedDataset) -> NDArray[np.int64]:
    """Return where each sequence begins, counted in numbers."""
    return np.asarray(file.pointers) // file.dtype.itemsize


def find_wrong_weight(weights_WT: NDArray) -> tuple[int, int] | None:
    """Return where the first number is that is no weight; None if all are."""
    is_mask = weights_WT.dtype == MASK_DTYPE
    # NaN compares as false.
    good_WT = weights_WT <= 1 if is_mask else (weights_WT >= 0) & (weights_WT < np.inf)
    if good_WT.all():
        return None
    row, column = np.argwhere(~good_WT)[0].tolist()
    return row, column


def refuse_weight(prefix: str, token: int, weight: np.generic) -> NoReturn:
    """Raise `UserError` for a number that is no weight.

    Args:
        prefix: Path of the token file without suffix.
        token: Place of the number in the file.
        weight: The number.
    """
    is_mask = weight.dtype == MASK_DTYPE
    allowed = "0 and 1, in uint8; others are float32" if is_mask else "finite numbers of 0 or more"
    raise UserError(
        f"{prefix}{SUFFIX}.bin: token {token} has the weight {weight}; weights are {allowed}"
    )
