"""Frame: what all blocks of a stage share for one microbatch.

Rotary tables, the attention mask and the key of the dropout masks depend on the microbatch, not on
the block, so they are made once and handed to every block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megaframe.config import Model
from megaframe.microbatch import Microbatch
from megaframe.nn.dropout import Dropout
from megaframe.nn.rotary import Rotary


class Later:
    """Work of a backward pass that nothing waits for: the gradients of weights. It is done at once,
    or with `hold` kept until somebody takes it."""

    def __init__(self) -> None:
        self.hold = False
        self._held: list[Callable[[], None]] = []

    def do(self, work: Callable[[], None]) -> None:
        """Do `work` now, or keep it."""
        if self.hold:
            self._held.append(work)
        else:
            work()

    def take(self) -> list[Callable[[], None]]:
        """What is kept, in order; the next work starts a new list."""
        held, self._held = self._held, []
        return held


@dataclass(frozen=True)
class Frame:
    """rotary: turns queries and keys, None without rotary positions.
    mask: bool [S, S] or [B, 1, S, S], true where a query (row) may see a key; None for causal.
    dropout: the masks of this step's tokens, None when nothing is dropped.
    selective: norms and activations are not kept but computed again in backward.
    later: where the backward of this microbatch puts its weight gradients."""

    rotary: Rotary | None
    mask: Tensor | None
    dropout: Dropout | None
    selective: bool
    later: Later = field(default_factory=Later)


def make_frame(
    model: Model,
    microbatch: Microbatch,
    dtype: torch.dtype,
    dropout_key: int | None,
    *,
    selective: bool,
) -> Frame:
    """The frame of `microbatch`. `dropout_key` is a function of seed and step; None in evaluation
    and when nothing is dropped."""
    rotary = None
    if model.position == "rotary":
        rotary = Rotary(model, positions_of(microbatch), dtype)
    dropout = None
    if dropout_key is not None and model.dropout > 0:
        dropout = Dropout(model.dropout, dropout_key, microbatch.samples_B, microbatch.tokens_BS)
    return Frame(rotary, _mask(model.window, microbatch), dropout, selective)


def positions_of(microbatch: Microbatch) -> Tensor:
    """Position of each token, int64 [B, S], or [S] when all samples count alike."""
    if microbatch.positions_BS is not None:
        return microbatch.positions_BS
    tokens = microbatch.tokens_BS
    return torch.arange(tokens.shape[1], device=tokens.device)


def _mask(window: int | None, microbatch: Microbatch) -> Tensor | None:
    tokens, documents = microbatch.tokens_BS, microbatch.documents_BS
    length = tokens.shape[1]
    window = min(window or length, length)
    if documents is None and window == length:
        return None
    order = torch.arange(length, device=tokens.device)
    distance = order[:, None] - order[None, :]
    mask = (distance >= 0) & (distance < window)
    if documents is not None:
        mask = (mask & (documents[:, :, None] == documents[:, None, :]))[:, None]
    return mask
