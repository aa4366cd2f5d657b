"""Dropout whose masks are a function of (seed, step, place, token, channel) and nothing else.

No random state is drawn from, so no layout, microbatch size, order of execution or recompute can
change a mask. The random bits are a hash of a counter, as in counter-based generators (Salmon et
al. 2011); the hash is the 64-bit finalizer of MurmurHash3.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

_BITS = 31


def dropout_key(seed: int, step: int) -> int:
    """The key of all masks of one optimizer step."""
    return _hash(f"{seed}/{step}")


class Dropout:
    """The masks of one microbatch. token_T: the number of each row's token in the whole run."""

    def __init__(self, rate: float, key: int, token_T: Tensor) -> None:
        self.rate, self.key = rate, key
        self._token_T1 = token_T[:, None]

    def __call__(self, x_TC: Tensor, place: str) -> Tensor:
        """x with elements set to 0 with probability `rate`, the others scaled up. `place` names
        where in the model this is."""
        channel = torch.arange(x_TC.shape[-1], device=x_TC.device)
        token = _mix(self._token_T1 ^ _hash(f"{self.key}/{place}"))
        bits = _mix(token + channel) & ((1 << _BITS) - 1)
        keep = bits >= int(self.rate * (1 << _BITS))
        return x_TC * (keep.to(x_TC.dtype) / (1.0 - self.rate))


def _hash(text: str) -> int:
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def _mix(x: Tensor) -> Tensor:
    for constant in (-49064778989728563, -4265267296055464877):
        x = (x ^ _shift(x)) * constant
    return x ^ _shift(x)


def _shift(x: Tensor) -> Tensor:
    """Logical right shift by 33 of a signed integer."""
    return (x >> 33) & ((1 << 31) - 1)
