"""Which checkpoints a folder stands for, when somebody else has made it."""

import os

import pytest

from megaframe.checkpoint.folder import locate_checkpoint
from megaframe.checkpoint.manager import list_written_folders
from megaframe.config import RunConfig
from megaframe.errors import UserError


def test_a_run_folder_does_not_choose_whom_this_machine_talks_to(tmp_path):
    (tmp_path / "config.yaml").write_text("checkpoint: {folder: 's3://of-somebody-else/run'}\n")
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(UserError, match="in s3://of-somebody-else/run; if you trust it, give"):
        locate_checkpoint(str(tmp_path), "--checkpoint")


@pytest.mark.parametrize("target", ["checkpoints", "nowhere", "/dev/null"])
def test_checkpoints_that_are_a_link_are_one_message(tmp_path, target):
    (tmp_path / "checkpoints").symlink_to(target)
    config = RunConfig.model_validate({"run": {"dir": str(tmp_path)}})
    goal = target if os.path.isabs(target) else f"{tmp_path}/{target}"
    with pytest.raises(UserError, match=f"is a link.* set checkpoint.folder={goal} if"):
        list_written_folders(config.run, config.checkpoint)
