"""Any `torch.nn.Module` from outside as a mixer, a feed-forward layer or a norm.

The module is never asked to know of ranks. Its parameters are replaced by ours for each call, so
that they lie in buckets like all others (`layer.py`); what it is made of is read off an instance
without memory (`source.py`); what it keeps and computes is measured (`parts.py`).
"""

from megaframe.model.torch_module.parts import (
    TorchFeedForwardPart,
    TorchMixerPart,
    TorchNormPart,
)

__all__ = ["TorchFeedForwardPart", "TorchMixerPart", "TorchNormPart"]
