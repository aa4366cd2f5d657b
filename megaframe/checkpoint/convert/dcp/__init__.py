"""Converts between checkpoints and folders of torch.distributed.checkpoint."""

from megaframe.checkpoint.convert.dcp.dcp_folder import export_checkpoint, import_checkpoint

__all__ = ["export_checkpoint", "import_checkpoint"]
