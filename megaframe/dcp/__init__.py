"""Folders of torch.distributed.checkpoint, from checkpoints and to them."""

from megaframe.dcp.folder import export, load

__all__ = ["export", "load"]
