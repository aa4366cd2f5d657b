"""The planner's predictions of published steps, and the page that reports them."""

import re
import sys
from dataclasses import replace

import numpy as np
import published
import published_fit
import published_tables
import pytest
from own_runs import OWN_RUNS, format_own_runs, predict_own_runs
from published import (
    PAGE,
    PLOT,
    compute_choice_losses,
    find_cluster,
    get_left_out_constants,
    read_left_out,
    summarize_errors,
)
from published_fit import BOUNDS, Fit, LinearErrors
from published_page import format_section
from published_tables import TABLES
from slow_cases import mark_slow

from megaframe.planner.constants import CONSTANTS

# Limits on the mean and largest error of each table, a little above the page's errors. The page
# says which of them miss the goal, and why.
HELD = {
    "sc21_1": (0.02, 0.05),
    "sc21_2": (0.013, 0.025),
    "korthikanti": (0.031, 0.05),
    "readme": (0.041, 0.13),
    "megascale": (0.041, 0.085),
    "zero_bubble": (0.025, 0.055),
    "torchtitan": (0.03, 0.05),
    "llm_foundry": (0.052, 0.15),
    "dgxc": (0.02, 0.041),
    "vtrain_single": (0.13, 0.44),
    "vtrain_multi": (0.068, 0.38),
}
QUICK = ("readme",)
"""Megatron-LM's table: of many layouts, and soon predicted."""


def compute_megatron_bytes(seq, hidden, heads, tensor, recompute, sequence_parallel):
    """Return the bytes per element of the stream that a block of Megatron-LM keeps in 16 bits.

    Of an element (s b h of them), 10 bytes are not divided among tensor ranks unless
    `sequence_parallel`, 24 are divided, and attention's scores add 5 heads seq / hidden
    (Korthikanti et al. 2022, equations 1 to 4). recompute: `none`, `selective` (of attention), or
    `full`, which keeps only the block's input, whole on each rank.
    """
    if recompute == "full":
        return 2.0
    scores = 5.0 * heads * seq / hidden / tensor
    stream = 10.0 / tensor if sequence_parallel else 10.0
    return stream + 24.0 / tensor + (scores if recompute == "none" else 0.0)


def predict_lines(name):
    predictions = published.predict_table(name)
    if not predictions:
        pytest.skip(f"{name} is read from ../shared/anchors, which is not here")
    return predictions


@pytest.mark.parametrize("name", mark_slow(TABLES, except_for=QUICK))
def test_steps_are_predicted(name):
    """With constants that were fitted without the table's source."""
    errors, (mean, most) = summarize_errors(predict_lines(name)), HELD[name]
    assert errors.mean <= mean and errors.most <= most
    assert errors.mean < errors.null


@pytest.mark.parametrize("name", mark_slow(TABLES, except_for=QUICK))
def test_the_page_tells_every_row(name):
    assert format_section(TABLES[name], predict_lines(name)) in PAGE.read_text(encoding="utf-8")


def run_command(monkeypatch, folder, capsys, *arguments):
    """Run the command of the page on copies of the page and its plot. Return what it prints, the
    page and the plot."""
    for name, path in (("PAGE", PAGE), ("PLOT", PLOT)):
        copy = folder / path.name
        copy.write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
        monkeypatch.setattr(published, name, copy)
    monkeypatch.setattr(sys, "argv", ["published.py", *arguments])
    published.main()
    files = (folder / path.name for path in (PAGE, PLOT))
    return capsys.readouterr().out.splitlines(), *(f.read_text(encoding="utf-8") for f in files)


@pytest.mark.slow
def test_the_command_of_the_page_makes_it(monkeypatch, tmp_path, capsys):
    printed, page, plot = run_command(monkeypatch, tmp_path, capsys, "--write")
    present = [name for name in TABLES if published.predict_table(name)]
    missing = [name for name in TABLES if TABLES[name].missing_file]
    assert present + missing == list(TABLES)
    assert plot.startswith("<svg")
    assert len([line for line in printed if line.startswith("|")]) == 2 + len(present)
    assert (page, plot) == (PAGE.read_text(encoding="utf-8"), PLOT.read_text(encoding="utf-8"))


