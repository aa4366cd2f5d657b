"""Closed forms of the theory: each is what it claims, and agrees with what the planner predicts."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaframe.config import RunConfig
from megaframe.errors import UserError
from megaframe.hardware.cluster import load_cluster
from megaframe.layout import Layout
from megaframe.planner.collective_times import ALGORITHMS, GroupLevel
from megaframe.planner.constants import get_family_constants
from megaframe.planner.rooflines import compute_communication_rooflines
from megaframe.planner.theory.crossover import find_crossover, list_fastest_algorithms
from megaframe.planner.theory.roofline import (
    compute_attainable_flops,
    compute_attention_intensity,
    compute_product_intensity,
    compute_ridge,
    find_attention_seq,
    find_hiding_batch,
    find_hiding_seq,
    find_hiding_tensor_size,
    find_product_rows,
)
from megaframe.planner.theory.scaling_laws import (
    LAWS,
    PETAFLOP_DAY,
    LossLaw,
    compute_tokens,
    compute_tokens_per_parameter,
    load_law,
)
from megaframe.planner.theory.speedup import (
    compute_fixed_speedup,
    compute_scaled_speedup,
    compute_serial_seconds,
    compute_serial_share,
)

seconds = st.floats(1e-3, 1e3)
times = st.floats(1.5, 1e5)


@given(serial=seconds, divided=seconds, n=times)
def test_the_laws_of_speed_up_are_those_of_a_part_that_is_divided(serial, divided, n):
    def take(ranks, work=1.0):
        return serial + divided * work / ranks

    assert compute_serial_seconds(take(1), take(2)) == pytest.approx(serial, rel=1e-4, abs=1e-9)
    share = serial / take(1)
    assert compute_fixed_speedup(share, n) == pytest.approx(take(1) / take(n))
    assert compute_scaled_speedup(share, n) == pytest.approx(take(1, n) / take(n, n))
    assert compute_fixed_speedup(share, 1e30) == pytest.approx(1 / share)
    assert compute_serial_share(take(1) / take(n), n) == pytest.approx(share, rel=1e-6, abs=1e-9)


levels = st.builds(
    lambda ranks, alpha, bandwidth, gamma: [GroupLevel(ranks, alpha, bandwidth, gamma=gamma)],
    st.integers(4, 512).map(float), st.floats(1e-7, 1e-3), st.floats(1e7, 1e12),
    st.floats(0, 1e-8),
)  # fmt: skip


@given(group=levels, small=st.sampled_from(["tree", "binomial"]))
def test_at_the_crossover_both_algorithms_take_equally_long(group, small):
    size = find_crossover("all_reduce", small, "ring", group)
    assert size is not None and find_crossover("all_reduce", "ring", small, group) is None
    small, large = (ALGORITHMS["all_reduce"][name] for name in (small, "ring"))
    assert float(small(size, group)) == pytest.approx(float(large(size, group)), rel=1e-6)
    assert small(size / 2, group) < large(size / 2, group)
    assert small(size * 2, group) > large(size * 2, group)


@given(group=levels, size=st.floats(1, 1e13))
def test_the_fastest_by_size_is_the_fastest_of_all(group, size):
    names = ("naive", "binomial", "ring", "tree", "halving_doubling", "hierarchical")
    fastest = [name for start, name in list_fastest_algorithms("all_reduce", group, names)
               if start <= size][-1]  # fmt: skip
    best = min(float(ALGORITHMS["all_reduce"][name](size, group)) for name in names)
    assert float(ALGORITHMS["all_reduce"][fastest](size, group)) == pytest.approx(best, rel=1e-6)


@given(ranks=st.sampled_from([4, 16, 1024]), gamma=st.floats(0, 1e-8))
def test_the_crossover_of_ring_and_tree_has_a_closed_form(ranks, gamma):
    alpha, bandwidth = 5e-6, 2e10
    group = [GroupLevel(float(ranks), alpha, bandwidth, gamma=gamma)]
    saved = 2 * (ranks - 1 - math.log2(ranks)) * alpha
    expected = saved * ranks / (2 / bandwidth + gamma)
    assert find_crossover("all_reduce", "tree", "ring", group) == pytest.approx(expected)
    assert find_crossover("all_reduce", "ring", "tree", group) is None


def test_switches_that_cannot_add_are_no_algorithm():
    group = [GroupLevel(8.0, 1e-6, 1e10)]
    assert list(list_fastest_algorithms("all_reduce", group, ("in_network",))) == []


@given(
    ridge=st.floats(1, 2000), n=st.integers(64, 32768), k=st.integers(64, 32768),
    width=st.sampled_from([1, 2, 4]),
)  # fmt: skip
def test_a_product_with_the_found_rows_is_at_the_ridge(ridge, n, k, width):
    rows = find_product_rows(ridge, n, k, width)
    most = compute_product_intensity(1e12, n, k, width)
    if rows is None:
        assert most <= ridge * (1 + 1e-6)
    else:
        assert compute_product_intensity(rows, n, k, width) == pytest.approx(ridge)
        assert compute_attainable_flops(ridge, 1e15, 1e15 / ridge) == pytest.approx(1e15)


@given(ridge=st.floats(1, 2000), queries=st.floats(64, 1e5), keys=st.floats(64, 1e5))
def test_attention_over_the_found_length_is_at_the_ridge(ridge, queries, keys):
    seq = find_attention_seq(ridge, queries, keys, 0.5, 2)
    assert compute_attention_intensity(seq, queries, keys, 0.5, 2) == pytest.approx(ridge)
    # Causal multi-head attention of one width: s c FLOPs a byte of two.
    assert compute_attention_intensity(4096, 128, 128, 0.5, 2) == pytest.approx(4096 / 4)
    assert compute_ridge(1e15, 1e12) == 1e3


def list_rooflines(layout, gpus=64, **train):
    model = {"layers": 24, "hidden": 4096, "heads": 32, "vocab": 32000}
    sizes = {"seq": 2048, "global_batch": 256, **train}
    config = RunConfig.model_validate({"model": model, "train": sizes, "parallel": layout})
    layout = Layout.from_parallel(config.parallel, gpus)
    constants = get_family_constants("h100")
    found = compute_communication_rooflines(config, layout, load_cluster("h100-ib"), constants)
    return {roofline.axis: roofline for roofline in found}


@pytest.mark.parametrize("zero", [0, 1])
def test_from_the_found_batch_on_compute_hides_what_data_ranks_exchange(zero):
    data = list_rooflines({"tensor": 4, "zero": zero})["data"]
    batch = find_hiding_batch(data.intensity, data.ridge, 256)
    above = math.ceil(batch / 16) * 16
    for samples, is_hidden in ((above, True), (above - 16, False)):
        other = list_rooflines({"tensor": 4, "zero": zero}, global_batch=samples)["data"]
        assert other.is_compute_bound == is_hidden


def test_the_most_tensor_ranks_follow_from_any_number_of_them():
    found = {ranks: list_rooflines({"tensor": ranks})["tensor"] for ranks in (2, 4, 8)}
    most = [find_hiding_tensor_size(r.intensity, r.ridge, ranks) for ranks, r in found.items()]
    assert most == pytest.approx([most[0]] * 3)


def test_context_ranks_hide_their_transfers_from_the_found_length_on():
    short, doubled = (list_rooflines({"context": 16}, seq=seq)["context"] for seq in (2048, 4096))
    seq = find_hiding_seq(2048, short.intensity, doubled.intensity, short.ridge)
    there = list_rooflines({"context": 16}, seq=16 * round(seq / 16))["context"]
    assert there.intensity == pytest.approx(there.ridge, rel=1e-2)
    assert find_hiding_seq(2048, 5.0, 5.0, 9.0) is None


flops = st.floats(1e17, 1e27)


@given(
    name=st.sampled_from([name for name, law in LAWS.items() if isinstance(law, LossLaw)]),
    flops=flops,
    other=st.floats(1.001, 3),
)
def test_no_other_size_has_a_lower_loss_for_the_same_flops(name, flops, other):
    law = LAWS[name]
    best = law.find_parameters(flops)
    loss = law.compute_loss(best, compute_tokens(flops, best))
    for parameters in (best * other, best / other):
        assert law.compute_loss(parameters, compute_tokens(flops, parameters)) > loss


@given(name=st.sampled_from(sorted(LAWS)), flops=flops, dial=st.floats(0.1, 100))
def test_the_dial_moves_tokens_and_parameters_and_keeps_the_flops(name, flops, dial):
    law = LAWS[name]
    best = law.find_parameters(flops)
    ratio = compute_tokens_per_parameter(law, flops, dial)
    parameters = best / math.sqrt(dial)
    assert compute_tokens(flops, parameters) / parameters == pytest.approx(ratio)


def test_the_laws_say_what_their_papers_say():
    # Kaplan et al. 2020: 1.3e9 parameters for a petaflop-day, and 5.4 times as many for ten.
    assert LAWS["kaplan"].find_parameters(PETAFLOP_DAY) == pytest.approx(1.3e9)
    assert LAWS["kaplan"].find_parameters(10 * PETAFLOP_DAY) == pytest.approx(1.3e9 * 10**0.73)
    # Chinchilla: 70e9 parameters and 1.4e12 tokens, 20 for each.
    chinchilla = 6 * 70e9 * 1.4e12
    assert LAWS["chinchilla"].find_parameters(chinchilla) == pytest.approx(70e9, rel=0.1)


def test_a_law_is_read_from_a_file(tmp_path):
    path = tmp_path / "law.yaml"
    path.write_text(
        "irreducible: 1.8172\nparameter_factor: 482.01\nparameter_exponent: 0.3478\n"
        "token_factor: 2085.43\ntoken_exponent: 0.3658\n"
    )
    law = load_law(str(path))
    assert replace(law, source="") == replace(LAWS["chinchilla"], source="")
    path.write_text("coefficient: 0.1\nexponent: 5e-1\ncounts_tables: false\n")
    assert load_law(str(path)).find_parameters(1e20) == pytest.approx(1e9)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("irreducible: 1.8\nparameter_factor: 482\n", "parameter_exponent: missing; give"),
        ("coefficient: 0.1\nexponent: 1.5\n", "exponent: input should be less than 1"),
        ("exponent: 0.5\nfactor: 2\n", "factor: unknown key; use irreducible"),
        ("[1, 2]", "law.yaml"),
        ("a: [", "not valid YAML"),
        (None, "cannot be read: No such file"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_law_is_refused(text, message, tmp_path):
    path = tmp_path / "law.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=message):
        load_law(str(path))


def test_an_unknown_law_is_told_the_known_ones():
    with pytest.raises(UserError, match="--law chinchila is unknown; use chinchilla, "):
        load_law("chinchila")
