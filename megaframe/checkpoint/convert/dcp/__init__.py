"""Converts between checkpoints and folders of torch.distributed.checkpoint."""

from megaframe.checkpoint.convert.dcp.dcp_folder import export, load

__all__ = ["export", "load"]
