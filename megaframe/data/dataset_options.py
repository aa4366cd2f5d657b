"""How the tokens of a source become samples, the same for a token file and for each block of a
stream."""

from __future__ import annotations

from dataclasses import dataclass

from megaframe.data.gpt_dataset import GPTDataset
from megaframe.data.packed_dataset import PackedDataset
from megaframe.data.split_advice import Split, SplitSetting


@dataclass(frozen=True)
class DatasetOptions:
    """How tokens become samples; see `GPTDataset`.

    Attributes:
        packed: Whether documents are packed into samples, and not cut wherever one is full.
    """

    split: Split
    shares: tuple[float, float, float]
    seq: int
    vocab: int
    end: int | None
    weighted: bool
    packed: bool = False

    def open(self, path: str, setting: SplitSetting | None = None) -> GPTDataset:
        """Return the samples of a token file. See `GPTDataset` for arguments and errors."""
        kind = PackedDataset if self.packed else GPTDataset
        return kind(
            path, self.split, self.shares, self.seq, self.vocab, self.end, setting,
            weighted=self.weighted,
        )  # fmt: skip
