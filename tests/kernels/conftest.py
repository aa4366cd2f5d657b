"""Tests of kernels run on a GPU where there is one, else in Triton's interpreter.

Which of the two must be said before the kernels are imported.
"""

import importlib.util
import os

import pytest
import torch

if importlib.util.find_spec("triton") is None:  # there is none for this system
    collect_ignore_glob = ["test_*"]
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def tensors_are_made_there():
    if not torch.cuda.is_available():
        yield
        return
    with torch.device("cuda"):
        yield
