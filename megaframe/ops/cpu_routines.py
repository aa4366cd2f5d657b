"""The record of which CPU routines a run uses. It is part of the run's state in a checkpoint."""

from __future__ import annotations

import torch
from pydantic import BaseModel, ConfigDict

from megaframe.ops.cpu_attention import AttentionMethod, AttentionSize
from megaframe.ops.matmul import MatmulKind, MatmulLibrary, list_libraries


class CPURoutines(BaseModel):
    """What computes on the CPU with operands of one dtype.

    Attributes:
        type: Name of the dtype in torch; empty where torch's own routines are the only ones.
        products: Library by kind of matrix product.
        attention: Method by size of the attention problem.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: str = ""
    products: dict[MatmulKind, MatmulLibrary] = {}
    attention: dict[AttentionSize, AttentionMethod] = {}

    def is_available(self, dtype: torch.dtype) -> bool:
        """Return whether these are routines for a dtype, and this machine has all of them."""
        return self.type == str(dtype) and set(self.products.values()) <= set(list_libraries(dtype))

    def describe(self) -> str:
        """Return the routines in words for the log."""
        words = [f"{kind} {library}" for kind, library in self.products.items()]
        words += [f"{size} attention {method}" for size, method in self.attention.items()]
        return ", ".join(words)
