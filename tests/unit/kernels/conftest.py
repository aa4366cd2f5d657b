"""Kernel tests run on a GPU if there is one, otherwise in Triton's interpreter."""

import importlib.util

import pytest
import torch

if importlib.util.find_spec("triton") is None:  # Triton does not support this system
    collect_ignore_glob = ["test_*"]


@pytest.fixture(autouse=True)
def tensors_are_made_there():
    # On a CPU too: what is written for one of them must not fail in the other's mode.
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        yield
