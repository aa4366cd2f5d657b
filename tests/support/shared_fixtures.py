"""Fixtures that several tests share: a small random model, a pool of ranks, a corpus, overrides."""

import gc
import os
import sys
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything (such as transformers) imports Triton

from fake_cuda.build import explain_obstacle
from fake_cuda.client import FakeCuda
from patience import report_at_once

from megaframe.config import RunConfig
from megaframe.data.indexed_dataset_writer import IndexedDatasetWriter
from megaframe.data.microbatch import IGNORE, Microbatch
from megaframe.data_parallel.sharded_parameters import ShardedParameters
from megaframe.distributed.mesh import Mesh
from megaframe.layout import EXPERT_SETS, Layout
from megaframe.model.layer_inputs import PLAIN_ROUTINES, make_layer_setup
from megaframe.model.model_chunk import build_whole_model_chunk
from megaframe.optim.optimizer import Optimizer
from megaframe.optim.parameter_groups import ParameterGroups
from megaframe.pipeline_parallel.stage import Stage
from megaframe.training.rank_pool import FORKSERVER, RARELY, RankPool

# What ranks of a test import beside the trainer is imported once, before they are forked: also
# torch's compiler, which it imports to find the shapes of some operators of layers from outside.
TRAINER = ["megaframe.training.trainer", "megaframe.training.rank_pool"]
FORKSERVER.set_forkserver_preload([*TRAINER, "hypothesis", "pytest", "torch._dynamo"])


def pytest_collection_finish():
    """Exclude imported objects from garbage collection, as the pool's workers do.

    There it saves a quarter of the time of small worlds.
    """
    # Each folder of tests comes before the others when a file of it is collected, so it is there
    # many times, and every import, also of processes that are forked, looks into all of them.
    sys.path[:] = dict.fromkeys(sys.path)
    gc.collect()
    gc.freeze()
    gc.set_threshold(RARELY)


@pytest.fixture
def build():
    """build(model, train=..., optim=...) -> config, stage, sharded_parameters and optimizer (fp64)
    of one rank."""

    def make(model=None, routines=PLAIN_ROUTINES, **sections):
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
        mesh, run = (
            Mesh(Layout(), device="cpu"),
            make_layer_setup(config.parallel, config.train, routines=routines),
        )
        if config.model.moe is not None:
            mesh.add_groups(EXPERT_SETS)
        chunk, groups = (
            build_whole_model_chunk(config.model, config.train, run),
            ParameterGroups(config, mesh),
        )
        sharded = ShardedParameters(config, mesh, {0: chunk.units}, groups.bucketing)
        optimizer = Optimizer(config.optim, config.train, mesh, sharded, groups)
        optimizer.initialize(config.run.seed)
        stage = Stage(config, chunk, run, sharded)
        return SimpleNamespace(
            config=config, stage=stage, sharded_parameters=sharded, optimizer=optimizer
        )

    return make


@pytest.fixture
def make_microbatch():
    """make_microbatch(config, seed=0, documents=False, weighted=False) -> microbatch with some
    labels ignored, and with weights of the others."""

    def make(config, seed=0, documents=False, weighted=False):
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
        if weighted:
            # Quarters, so that sums of weights are exact.
            weights = torch.randint(1, 13, (batch, length), generator=generator) / 4
            microbatch["weights_BS"] = weights
        return Microbatch(**microbatch)

    return make


@pytest.fixture(scope="session")
def pool():
    """Return a pool of up to four ranks."""
    workers = RankPool(4, report_at_once)
    yield workers
    workers.close()


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """Return the prefix of token files: 40 documents of a learnable language with 61 token ids."""
    prefix = str(tmp_path_factory.mktemp("corpus") / "tokens")
    generator = np.random.default_rng(0)
    with IndexedDatasetWriter(prefix, np.dtype(np.uint16)) as writer:
        for _ in range(40):
            start, step = generator.integers(0, 60, 2)
            length = int(generator.integers(30, 200))
            words = (start + step * np.arange(length)) % 60
            writer.append(np.append(words, 60).astype(np.uint16))
    return prefix


@pytest.fixture
def overrides(corpus, tmp_path):
    """overrides(**changes) -> command-line overrides of a tiny fp64 run in tmp_path/run."""
    return partial(make_overrides, corpus, tmp_path)


def make_overrides(corpus, folder, **changes):
    """Return command-line overrides of a tiny fp64 run in `folder`/run."""
    keys = {
        "run.dir": folder / "run",
        "run.device": "cpu",
        "model.layers": 2,
        "model.hidden": 16,
        "model.heads": 2,
        "model.vocab": 61,
        "train.seq": 16,
        "train.steps": 12,
        "train.global_batch": 8,
        "train.microbatch": 4,
        "train.precision": "fp64",
        "optim.lr": 0.01,
        "data.sources": f"[{{path: {corpus}}}]",
        "data.split": "[0.8, 0.2, 0.0]",
        "checkpoint.every": 0,
        "metrics.peak_tflops": 1.0,
        # Not measured: two runs of a test must compute alike, however busy the machine is.
        "kernels.matmul": "torch",
        **{key.replace("__", "."): value for key, value in changes.items()},
    }
    return [f"{key}={value}" for key, value in keys.items()]


@pytest.fixture(scope="session")
def fake_gpu(tmp_path_factory):
    """Return what calls functions on ranks with stand-ins for GPUs."""
    if (reason := explain_obstacle()) is not None:
        pytest.skip(reason)
    fake_cuda = FakeCuda(tmp_path_factory.mktemp("fake_cuda"))
    yield fake_cuda
    fake_cuda.close()
