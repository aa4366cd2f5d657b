"""A step calls few functions in Python: on a GPU each of them is time in which the host launches
nothing. Where no other rank is on an axis, the code for it is not called at all.

The numbers are counts, not times, so they are the same on every machine. A step that needs more
calls for a good reason moves its bound; the bounds are what such a step is judged by.
"""

import sys
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

import megaframe
from megaframe.config import RunConfig
from megaframe.data.microbatch import Microbatch
from megaframe.distributed.mesh import Mesh
from megaframe.layout import Layout
from megaframe.training.train_step import TrainStep

STEP = 430
"""Calls of a step of one layer on one rank: 390 when this was written, 1,014 before that."""
BLOCK = 220
"""Calls of each further block: 199 when this was written, 566 before that."""
ALONE = 12
"""Of these, calls in the rooms for axes on which this rank is alone: 10, 127 before that."""
ROOMS = ("context_parallel", "data_parallel", "expert_parallel")
"""Rooms for axes on which this rank is alone."""
PACKAGE = str(Path(megaframe.__file__).parent) + "/"


def count_calls(layers):
    """Return the calls of functions of the package in a step, by room."""
    model = {"layers": layers, "heads": 2, "hidden": 32, "ffn": 64, "vocab": 257}
    train = {"seq": 16, "global_batch": 1, "microbatch": 1, "steps": 3, "precision": "fp32"}
    mesh = Mesh(Layout(), device="cpu")
    train_step = TrainStep(
        RunConfig(model=model, train=train), mesh, trace=lambda action, kind: nullcontext()
    )
    train_step.optimizer.initialize(0)
    words = torch.arange(17)[None]
    microbatch = Microbatch(words[:, :-1], words[:, 1:], torch.zeros(1, dtype=torch.int64))
    for step in range(2):  # the first builds what later ones reuse
        train_step.train([microbatch], step, 1.0)
    calls = Counter()

    def count(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            calls[frame.f_code.co_filename.removeprefix(PACKAGE).partition("/")[0]] += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        train_step.train([microbatch], 2, 1.0)
    finally:
        sys.setprofile(before)
    mesh.close()
    return calls


@pytest.fixture(scope="module")
def one_layer():
    return count_calls(1)


def test_a_step_of_one_layer_on_one_rank(one_layer):
    assert 0.8 * STEP < one_layer.total() <= STEP, one_layer


def test_a_further_block(one_layer):
    block = count_calls(3)
    block.subtract(one_layer)
    assert block.total() / 2 <= BLOCK, block
    assert sum(block[room] for room in ROOMS) / 2 <= ALONE, block
