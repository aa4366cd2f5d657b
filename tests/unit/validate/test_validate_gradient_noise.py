"""What a measurement of gradient noise needs is named, with what to use instead."""

import pytest

from megaframe.config import load
from megaframe.errors import UserError
from megaframe.validate.run import validate_config

EVERY = "metrics.gradient_noise_every=5"
ZERO2 = ("parallel.zero=2", "parallel.data=2", "train.global_batch=8")


def list_refusals(*overrides, world):
    try:
        validate_config(load(None, ["model.vocab=100", EVERY, *overrides]), world, data=False)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("overrides", "world", "expected"),
    [
        ((), 1, "gradient_noise_every=5 compares the gradients of data ranks, and parallel.data=1"),
        (("parallel.compress=int8",), 2, "parallel.compress=int8 adds to it what earlier steps"),
        ((*ZERO2, "parallel.pipeline=2", "parallel.schedule=zb-h1"), 4, "schedule=zb-h1 may add"),
        ((*ZERO2, "model.tie_embeddings=true", "parallel.schedule=gpipe"), 2, "model.tie_embed"),
        ((*ZERO2, "parallel.schedule=gpipe", "model.tie_embeddings=false"), 2, ""),
        ((*ZERO2, "model.tie_embeddings=true"), 2, ""),
        (("parallel.zero=2", "train.global_batch=2", "parallel.schedule=gpipe"), 2, ""),
        (("parallel.data=2", "parallel.pipeline=2", "parallel.schedule=zb-h1"), 4, ""),
    ],
)
def test_what_is_missing_is_named(overrides, world, expected):
    refusals = list_refusals(*overrides, world=world)
    assert expected in refusals and bool(expected) == bool(refusals), refusals
    assert refusals.count("metrics.gradient_noise_every=5") == bool(expected)
