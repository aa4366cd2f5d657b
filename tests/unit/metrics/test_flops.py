"""FLOPs per token, compared with counts by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaframe.architecture.spec import Normal, ParamSpec
from megaframe.architecture.window import Chunk, compute_mean_keys
from megaframe.config import RunConfig
from megaframe.metrics.flops import count_flops
from megaframe.model.model_chunk import list_model_specs


def make_config(model, **train):
    return RunConfig.model_validate({"model": model, "train": train})


def test_the_model_of_the_benchmarks():
    run_config = make_config({"layers": 6, "hidden": 512, "heads": 8, "vocab": 50304}, seq=256)
    flops = count_flops(list_model_specs(run_config.model, run_config.train), run_config)
    # A layer has 4 matrices 512 x 512 (attention) and 2 of 512 x 2048 (MLP); the head 50304 x 512.
    matrices = 6 * (4 * 512 * 512 + 2 * 512 * 2048) + 50304 * 512
    assert matrices == 44_630_016
    assert flops.model == 6 * matrices + 6 * 6 * 512 * 256 == 272_498_688
    assert flops.full_attention == 6 * matrices + 6 * 12 * 512 * 256 == 277_217_280
    assert flops.hardware == flops.model


def test_gpt2_124m():
    run_config = make_config(
        {
            "layers": 12,
            "hidden": 768,
            "heads": 12,
            "vocab": 50257,
            "position": "learned",
            "bias": True,
            "tie_embeddings": True,
        },
        seq=1024,
    )
    flops = count_flops(list_model_specs(run_config.model, run_config.train), run_config)
    # 12 layers of 12 x 768^2; the tied table counts once, as head; positions, norms, biases do not.
    matrices = 12 * 12 * 768**2 + 50257 * 768
    assert matrices == 123_532_032
    assert flops.model == 6 * matrices + 12 * 6 * 768 * 1024 == 797_815_296
    assert flops.full_attention == 854_438_400


def test_tying_the_head_changes_nothing():
    shape = {"layers": 2, "hidden": 32, "heads": 4, "vocab": 97}
    counts = []
    for tied in (False, True):
        run_config = make_config({**shape, "tie_embeddings": tied}, seq=16)
        counts.append(count_flops(list_model_specs(run_config.model, run_config.train), run_config))
    assert counts[0] == counts[1]


def test_recompute_adds_the_forward_of_the_blocks_but_not_of_the_head():
    shape = {"layers": 2, "hidden": 32, "heads": 4, "vocab": 97, "window": 5}
    plain, recomputed = (make_config(shape, seq=16, recompute=kind) for kind in ("none", "full"))
    flops, recomputed_flops = (
        count_flops(list_model_specs(run_config.model, run_config.train), run_config)
        for run_config in (plain, recomputed)
    )
    head = 6 * 97 * 32
    assert (recomputed_flops.model, recomputed_flops.full_attention) == (
        flops.model,
        flops.full_attention,
    )
    assert recomputed_flops.hardware == pytest.approx(
        (flops.model - head) * 4 / 3 + head, rel=1e-14
    )


def test_only_what_is_multiplied_counts():
    roles = ("matrix", "head", "embedding", "gain", "bias")
    specs = [ParamSpec(role, (10**k,), Normal(1), role) for k, role in enumerate(roles)]
    run_config = make_config({"layers": 1, "hidden": 8, "heads": 1, "vocab": 3}, seq=1)
    assert count_flops(specs, run_config).full_attention == 6 * (1 + 10) + 12 * 8


@given(st.integers(1, 300), st.integers(1, 400))
def test_windows_count_the_keys_inside_them(seq, window):
    exact = sum(min(position + 1, window) for position in range(seq)) / seq
    counted = compute_mean_keys(seq, window)
    # `exact` counts the query's own key fully: half a key more in the triangle, no more after it.
    assert counted == pytest.approx(exact - min(window, seq) / (2 * seq), rel=1e-12)


@given(st.integers(1, 300), st.integers(1, 400))
def test_chunks_count_the_keys_inside_them(seq, size):
    exact = sum(position % size + 0.5 for position in range(seq)) / seq
    assert compute_mean_keys(seq, Chunk(size)) == pytest.approx(exact, rel=1e-12)


def test_every_layer_counts_the_keys_of_its_own_window():
    """Five layers and two predictors have windows 64, none, 128 in turn: three, two and two."""
    shape = {"layers": 5, "hidden": 32, "heads": 4, "vocab": 97, "mtp_depth": 2}
    keys = [64 - 64**2 / 2048, 512, 128 - 128**2 / 2048]
    mixed, none = (
        count_flops(list_model_specs(run_config.model, run_config.train), run_config)
        for run_config in (
            make_config({**shape, "window": (64, None, 128)}, seq=1024),
            make_config(shape, seq=1024),
        )
    )
    assert mixed.full_attention == none.full_attention
    saved = 12 * 32 * (7 * 512 - 3 * keys[0] - 2 * keys[1] - 2 * keys[2])
    assert none.model - mixed.model == saved
    uniform = make_config({**shape, "window": (64,)}, seq=1024)
    number = make_config({**shape, "window": 64}, seq=1024)
    assert count_flops(list_model_specs(uniform.model, uniform.train), uniform) == count_flops(
        list_model_specs(number.model, number.train), number
    )


def test_without_a_window_half_of_the_square_counts():
    assert compute_mean_keys(1024, None) == compute_mean_keys(1024, 5000) == 512
    assert compute_mean_keys(10**9, 128) == pytest.approx(128, rel=1e-6)
