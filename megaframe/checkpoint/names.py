"""Names of the files and folders of checkpoints, in local folders and under URLs."""

from __future__ import annotations

import re

POINTER = "latest"
LOCK = "lock"
"""The lock of a run on a folder that it writes (see `lock`)."""
FINAL = re.compile(r"step-([0-9]{8,12})(\.replaced)?")
TEMPORARY = re.compile(r"step-[0-9]{8,12}(\.replaced)?\.[0-9a-f]+\.tmp")
UPLOADED = re.compile(r"rank-[0-9]{5,9}\.[0-9]{5,9}\.([0-9a-f]{8})\.safetensors")
"""A file uploaded in one request; its name contains the attempt to save (see `remote`)."""
LOCK_BYTES = 4096
"""Most bytes of a lock."""


def final_name(step: int) -> str:
    return f"step-{step:08d}"


def is_temporary(name: str) -> bool:
    return name.endswith(".tmp")
