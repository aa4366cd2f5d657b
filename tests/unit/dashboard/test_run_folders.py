"""Reading run folders that are complete, being written, damaged, mixed, or something else."""

import json
import math
import os
import re
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_folders import make_lines, write

from megaframe.dashboard.downsample import (
    block_maxima,
    compute_bucket_means,
    find_bucket_extremes,
    list_bucket_starts,
)
from megaframe.dashboard.metrics_file import MetricsFile
from megaframe.dashboard.page import embed_json, write_atomically
from megaframe.dashboard.page_data import build_page_data
from megaframe.dashboard.panels import PANELS
from megaframe.dashboard.remedies import suggest_remedies
from megaframe.dashboard.report import render_html, render_report
from megaframe.dashboard.run_folder import RunFolder
from megaframe.dashboard.run_set import RunSet
from megaframe.dashboard.serve import DashboardServer
from megaframe.dashboard.summary import (
    compute_mean_losses,
    compute_predicted_losses,
    read_prediction,
)
from megaframe.dashboard.wandb_workspace import build_workspace
from megaframe.errors import UserError
from megaframe.metrics.sinks import flatten


def test_a_whole_run_has_every_panel_and_no_note(tmp_path):
    run = RunFolder(write(tmp_path / "run", make_lines(60)))
    assert run.notes == []
    data = build_page_data([run])
    (run_data,) = data["runs"]
    for panel in PANELS:
        names = [
            name
            for name in run_data["series"]
            for key in panel.keys
            if (name.startswith(key) if key.endswith("/") else name == key)
        ]
        has = {
            "lines": names,
            "waterfall": run_data["waterfall"],
            "outcome": run_data["outcome"],
            "heat": run_data["heat"].get(panel.id),
            "bars": run_data["bars"].get(panel.id),
        }
        assert has[panel.kind], panel.id
    assert [event["kind"] for event in run_data["events"]] == ["skip", "restart", "checkpoint"]
    assert run_data["events"][2]["step"] == 50
    assert run_data["heat"]["stragglers"]["z"][1] == pytest.approx([40] * 6)
    assert run_data["bars"]["sources"] == {
        "places": ["web", "code"],
        "kinds": {"samples": [60, 120]},
    }
    json.dumps(data, allow_nan=False)


def test_bars_of_sources_leave_out_those_that_nothing_is_trained_on(tmp_path):
    def places(**data):
        run = RunFolder(write(tmp_path / "run", make_lines(10), config={"data": data}))
        return build_page_data([run])["runs"][0]["bars"]["sources"]["places"]

    held_out = {"path": "held-out", "split": [0.0, 1.0, 0.0]}
    two = [{"path": "web", "split": None}, {"path": "code", "split": [1.0, 0.0, 0.0]}]
    assert places(sources=[held_out, *two]) == ["web", "code"]
    none = {"sources": [held_out, {"path": "more"}, *two], "split": [0.0, 1.0, 0.0]}
    assert places(**none) == ["source 0", "source 1"]


def test_losses_and_mfu_are_the_whole_peak(tmp_path):
    run = RunFolder(write(tmp_path / "run", make_lines(60)))
    assert sum(compute_mean_losses(run).values()) == pytest.approx(1)
    prediction = {"step_seconds": 2.0, "mfu": 0.4, "breakdown": {"compute": 1.5, "tensor": 0.5}}
    assert compute_predicted_losses(prediction) == pytest.approx(
        {"kernels": 0.35, "communication/tensor": 0.25, "mfu": 0.4}
    )


def test_a_run_still_being_written_is_read_on_and_one_replaced_anew(tmp_path):
    all_lines = [json.dumps(line) + "\n" for line in make_lines(30)]
    folder = write(tmp_path / "run", [])
    path = folder / "metrics.jsonl"
    run = RunFolder(folder)
    assert run.notes == ["no metrics yet"]
    with open(path, "a") as file:
        file.write("".join(all_lines[:10]) + all_lines[10][:40])
    assert run.read() and len(run.metrics) == 10
    assert any("incomplete" in note for note in run.notes)
    assert not run.read()
    with open(path, "a") as file:
        file.write(all_lines[10][40:])
    assert run.read() and len(run.metrics) == 11 and not run.notes
    (tmp_path / "other").write_text("".join(all_lines[:5]))
    (tmp_path / "other").replace(path)
    assert run.read() and len(run.metrics) == 5


