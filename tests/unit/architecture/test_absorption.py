"""Sparse attention absorbs where that multiplies less, and where it can.

Tests `megaframe.architecture.absorption` and `megaframe.validate.absorption`.
"""

import pytest
from repo_copy import ROOT

from megaframe.architecture.absorption import (
    count_multiplications,
    decide_absorption,
    explain_obstacle,
)
from megaframe.architecture.model_blocks import list_mixers
from megaframe.config import load
from megaframe.training.auto_layout import choose_absorption

LAYERS, HEADS, CHOSEN = 61, 128, 2048
FROZEN = ("model.indexer.loss=0", "model.mtp_depth=0")


def read(seq, *overrides):
    return load(str(ROOT / "configs/deepseek-v3.2.yaml"), [f"train.seq={seq}", *overrides])


def count(seq, absorb):
    model = read(seq, *FROZEN, f"model.indexer.absorb={absorb}").model
    return count_multiplications(model, seq)


def test_multiplications_are_the_closed_forms():
    """A score has 192 terms of keys and 128 of values, or 576 of latents and 512 of their values; a
    backward pass has twice as many. The indexer scores all keys either way."""
    seq = 16384
    scores = 64 * 128 * seq + 64 * seq
    seen = CHOSEN - CHOSEN**2 / (2 * seq)
    for absorb, products in (("false", seq / 2 * (192 + 128)), ("true", seen * (576 + 512))):
        expected = LAYERS * (scores + 3 * HEADS * products)
        assert count(seq, absorb) == pytest.approx(expected, rel=1e-12)


def test_it_begins_where_latents_multiply_less():
    """Both are the same where 160 T = 1088 (2048 - 2048^2 / 2 T)."""
    a, b, c = 160, -1088 * CHOSEN, 544 * CHOSEN**2
    first = (-b + (b * b - 4 * a * c) ** 0.5) / (2 * a)
    assert 12_800 < first < 12_820
    for seq in (int(first), int(first) + 1):
        decided = decide_absorption(read(seq, *FROZEN))
        assert decided.model.indexer.absorb is (seq > first)
    mixers = list_mixers(decided.model)
    assert all(mixer.absorbs for mixer in mixers) and len(mixers) == LAYERS


def test_a_loss_over_chosen_keys_makes_it_begin_earlier():
    """By latents it computes scores of attention and of the indexer for chosen keys alone."""
    trained, frozen = (decide_absorption(read(10_000, *keys)).model for keys in ((), FROZEN))
    assert trained.indexer.absorb is True and frozen.indexer.absorb is False
    assert decide_absorption(read(8192)).model.indexer.absorb is False


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (("model.indexer.dense=true",), "dense=true"),
        (("train.fp8=block",), "train.fp8=block"),
        (("model.adapters={rank: 2}", *FROZEN), "attention.kv.key"),
    ],
)
def test_what_is_against_it_is_said_and_decides(overrides, reason):
    config = read(131072, *overrides)
    assert reason in explain_obstacle(config.model, config.train)
    decided, (line,) = choose_absorption(config)
    assert decided.model.indexer.absorb is False
    assert line.startswith("model.indexer.absorb=auto: false, ") and reason in line


def test_a_decision_says_both_numbers_and_is_made_once():
    decided, (line,) = choose_absorption(read(131072, *FROZEN))
    fewer, more = (f"{count(131072, absorb):,.0f}" for absorb in ("true", "false"))
    assert line == (
        f"model.indexer.absorb=auto: true, {fewer} multiplications of attention per token in place "
        f"of {more}"
    )
    assert choose_absorption(decided) == (decided, [])
    assert choose_absorption(read(16, "model.indexer=null"))[1] == []
