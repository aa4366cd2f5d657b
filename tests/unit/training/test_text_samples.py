"""Samples of text during training that cannot be made as asked."""

import pytest
from config_refusals import list_refusals

from megaframe.config import RunConfig
from megaframe.distributed.mesh import Mesh
from megaframe.errors import UserError
from megaframe.layout import Layout
from megaframe.training.text_samples import TextSampler
from megaframe.training.train_step import TrainStep


def make_sampler(vocab=257, **train):
    config = RunConfig(
        model={"layers": 1, "hidden": 16, "heads": 2, "vocab": vocab},
        train={"seq": 8, "precision": "fp64", "sample_every": 1, **train},
        data={"tokenizer": "bytes"},
    )
    train_step = TrainStep(config, mesh := Mesh(Layout(), device="cpu"))
    train_step.optimizer.initialize(config.run.seed)
    return TextSampler(config, mesh, train_step), train_step


def test_what_cannot_be_sampled_is_refused_by_name():
    (text,) = list_refusals("train.sample_every=5")
    assert text.startswith("train.sample_every=5 makes text, and data.tokenizer is not set")
    (text,) = list_refusals(
        "train.sample_every=5", "data.tokenizer=bytes", "train.sample_prompts=[]"
    )
    assert "train.sample_prompts=[] is empty" in text
    assert not list_refusals("train.sample_every=5", "data.tokenizer=bytes")
    with pytest.raises(UserError, match=r"train\.sample_prompts\[1\] has 9 tokens, and the model"):
        make_sampler(sample_prompts=["abc", "123456789"])
    with pytest.raises(UserError, match="bytes has 257 ids and the model 256"):
        make_sampler(vocab=256)


def test_a_model_that_gives_no_numbers_makes_no_text():
    sampler, train_step = make_sampler(sample_prompts=["", "abc"])
    assert all(sample.text for sample in sampler.sample(1))
    for parameter in train_step.stages[0].parameters():
        parameter.value.fill_(float("nan"))
    assert [sample.text for sample in sampler.sample(2)] == ["", ""]