@pytest.mark.parametrize(
    "odd",
    ["hello", "[1, 2]", '{"loss": 1}', '{"step": true}', "[" * 5000, '{"step": -1}', "\x00\x00"],
)
def test_lines_of_something_else_are_left_out_and_counted(tmp_path, odd):
    folder = write(tmp_path / "run", make_lines(5))
    path = folder / "metrics.jsonl"
    text = path.read_text().splitlines()
    path.write_text("\n".join([*text[:3], odd, *text[3:]]) + "\n")
    run = RunFolder(folder)
    assert len(run.metrics) == 5
    assert run.notes == ["1 lines are not metrics and are ignored (line 4)"]


def test_nothing_is_read_after_an_endless_line_or_thousands_of_odd_ones(tmp_path):
    folder = write(tmp_path / "run", make_lines(5))
    path = folder / "metrics.jsonl"
    content = path.read_bytes()
    with open(path, "ab") as file:
        file.truncate(8 << 30)  # a hole, which takes no disk
    run = RunFolder(folder)
    assert len(run.metrics) == 5
    assert "nothing after line 6 is read: this is no file of metrics" in run.notes
    path.write_bytes(b"odd\n" * 20_000 + content)
    run = RunFolder(folder)
    assert len(run.metrics) == 0 and not run.read()
    assert "nothing after line 10000 is read: this is no file of metrics" in run.notes


def test_two_runs_in_one_file_are_the_later_one_with_a_note(tmp_path):
    first = list(make_lines(30))
    second = [{**line, "loss": 100.0} for line in make_lines(10, start=10)]
    run = RunFolder(write(tmp_path / "run", [*first, *second]))
    assert run.metrics.get_column("step").tolist() == [*range(1, 21)]
    assert run.metrics.get_column("loss")[9:12].tolist() == [first[9]["loss"], 100.0, 100.0]
    assert "after step 30 comes step 11 (line 31)" in run.notes[0]


@given(
    value=st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
        ),
        max_leaves=8,
    ),
    key=st.sampled_from([*next(make_lines(1)), "ranks", "config", "time"]),
)
def test_any_value_of_any_key_is_shown_or_left_out(tmp_path_factory, value, key):
    text = json.dumps({**next(make_lines(1)), key: value, "step": 2})
    folder = tmp_path_factory.mktemp("odd")
    write(folder, make_lines(1))
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(text + "\n")
    run = RunFolder(folder)
    embed_json(build_page_data([run]))
    render_html(render_report(run))


def test_other_layouts_missing_ranks_and_missing_files_are_notes(tmp_path):
    run_folder = RunFolder(
        write(tmp_path / "one", make_lines(20), {"parallel": {"tensor": 2}}, {"ranks": 8})
    )
    assert run_folder.notes == ["rows have 4 ranks and the run 8: some are missing"]
    changed = [*make_lines(20), *make_lines(20, ranks=2, stages=1, start=20)]
    two = RunFolder(write(tmp_path / "two", changed, {"parallel": {"tensor": 1}}))
    (tmp_path / "two" / "environment.json").write_text("{")
    two = RunFolder(tmp_path / "two")
    assert "environment.json cannot be read and is ignored" in two.notes
    data = build_page_data([run_folder, two])
    assert [run["heat"]["stragglers"]["rows"] for run in data["runs"]] == [[0, 1, 2, 3], [0, 1]]
    assert [
        row for run in data["runs"] for row in run["config"] if row[0].startswith("parallel")
    ] == [["parallel.tensor", "2"], ["parallel.tensor", "1"]]
    (tmp_path / "two" / "metrics.jsonl").unlink()
    assert "there is no metrics.jsonl" in RunFolder(tmp_path / "two").notes
    assert build_page_data([RunFolder(tmp_path / "two")])["runs"][0]["series"] == {}


def test_a_folder_of_something_else_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"neither metrics\.jsonl nor config\.yaml"):
        RunFolder(tmp_path)
    with pytest.raises(UserError, match="is not a run folder"):
        RunFolder(tmp_path / "nowhere")


def test_an_unknown_peak_is_na_and_its_waterfall_ends_with_compute(tmp_path):
    changed_lines = []
    for line in make_lines(5):
        lost = {cause: share for cause, share in line["lost"].items() if cause != "kernels"}
        lost = {"compute": 1 - sum(lost.values()), **lost}
        changed_lines.append({**line, "mfu": None, "hfu": None, "lost": lost})
    run = RunFolder(write(tmp_path / "run", changed_lines))
    assert any("MFU n/a" in note for note in run.notes)
    assert "mfu" not in compute_mean_losses(run) and sum(
        compute_mean_losses(run).values()
    ) == pytest.approx(1)
    assert "| MFU | n/a |" in render_report(run)


