"""Samples of text during training are the same under every layout, and training does not notice
them.

Tests `megaframe.training.text_samples` and `megaframe.training.text_windows`.
"""

from functools import cache

import pytest
from bitwise import assert_same_losses
from entry_runs import read_lines, read_losses, train
from patience import PATIENCE
from slow_cases import slow

from megaframe.config import RunConfig
from megaframe.data.tokenizer import load_tokenizer
from megaframe.distributed.mesh import Mesh, read_world_size
from megaframe.inference.generation import (
    SampleRequest,
    SamplingOptions,
    allocate_parameters,
    encode_prompt,
    sample,
)
from megaframe.layout import Layout
from megaframe.pipeline_parallel.stage import build_whole_model
from megaframe.training.text_samples import TextSampler
from megaframe.training.train_step import TrainStep

PROMPTS = ["", "four", "it grows beyond what it can see"[:30]]
DENSE = {"layers": 2, "norm": "rmsnorm", "activation": "swiglu", "kv_heads": 2}
MODELS = {
    "dense": DENSE,
    "tied": {**DENSE, "layers": 4, "position": "learned", "tie_embeddings": True, "window": 5},
    "experts": {**DENSE, "moe": {"experts": 4, "top_k": 2, "ffn": 24}},
}
LAYOUTS = [
    slow("dense", 2, {"tensor": 2, "zero": 0}),
    slow("dense", 2, {"context": 2}),
    slow("dense", 2, {"zero": 3}),
    slow("dense", 4, {"tensor": 2, "pipeline": 2, "schedule": "zb-h1"}),
    slow("dense", 4, {"data_replicate": 2, "zero": 2}),
    ("tied", 4, {"pipeline": 2, "context": 2, "chunks": 2, "schedule": "interleaved"}),
    slow("tied", 4, {"pipeline": 2, "zero": 3, "chunks": 2, "schedule": "zb-v"}),
    slow("experts", 4, {"expert": 2, "zero": 3}),
    slow("experts", 4, {"tensor": 2, "expert": 2, "expert_tensor": 2}),
]


def configure(model, parallel, temperature=0.0):
    return RunConfig(
        model={"hidden": 16, "heads": 4, "vocab": 263, "init_std": 0.5, **MODELS[model]},
        train={
            "seq": 32, "precision": "fp64", "microbatch": 2, "global_batch": 8, "sample_every": 1,
            "sample_prompts": PROMPTS, "sample_tokens": 6, "sample_temperature": temperature,
        },
        data={"tokenizer": "bytes"},
        parallel=parallel,
    )  # fmt: skip


def sample_on_rank(model, parallel):
    """Return the texts of two steps on this rank, greedy ones and others."""
    config = configure(model, parallel)
    layout = Layout.from_parallel(config.parallel, read_world_size())
    mesh = Mesh(layout, device="cpu", timeout=PATIENCE)
    train_step = TrainStep(config, mesh)
    train_step.optimizer.initialize(config.run.seed)
    texts = []
    for temperature in (0.0, 0.8):
        sampler = TextSampler(configure(model, parallel, temperature), mesh, train_step)
        texts += [[text.text for text in sampler.sample(step)] for step in (1, 2)]
    mesh.finish()
    return texts


@pytest.fixture(scope="module")
def alone(pool):
    """alone(model) -> the texts of one rank."""
    return cache(lambda model: pool.run(1, sample_on_rank, model, {})[0])


@pytest.mark.parametrize(("model", "ranks", "parallel"), LAYOUTS)
def test_layouts_do_not_change_the_text(model, ranks, parallel, pool, alone):
    first_greedy, second_greedy, first, second = expected = alone(model)
    assert first_greedy == second_greedy != first != second
    assert len({*first}) == len(PROMPTS)
    assert pool.run(ranks, sample_on_rank, model, parallel) == [expected] * ranks


def test_a_greedy_text_is_that_of_the_tool():
    config, tokenizer = configure("tied", {}), load_tokenizer("bytes")
    mesh = Mesh(Layout(), device="cpu")
    train_step = TrainStep(config, mesh)
    train_step.optimizer.initialize(config.run.seed)
    whole = build_whole_model(config)
    allocate_parameters(whole, "cpu")
    values = {
        p.spec.name: p.value for stage in train_step.stages.values() for p in stage.parameters()
    }
    for parameter in whole.parameters():
        parameter.value.copy_(values[parameter.spec.name])
    for prompt, text in zip(PROMPTS, TextSampler(config, mesh, train_step).sample(1), strict=True):
        start = encode_prompt(tokenizer, prompt or None, 32)
        greedy = SampleRequest(start, 6, SamplingOptions(), 0, lambda ids: ids[-1] == tokenizer.eod)
        *_, ids = sample(whole, greedy, context=32)
        assert text.prompt + text.text == tokenizer.decode(ids)


@pytest.mark.parametrize("experts", [slow(False), True])
def test_training_does_not_notice_samples(experts, pool, overrides, tmp_path):
    moe = {"model__moe": "{experts: 4, top_k: 2, ffn: 16, balance_rate: 0.01}"} if experts else {}
    keys = {**moe, "model__vocab": 257, "model__dropout": 0.1, "data__tokenizer": "bytes",
            "train__steps": 4, "train__eval_every": 2, "parallel__zero": 3}  # fmt: skip
    sampling = {"train__sample_every": 2, "train__sample_prompts": "['', abc]",
                "train__sample_tokens": 5, "run__dir": tmp_path / "samples"}  # fmt: skip
    pool.run(2, train, overrides(**keys))
    pool.run(2, train, overrides(**keys, **sampling))
    runs = tmp_path / "run", tmp_path / "samples"
    sampling = [key.replace("__", ".") for key in sampling]
    because = "samples change neither the buffers nor the random numbers of training"
    assert_same_losses(*map(read_losses, runs), because=because, but=sampling)
    without, sampled = map(read_lines, runs)
    for name in ("grad_norm", "eval_loss"):
        assert [line.get(name) for line in sampled] == [line.get(name) for line in without]
    spent = [line["time"]["sampling"] for line in sampled]
    assert [bool(seconds) for seconds in spent] == [False, True] * 2
    assert all(line["lost"]["sampling"] > 0 for line in sampled[1::2])