@pytest.mark.slow
def test_a_clone_without_the_long_tables_names_the_lines_that_it_cannot_make(
    monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr(published_tables, "ANCHORS", tmp_path)
    monkeypatch.setattr(published, "predict_table", published.predict_table.__wrapped__)
    tables = ("readme", "llm_foundry", "vtrain_multi")
    printed, page, _ = run_command(monkeypatch, tmp_path, capsys, "--write", "--tables", *tables)
    assert page == PAGE.read_text(encoding="utf-8")
    foundry, vtrain = (line for line in printed if line.startswith("../shared/anchors/"))
    assert "llm_foundry_h100_a100.csv is missing: lines" in foundry
    assert "vtrain_multi_a100.csv is missing: lines" in vtrain
    lines = page.splitlines()
    for note, source in ((foundry, TABLES["llm_foundry"].source), (vtrain, "What is not reached")):
        numbers = re.findall(r"[ ,](\d+)(?:-\d+)?", note.partition(" of docs")[0])
        rows = [lines[int(number) - 1] for number in numbers]
        assert any(line.startswith(f"## {source}") for line in rows), note
    assert printed[-1].startswith("docs/images/prediction.svg is drawn only from all tables")


def test_small_tables_stand_in_the_repository_with_their_citation(monkeypatch, tmp_path):
    monkeypatch.setattr(published_tables, "ANCHORS", tmp_path)
    assert [name for name, table in TABLES.items() if table.missing_file] == [
        "llm_foundry",
        "dgxc",
        "vtrain_single",
        "vtrain_multi",
    ]
    for table in TABLES.values():
        assert "arXiv" in table.citation or "github.com" in table.citation
        assert table.missing_file or list(table.rows())


def test_the_page_tells_the_constants():
    text = PAGE.read_text(encoding="utf-8")
    for family in ("a100", "h100"):
        names = ("product", "older", "start", "attention", "memory", "launch", "contention")
        values = " | ".join(f"{getattr(CONSTANTS[family], name):g}" for name in names)
        assert f"| {family} | {values} |" in text
    assert (PAGE.parent / re.search(r"\]\(((?:\.\./)images/.*?)\)", text)[1]).exists()


@pytest.mark.parametrize("family", BOUNDS)
def test_no_fit_ends_at_a_bound(family):
    """Neither the shipped one, nor those without a source."""
    fits = list(read_left_out()[family].values())
    shipped = CONSTANTS[family]
    fits.append({name: getattr(shipped, name) for name in BOUNDS[family]})
    for values in fits:
        assert list(values) == list(BOUNDS[family])
        for name, (low, high) in BOUNDS[family].items():
            assert 1.005 * low < values[name] < high / 1.005, name


def test_constants_without_a_source_are_known_of_all_tables():
    left_out = read_left_out()
    for name, table in TABLES.items():
        for family in {find_cluster(row.cluster).chip.family for row in table.rows()}:
            assert name in left_out[family]
            same = [other for other in TABLES if TABLES[other].citation == table.citation]
            constants = {get_left_out_constants(other, family) for other in same}
            assert len(constants) == 1, "tables of one publication are left out together"


def make_linear_errors(at, optimum, slopes):
    return LinearErrors(np.array(at), slopes @ (np.array(at) - np.array(optimum)), slopes)


def test_a_linear_model_finds_its_minimum_and_stays_within_bounds():
    slopes = np.array([[1.0, 0.2], [-0.3, 1.0], [0.5, 0.5], [0.9, -0.4], [0.1, 0.8]])
    low, high = np.array([-1.0, -1.0]), np.array([1.0, 1.0])
    exact = make_linear_errors([0.0, 0.0], [0.3, -0.2], slopes)
    assert exact.minimize(low, high) == pytest.approx([0.3, -0.2], abs=1e-4)
    # One row that contradicts the others moves least absolute errors by nothing.
    contradicted = replace(exact, errors=exact.errors + np.array([0.0, 0.0, 0.4, 0.0, 0.0]))
    assert contradicted.minimize(low, high) == pytest.approx([0.3, -0.2], abs=1e-2)
    assert exact.minimize(low, np.array([0.1, 1.0]))[0] == 0.1


@pytest.mark.slow
@pytest.mark.parametrize("without", [(), ("readme",)])
def test_constants_are_those_of_the_fit(without):
    """Of the generation whose fit is quick. Rounding and the processor's sums leave 1%."""
    for name in ("llm_foundry", "dgxc"):
        predict_lines(name)
    found = Fit("h100", published_fit.prepare_runs("h100")).run(without)
    expected = get_left_out_constants("readme", "h100") if without else CONSTANTS["h100"]
    for name in BOUNDS["h100"]:
        assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=0.01)


def test_own_runs_are_predicted():
    """Those of which all that they did is counted."""
    predicted = predict_own_runs()
    assert format_own_runs(predicted) in PAGE.read_text(encoding="utf-8")
    assert len(predicted) == len(OWN_RUNS)
    errors = [abs(seconds / run.seconds - 1) for run, seconds in predicted if not run.note]
    assert len(errors) == 3 and max(errors) < 0.05


@pytest.mark.slow
def test_rows_of_vtrain_on_one_node_are_computed():
    """The page says so, because these rows agree more closely than measured runs do."""
    start, end = "12 layers of 1024, ", " on 8, 1 a pass, t8 d1 p1"
    rows = [line.row for line in predict_lines("vtrain_single")]
    took = {
        int(row.label[len(start) : -len(end)]): row.seconds
        for row in rows
        if row.label.startswith(start) and row.label.endswith(end)
    }
    assert sorted(took) == [2, 4, 8, 16]
    for many in (2, 4, 8):
        each = (took[2 * many] - took[many]) / many
        assert each == pytest.approx(61.894735e-3, abs=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["korthikanti", "zero_bubble"])
def test_the_best_of_the_alternatives_is_found(name):
    assert max(compute_choice_losses(predict_lines(name))) == 0


@pytest.mark.parametrize(
    ("heads", "hidden", "published"),
    [
        # Korthikanti et al. 2022, table 4 and figure 7: percent of tensor parallelism's activations
        # with sequence parallelism, with recomputed attention, with both, with full recompute.
        (64, 6144, (66.84, 49.42, 16.18, 7.64)),
        (96, 12288, (62.04, 56.53, 18.49, 8.71)),
        (128, 20480, (58.31, 62.04, 20.27, 9.42)),
        (160, 25600, (58.31, 62.04, 20.27, 9.42)),
    ],
)
def test_activations_of_megatron(heads, hidden, published):
    def count_saved_bytes(recompute, sequence_parallel):
        return compute_megatron_bytes(2048, hidden, heads, 8, recompute, sequence_parallel)

    unsplit = count_saved_bytes("none", False)
    ratios = (
        count_saved_bytes("none", True) / unsplit,
        count_saved_bytes("selective", False) / unsplit,
        count_saved_bytes("selective", True) / unsplit,
        count_saved_bytes("full", False) / unsplit,
    )
    for predicted, reported in zip(ratios, published, strict=True):
        assert 100 * predicted == pytest.approx(reported, rel=0.03)
