"""Windows of text that all ranks of a run compute together, for samples and tasks.

Shape suffixes: W windows, S inputs of a window.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from megaframe.data.microbatch import IGNORE, Microbatch
from megaframe.model.layer_inputs import move_to_device

_LENGTH_UNIT = 64
"""Windows are padded to a multiple of this many tokens, so that passes have few different
shapes."""


def pad_windows(x_WS: Tensor, seq: int, filling: int) -> Tensor:
    """Return x with its last dim padded to a multiple of `_LENGTH_UNIT`, or to `seq`, the most
    tokens of a window. Padding comes after a text, where none of its tokens attends to it."""
    length = x_WS.shape[1]
    longer = min(seq, -(-length // _LENGTH_UNIT) * _LENGTH_UNIT)
    return F.pad(x_WS, (0, longer - length), value=filling)


def stack_ends(texts: Iterable[Sequence[int]], seq: int) -> tuple[Tensor, Tensor]:
    """Return the last ids of all texts as windows of at most `seq` tokens, int64 [W, S], and their
    labels: at the last token of each text its number, which asks for the prediction there."""
    windows = [torch.tensor(ids[-seq:]) for ids in texts]
    tokens_WS = torch.zeros(len(windows), max(map(len, windows)), dtype=torch.int64)
    labels_WS = torch.full_like(tokens_WS, IGNORE)
    for row, window in enumerate(windows):
        tokens_WS[row, : len(window)] = window
        labels_WS[row, len(window) - 1] = row
    return pad_windows(tokens_WS, seq, 0), pad_windows(labels_WS, seq, IGNORE)


def split_windows(
    tokens_WS: Tensor, labels_WS: Tensor, size: int, device: torch.device
) -> list[Microbatch]:
    """Return windows as microbatches on a device, of at most `size` samples each."""
    parts = (x.split(size) for x in (tokens_WS, labels_WS, torch.arange(len(tokens_WS))))
    return [move_to_device(Microbatch(*part), device) for part in zip(*parts, strict=True)]
