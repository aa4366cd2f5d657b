"""What several tests share: a small random model with its optimizer, in this process."""

from types import SimpleNamespace

import pytest
import torch
from pool import Pool

from megaframe.config import RunConfig
from megaframe.layout import Layout
from megaframe.mesh import Mesh
from megaframe.microbatch import IGNORE, Microbatch
from megaframe.model import Stage
from megaframe.optim.optimizer import Optimizer


@pytest.fixture
def build():
    """build(model, train=..., optim=...) -> config, stage, optimizer and weights by name (fp64)."""

    def make(model=None, **sections):
        sections["train"] = {
            "seq": 12,
            "global_batch": 3,
            "microbatch": 3,
            "precision": "fp64",
            "steps": 10,
            **sections.get("train", {}),
        }
        shape = {"layers": 2, "hidden": 16, "heads": 4, "vocab": 37, "init_std": 0.3}
        config = RunConfig(model={**shape, **(model or {})}, **sections)
        stage = Stage(config)
        optimizer = Optimizer(config, Mesh(Layout(), device="cpu"), stage.units)
        optimizer.initialise(config.run.seed)
        return SimpleNamespace(config=config, stage=stage, optimizer=optimizer)

    return make


@pytest.fixture
def make_microbatch():
    """make_microbatch(config, seed=0, documents=False) with some labels ignored."""

    def make(config, seed=0, documents=False):
        generator = torch.Generator().manual_seed(seed)
        batch, length = config.train.microbatch, config.train.seq
        tokens = torch.randint(0, config.model.vocab, (batch, length), generator=generator)
        labels = torch.randint(0, config.model.vocab, (batch, length), generator=generator)
        labels[torch.rand(batch, length, generator=generator) < 0.2] = IGNORE
        labels[0, 0] = 1
        microbatch = {"tokens_BS": tokens, "labels_BS": labels, "samples_B": torch.arange(batch)}
        if documents:
            starts = torch.rand(batch, length, generator=generator) < 0.3
            numbers = starts.cumsum(1)
            order = torch.arange(length).expand(batch, length)
            first = torch.where(starts, order, 0).cummax(1).values
            microbatch |= {"documents_BS": numbers, "positions_BS": order - first}
        return Microbatch(**microbatch)

    return make


@pytest.fixture(scope="session")
def pool():
    """Up to four ranks."""
    workers = Pool(4)
    yield workers
    workers.close()