@given(values=st.lists(st.none() | st.floats(-1e6, 1e6), max_size=60), most=st.integers(1, 20))
def test_thinning_keeps_means_and_extremes(values, most):
    numbers = np.array([math.nan if value is None else value for value in values])
    starts = list_bucket_starts(len(numbers), most)
    assert len(starts) == min(len(numbers), most)
    low, high = find_bucket_extremes(numbers, starts)
    good = numbers[np.isfinite(numbers)]
    if good.size:
        assert np.nanmin(low) == good.min() and np.nanmax(high) == good.max()
        counts = np.add.reduceat(np.isfinite(numbers).astype(float), starts)
        total = np.nansum(compute_bucket_means(numbers, starts) * counts)
        assert total == pytest.approx(good.sum(), rel=1e-9, abs=1e-6)
    else:
        assert not np.isfinite(compute_bucket_means(numbers, starts)).any()


def test_one_slow_rank_of_many_is_still_there_when_thinned():
    table = np.zeros((1000, 700))
    table[617, 350:] = 9.0
    thinned = block_maxima(table, 160, 200)
    assert thinned.shape == (160, 200) and thinned[:, -1].max() == 9.0
    assert (thinned[:, -1] > 0).sum() == 1


def test_the_report_names_the_largest_losses_and_escapes_names(tmp_path):
    name = "<b>x<b>|*y*"
    folder = write(tmp_path / name, make_lines(30))
    prediction = {"step_seconds": 1.0, "mfu": 0.5, "breakdown": {"compute": 0.9, "data": 0.1}}
    text = render_report(RunFolder(folder), prediction)
    assert "| kernels below peak |" in text and "| predicted |" in text
    assert "step 7: update skipped" in text and "resumed after step 19" in text
    page = render_html(text)
    assert "<b>x" not in page and "&lt;b&gt;x&lt;b&gt;|*y*" in page
    first = next(suggest_remedies(compute_mean_losses(RunFolder(folder))))
    assert first[0] == "kernels" and "train.microbatch" in first[1]


def test_a_workspace_has_the_panels_of_metrics_that_a_run_writes():
    pytest.importorskip("wandb_workspaces")
    names = set(dict(flatten(next(make_lines(1, ranks_every=1))))) | {
        "eval_bits_per_byte",
        "mtp_loss",
    }
    spec = build_workspace("entity", "project")._to_model().spec.model_dump(by_alias=True)
    sections = spec["section"]["panelBankConfig"]["sections"]
    assert [section["name"] for section in sections] == ["Training", "Pages", "Configs"]
    panels_by_title = {}
    for panel in sections[0]["panels"]:
        panel_config = panel["config"]
        pattern = panel_config.get("metricRegex")
        match = {name for name in names if pattern and re.fullmatch(pattern, name)}
        assert match or (set(panel_config["metrics"]) <= names and panel_config["metrics"]), (
            panel_config
        )
        panels_by_title[panel_config["chartTitle"]] = panel_config
    without = {"stragglers", "memory_ranks", "experts", "outcome"}
    assert panels_by_title.keys() == {panel.title for panel in PANELS if panel.id not in without}
    assert (
        panels_by_title["Gradient norm"]["yLogScale"]
        and panels_by_title["Where the peak went"]["metricRegex"]
    )


def show_run(folder):
    """Return a run with the texts of its page and its report, which must be printable."""
    run = RunFolder(folder)
    data = build_page_data([run])
    text = render_report(run)
    json.dumps(data, allow_nan=False)
    render_html(text).encode()
    assert all(character.isprintable() or character == "\n" for character in text)
    return run, data["runs"][0], text


def test_rows_that_lack_places_or_are_missing_are_left_out_with_a_note(tmp_path):
    def changed(change):
        run_lines = list(make_lines(20))
        for line in run_lines:
            change(line)
        return show_run(write(tmp_path / "run", run_lines))[:2]

    run, data = changed(lambda line: line["stages"].update(bubble=[0.01] * 5))
    assert "rows of stages have 2 to 5 places: shorter ones are left out" in run.notes
    assert list(data["bars"]["stages"]["kinds"]) == ["bubble"]
    run, data = changed(lambda line: line["stages"].pop("work"))
    assert "there are rows of stages, but none of stages/work" in run.notes
    assert len(data["bars"]["stages"]["places"]) == 2
    run, data = changed(lambda line: line.get("ranks", {}).pop("memory_bytes", None))
    assert "there are rows of ranks, but none of ranks/memory_bytes" in run.notes
    assert set(data["bars"]["memory_ranks"]["kinds"]) == {"weights", "optimizer"}
    _, data = changed(lambda line: line.get("ranks", {}).update({"held/weights": [1.0]}))
    assert set(data["bars"]["memory_ranks"]["kinds"]) == {"optimizer", "the rest at its peak"}


