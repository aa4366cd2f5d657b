"""Kernel tests run on a GPU if there is one, otherwise in Triton's interpreter."""

import importlib.util

import pytest
import torch

if importlib.util.find_spec("triton") is None:  # Triton does not support this system
    collect_ignore_glob = ["test_*"]


@pytest.fixture(autouse=True)
def tensors_are_made_there():
    if not torch.cuda.is_available():
        yield
        return
    with torch.device("cuda"):
        yield
