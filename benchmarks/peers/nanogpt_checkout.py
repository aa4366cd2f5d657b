"""A checkout of nanoGPT: its `model.py` as a module, and its commit."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType


def import_model(checkout: Path) -> ModuleType:
    """Import nanoGPT's model.py. It prints while it builds, so the measurement must come last."""
    sys.path.insert(0, str(checkout))
    return importlib.import_module("model")


def read_revision(checkout: Path) -> str:
    """Return the commit of the checkout, or `unknown` if it is not a git checkout."""
    command = ("git", "-C", str(checkout), "rev-parse", "HEAD")
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout.strip() or "unknown"