def test_steps_that_go_back_before_all_rows_leave_none(tmp_path):
    later = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}]
    run, data, _ = show_run(write(tmp_path / "run", [*make_lines(20), *later]))
    assert run.metrics.rows == {} and data["heat"] == {} and len(run.metrics) == 2
    assert "after step 20 comes step 1" in run.notes[0]


@pytest.mark.parametrize("name", ["²", "١٢", "9" * 5000, "1_0", ""])
def test_odd_digits_in_names_and_values_are_names_and_no_values(tmp_path, name):
    line = {**next(make_lines(1)), "step": 2, "loss": name}
    line["experts"] = {"tokens": {name: [1.0, 2.0], "0": [1.0, 1.0]}}
    run, data, _ = show_run(write(tmp_path / "run", [next(make_lines(1)), line]))
    assert np.isnan(run.metrics.get_column("loss")[1]) and len(data["heat"]["experts"]["z"]) == 2


@pytest.mark.parametrize("step", ["NaN", "1e400", "9" * 5000, '"٣"', "1_000", "-1", "2.0"])
def test_a_step_that_is_no_step_is_noted(tmp_path, step):
    folder = write(tmp_path / "run", make_lines(3))
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(f'{{"step": {step}, "loss": 1}}\n')
    assert "1 lines are not metrics and are ignored (line 4)" in show_run(folder)[0].notes


def test_a_name_given_twice_in_a_line_is_one_value(tmp_path):
    line = {"step": 1, "time/data": 1.0, "time": {"data": 2.0}, "loss": 3.0}
    run, _, _ = show_run(write(tmp_path / "run", [line, {**line, "step": 2}]))
    assert run.metrics.get_column("time/data").tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    "text",
    [
        "a0: &a [x, x]\n" + "".join(f"a{n}: &a{n} [*a, *a]\n" for n in range(1, 60)),
        "x: " + "[" * 5000 + "]" * 5000,
        "? {a: b}\n: c\nx: !!python/object:os.system y",
        "x: 0x" + "f" * 100_000,
        "\x1b[31m",
        "- 1",
    ],
)
def test_a_config_of_a_stranger_is_shown_or_noted(tmp_path, text):
    folder = write(tmp_path / "run", make_lines(3))
    (folder / "config.yaml").write_text(text)
    show_run(folder)
    (folder / "environment.json").write_text('{"a": ' + "[" * 5000 + "]" * 5000 + "}")
    assert "environment.json cannot be read and is ignored" in show_run(folder)[0].notes


def test_names_of_strangers_are_escaped_and_their_secrets_masked(tmp_path):
    config = {"metrics": {"wandb": "\x1b[31mred\x07"}, "run": {"dir": "s3://key:Zq8@host/x"}}
    config["data"] = {"sources": [{"path": "\x1b]0;title\x07"}, {"path": "\u202ecode"}]}
    odd = {"layout": "\ud800\x9b", "\x1b[2J": 1}
    folder = write(tmp_path / "r\x1b[31mun", make_lines(3), config, odd)
    _, data, text = show_run(folder)
    assert data["name"] == r"r\x1b[31mun" and "\\x1b" in data["folder"]
    assert data["bars"]["sources"]["places"] == [r"\x1b]0;title\x07", r"\u202ecode"]
    assert "Zq8" not in json.dumps(data) and r"# r\\x1b\[31mun" in text
    assert [r"\x1b[2J", "1"] in data["environment"]


def test_pipes_and_devices_in_a_run_folder_are_notes(tmp_path):
    folder = write(tmp_path / "run", make_lines(3))
    for name in ("metrics.jsonl", "config.yaml", "environment.json"):
        (folder / name).unlink()
        os.mkfifo(folder / name)
    run, _, _ = show_run(folder)
    assert "config.yaml cannot be read and is ignored" in run.notes and len(run.metrics) == 0
    with pytest.raises(UserError, match="is not a JSON object with step_seconds"):
        read_prediction(folder / "config.yaml")


@pytest.mark.parametrize(
    "text",
    ["[" * 9999, '{"step_seconds": 1, "breakdown": {"data": 1' + "0" * 400 + "}}", "{}", "[1]"],
)
def test_what_is_no_prediction_is_refused(tmp_path, text):
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(UserError, match="is not a JSON object with step_seconds"):
        read_prediction(tmp_path / "p.json")


def test_a_page_that_cannot_be_written_leaves_nothing(tmp_path):
    (tmp_path / "page.html").mkdir()
    for name in ("page.html", "x" * 300, "none/page.html"):
        with pytest.raises(UserError, match="cannot write"):
            write_atomically(tmp_path / name, "text")
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", 70000), ("a..b", 0), ("x" * 300, 0)])
def test_an_address_that_cannot_be_is_refused(tmp_path, host, port):
    with pytest.raises(UserError, match="cannot listen on"):
        DashboardServer(RunSet([write(tmp_path / "run", make_lines(3))]), host=host, port=port)


def write_late_columns(path, steps, late):
    """Write metrics in which each of the last `late` steps has names of its own."""
    with open(path, "w") as file:
        for step in range(1, steps + 1):
            line = {"step": step, "loss": 1.0, "seconds": 0.1}
            if step > steps - late:
                line |= {f"time/{step}": 1.0, f"lost/{step}": 0.1, "ranks": {str(step): [1.0]}}
            file.write(json.dumps(line) + "\n")


def test_columns_that_appear_late_take_the_memory_of_what_they_hold(tmp_path):
    folder = write(tmp_path / "run", [])
    path = folder / "metrics.jsonl"
    write_late_columns(path, steps=20_000, late=3_000)
    tracemalloc.start()
    try:
        metrics = MetricsFile(path)
        metrics.read()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # Full columns would take 20,000 numbers for each of 5,000 names: 800 MB.
    assert peak < 64 * path.stat().st_size
    assert len(metrics.list_names()) == 1 + 5_000 and len(metrics.rows) == 3_000
    assert "only the first 5,000 names of metrics are read" in list(metrics.list_notes())
    column = metrics.get_column("time/17002")
    assert column[17_001] == 1.0 and np.isnan(column).sum() == 20_000 - 1


def test_a_page_shows_the_first_metrics_of_a_group_and_says_so(tmp_path):
    folder = write(tmp_path / "run", [])
    write_late_columns(folder / "metrics.jsonl", steps=100, late=50)
    run, data, _ = show_run(folder)
    assert len([name for name in data["series"] if name.startswith("time/")]) == 32
    assert "only the first 32 of 50 metrics time/ are shown" in data["notes"]
    assert len(data["waterfall"]) == 32 and run.notes


def test_steps_that_go_back_again_and_again_are_no_metrics(tmp_path):
    folder = write(tmp_path / "run", [])
    (folder / "metrics.jsonl").write_text('{"step": 2}\n{"step": 1}\n' * 3000)
    run, _, _ = show_run(folder)
    assert "nothing after line 2000 is read: this is no file of metrics" in run.notes
    assert len([note for note in run.notes if "comes step" in note]) == 3


def test_a_report_lists_some_of_very_many_events(tmp_path):
    line = {"seconds": 1.0, "skipped": 1, "lost": {"data": 0.1}}
    lines = ({"step": step, **line} for step in range(1, 301))
    _, _, text = show_run(write(tmp_path / "run", lines))
    assert text.count("update skipped") == 100 and "- and 200 more" in text


def test_links_in_a_run_folder_show_no_file_of_the_reader(tmp_path):
    folder = write(tmp_path / "run", make_lines(3))
    (tmp_path / "private").write_text('{"auths": {"registry": "Zq8"}}')
    for name in ("config.yaml", "environment.json", "run.log", "samples.jsonl"):
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(tmp_path / "private")
    run, data, text = show_run(folder)
    assert "Zq8" not in json.dumps(data) + text
    for name in ("config.yaml", "environment.json"):
        assert f"{name} cannot be read and is ignored" in run.notes


def test_rows_of_any_length_and_number_are_a_page_of_bounded_size(tmp_path):
    long = [1.0] * 50_000
    line = next(make_lines(1))
    line |= {"stages": {"work": long, "bubble": long}, "sources": long}
    line["experts"] = {"tokens": {"0": long} | {str(n): [1.0] for n in range(1, 2000)}}
    line["ranks"] = {"held": {str(n): [1.0] * 4 for n in range(1500)}, "memory_bytes": [9.0] * 4}
    _, data, _ = show_run(write(tmp_path / "run", [line]))
    assert len(json.dumps(data)) < 2_000_000
    assert len(data["bars"]["stages"]["places"]) == len(data["bars"]["sources"]["places"]) == 160
    assert len(data["heat"]["experts"]["z"]) == 160 and len(data["heat"]["experts"]["z"][0]) == 512
    assert len(data["bars"]["memory_ranks"]["kinds"]) == 33
