"""The page in a real browser: every panel draws, names stay text, new lines appear.

Tests `megaframe.dashboard.rows`.
"""

import json
import socket
import time
import urllib.error
import urllib.request

import pytest
from patience import PATIENCE
from run_folders import make_lines, write

from megaframe.dashboard.page import PAGE_FILE, render_page, write_atomically
from megaframe.dashboard.page_data import POINTS, build_page_data
from megaframe.dashboard.panels import PANELS
from megaframe.dashboard.run_folder import RunFolder
from megaframe.dashboard.run_set import RunSet
from megaframe.dashboard.serve import DashboardServer

SMALL = {"width": 1000, "height": 300}
"""A window in which few panels are drawn before somebody scrolls."""


def write_page(folder, runs, prediction=None):
    path = folder / PAGE_FILE
    text = render_page(build_page_data(runs, prediction))
    assert "this, (() => {" in text, "the library is compiled at once"
    write_atomically(path, text)
    return path.as_uri()


def wait_until(tab, expression):
    """Wait until a JavaScript expression is true.

    It is polled from outside, because the page's security policy forbids evaluation inside it. Once
    in hundreds of runs a panel did not come into view for 90 s. Taking a screenshot requests a
    frame, in case the headless browser has stopped producing them.
    """
    begun = time.monotonic()
    while not tab.evaluate(expression):
        waited = time.monotonic() - begun
        assert waited < PATIENCE, expression
        if waited > 2:
            tab.screenshot()
        time.sleep(0.05)


def read_states(tab):
    """Scroll each panel into view, and return the state of all panels by id."""
    ids = tab.evaluate("[...document.querySelectorAll('section:not([hidden])')].map(s => s.id)")
    for name in ids:
        tab.evaluate(f"document.getElementById('{name}').scrollIntoView()")
        wait_until(tab, f"document.getElementById('{name}').dataset.state === 'drawn'")
    script = "[...document.querySelectorAll('section')].map(s => [s.id, s.dataset.state])"
    return dict(tab.evaluate(script))


def test_every_panel_draws_on_a_desk_and_on_a_phone_light_and_dark(visit, tmp_path):
    prediction = {
        "cluster": "cpu",
        "step_seconds": 1.0,
        "mfu": 0.5,
        "breakdown": {"optimizer": 0.2},
    }
    address = write_page(tmp_path, [RunFolder(write(tmp_path / "run", make_lines(60)))], prediction)
    tab = visit(address, viewport={"width": 1400, "height": 900}, color_scheme="light")
    panel_states = read_states(tab)
    assert panel_states.keys() >= {panel.id for panel in PANELS}
    assert panel_states.pop("outcome") == "empty", "one run differs from none"
    assert set(panel_states.values()) == {"drawn"}
    falls = tab.evaluate("document.querySelector('#waterfall .plot').data.map(t => [t.name, t.x])")
    assert [name for name, _ in falls] == ["run", "predicted for cpu"]
    assert falls[0][1] == falls[1][1], "both fall in one order"
    assert tab.locator(".plot .main-svg").count() >= len(PANELS) - 1
    assert "MFU" in tab.locator("#waterfall").inner_text()
    light = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    tab.emulate_media(color_scheme="dark")
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") != light
    tab.click("#theme")
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == light
    tab.set_viewport_size({"width": 360, "height": 740})
    wait_until(tab, "document.documentElement.scrollWidth <= 360")


@pytest.mark.slow
def test_the_page_is_useful_without_a_mouse(visit, tmp_path):
    tab = visit(write_page(tmp_path, [RunFolder(write(tmp_path / "run", make_lines(60)))]))
    tab.keyboard.press("Tab")
    assert tab.evaluate("document.activeElement.className") == "skip"
    range_script = "document.querySelector('#loss .plot')._fullLayout.xaxis.range"
    tab.focus("#loss .plot")
    low, high = tab.evaluate(range_script)
    tab.keyboard.press("+")
    zoomed = tab.evaluate(range_script)
    assert zoomed[1] - zoomed[0] == pytest.approx((high - low) / 2)
    tab.keyboard.press("ArrowRight")
    assert tab.evaluate(range_script)[0] > zoomed[0]
    tab.keyboard.press("0")
    assert tab.evaluate(range_script) == pytest.approx([low, high])
    tab.focus("input[value=step]")
    tab.keyboard.press("ArrowRight")  # radio buttons: the next one is tokens
    title = "document.querySelector('#loss .plot').layout.xaxis.title.text"
    wait_until(tab, f"{title} === 'tokens'")
    tab.evaluate("document.getElementById('stragglers').scrollIntoView()")
    wait_until(tab, "document.getElementById('stragglers').dataset.state === 'drawn'")
    columns = tab.evaluate("document.querySelector('#stragglers .plot').data[0].x")
    assert columns == [1024 * step for step in range(10, 61, 10)]
    tab.focus("#loss summary")
    tab.keyboard.press("Enter")
    wait_until(tab, "document.querySelector('#loss table') !== null")
    assert tab.locator("#loss table").inner_text().startswith("loss at tokens")


def test_names_and_values_with_html_in_them_stay_text(visit, tmp_path):
    name = "<img src=x onerror=alert(1)><b>bold<b>"
    evil = "</script><script>alert(2)</script><!--"
    first_run = RunFolder(
        write(tmp_path / name, make_lines(20), {"run": {"note": evil, "<i>key": 1}})
    )
    (first_run.folder / "run.log").write_text(f"a line\n{evil}\n")
    sample = {"step": 3, "prompt": name, "text": evil}
    (first_run.folder / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    two = RunFolder(write(tmp_path / "plain", make_lines(20)))
    tab = visit(write_page(tmp_path, [first_run, two]), viewport=SMALL)
    assert evil in tab.locator("#log pre").inner_text()
    tab.fill("#log input", "SCRIPT")
    assert tab.locator("#log mark").all_inner_texts() == ["script"] * 3
    assert evil in tab.locator("#samples td").inner_text()
    assert name in tab.locator("#samples tbody th").inner_text()
    assert name in tab.locator("h1").inner_text()
    assert tab.locator("img, main b, main i, svg b").count() == 0
    read_traces(tab, "loss")
    assert name in tab.locator("#loss .legend").text_content()
    tab.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert evil in tab.locator("#config").inner_text()
    assert "run.<i>key" in tab.locator("#differences").inner_text()


@pytest.mark.slow
def test_runs_lie_over_each_other_and_can_be_left_out(visit, tmp_path):
    first_run = RunFolder(write(tmp_path / "one", make_lines(40), {"optim": {"lr": 1}}))
    folder = write(tmp_path / "two", make_lines(20, ranks=2, stages=1), {"optim": {"lr": 2}})
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('no metrics\n{"step": 21, "lo')
    tab = visit(write_page(tmp_path, [first_run, RunFolder(folder)]))
    assert tab.locator(".notes li").all_inner_texts() == [
        "two: 1 lines are not metrics and are ignored (line 21)",
        "two: the last line is incomplete: it is being written, or was cut off",
        "two: rows have 2 ranks and the run 4: some are missing",
    ]
    names = "document.querySelector('#loss .plot').data.map(t => t.name)"
    assert {"one", "two"} <= set(tab.evaluate(names))
    assert tab.locator("#differences th").all_inner_texts() == ["", "optim.lr", "one", "two"]
    assert tab.locator("#differences td").all_inner_texts() == ["1", "2"]
    tab.uncheck("#runs .list label:nth-of-type(1) input")
    wait_until(tab, f"!({names}).includes('one')")
    assert "two" in tab.evaluate(names)
    assert tab.locator("#differences").is_hidden()


@pytest.mark.slow
def test_what_is_written_arrives(visit, tmp_path):
    all_lines = list(make_lines(60))
    run = write(tmp_path / "run", all_lines[:20])
    server = DashboardServer(RunSet([tmp_path]))
    server.start()
    try:
        assert server.address.startswith("http://127.0.0.1:")
        tab = visit(server.address)
        assert "1 to 20" in tab.locator("#summary").inner_text()
        with open(run / "metrics.jsonl", "a") as file:
            file.write("".join(json.dumps(line) + "\n" for line in all_lines[20:]))
        wait_until(tab, "document.querySelector('#summary').innerText.includes('1 to 60')")
        wait_until(tab, "document.querySelector('#loss .plot').data[0].x.length === 60")
        tab.locator("#events summary").click()
        wait_until(tab, "document.querySelector('#events').innerText.includes('step 50')")
        (run / "run.log").write_text("a late line\n")
        wait_until(tab, "document.querySelector('#log').innerText.includes('a late line')")
        write(tmp_path / "trial", all_lines[:5])
        wait_until(tab, "document.querySelector('h1').innerText === 'run, trial'")
        wait_until(tab, "document.querySelectorAll('#runs .list label').length === 2")
        base = server.address.split("?")[0]
        for wrong, status in (("", 403), ("?token=no", 403), ("data", 403)):
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(base + wrong)
            assert refused.value.code == status
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"{base}../etc/passwd?token={server.token}")
        assert refused.value.code == 404
        for odd in ("http://[", "*", f"http://[?token={server.token}"):
            host, port = server.address.split("/")[2].split(":")
            with socket.create_connection((host, int(port))) as line:
                line.sendall(f"GET {odd} HTTP/1.0\r\n\r\n".encode())
                status = line.makefile().readline().split()[1]
            assert status == ("404" if server.token in odd else "403")
        tab.context.close()
    finally:
        server.close()


@pytest.mark.slow
def test_a_hundred_thousand_steps_and_a_thousand_ranks_are_a_page_of_few_numbers(visit, tmp_path):
    folder = write(tmp_path / "run", make_lines(50, ranks=1000), environment={"ranks": 1000})
    with open(folder / "metrics.jsonl", "a") as file:
        for step in range(51, 100_001):
            file.write(f'{{"step": {step}, "loss": {2 + 1 / step}, "tokens": 9, "seconds": 0.5}}\n')
    run = RunFolder(folder)
    data = build_page_data([run])
    assert len(data["runs"][0]["x"]["step"]) == POINTS
    assert len(data["runs"][0]["heat"]["stragglers"]["z"]) <= 160
    assert len(json.dumps(data)) < 1_000_000
    tab = visit(write_page(tmp_path, [run]))
    assert read_states(tab)["loss"] == read_states(tab)["stragglers"] == "drawn"
    assert tab.evaluate("document.querySelector('#loss .plot').data[0].x.at(-1)") == 100_000


def read_traces(tab, panel):
    """Return the traces of a panel that a reader sees as series, after it has been drawn."""
    tab.evaluate(f"document.getElementById('{panel}').scrollIntoView()")
    wait_until(tab, f"document.getElementById('{panel}').dataset.state === 'drawn'")
    script = "document.querySelector('#%s .plot').data.map(t => [t.name, t.hoverinfo, t.line, t.y])"
    return [
        (name, line, values)
        for name, hover, line, values in tab.evaluate(script % panel)
        if hover != "skip"
    ]


@pytest.mark.slow
def test_every_series_of_a_chart_has_its_own_colour_that_stays_with_its_name(visit, tmp_path):
    axes = ("world", "data", "tensor", "context", "pipeline", "expert", "expert_tensor")
    all_lines = list(make_lines(30))
    for line in all_lines:
        line["time"] |= {f"communication/{axis}": 0.01 for axis in axes}
        line["bytes"] = {axis: 1 << 20 for axis in axes}
    many = RunFolder(write(tmp_path / "many", all_lines))
    colours = {}
    few = RunFolder(write(tmp_path / "few", make_lines(30)))
    for name, run in (("many", many), ("few", few)):
        tab = visit(write_page(tmp_path / name, [run]), viewport=SMALL)
        for panel in ("time", "bytes"):
            drawn = {series: line["color"] for series, line, _ in read_traces(tab, panel)}
            assert len(set(drawn.values())) == len(drawn) >= (2 if name == "few" else 7)
            colours[name, panel] = drawn
    assert colours["many", "time"]["compute"] != colours["many", "time"]["communication/world"]
    for series, colour in colours["few", "time"].items():
        assert colours["many", "time"][series] == colour
    for axis in ("data", "tensor", "pipeline", "expert", "world"):
        assert colours["many", "bytes"][axis] == colours["many", "time"][f"communication/{axis}"]


@pytest.mark.slow
def test_smoothing_is_an_average_without_bias_over_a_faint_curve(visit, tmp_path):
    run = RunFolder(write(tmp_path / "run", make_lines(40)))
    tab = visit(write_page(tmp_path, [run]), viewport=SMALL)
    raw = next(values for _, _, values in read_traces(tab, "loss"))
    tab.evaluate("document.querySelector('#smoothing').value = 0.9")
    tab.locator("#smoothing").dispatch_event("input")
    assert tab.locator("output").inner_text() == "0.90"
    average = next(values for _, _, values in read_traces(tab, "loss"))
    for count in (1, 2, 40):
        weights = [0.9**age for age in range(count)]
        expected = sum(w * v for w, v in zip(weights, raw[:count][::-1], strict=True)) / sum(
            weights
        )
        assert average[count - 1] == pytest.approx(expected, rel=5e-6), "it has six digits"
    faint = "document.querySelector('#loss .plot').data.filter(t => t.opacity < 0.5).map(t => t.y)"
    assert tab.evaluate(faint) == [raw]


def test_runs_of_a_sweep_are_compared_by_what_differs(visit, tmp_path):
    rates = ("1e-3", "3e-3", "1e-2")
    for number, rate in enumerate(rates):
        settings = {"optim": {"lr": rate, "name": "adamw"}}
        folder = write(tmp_path / f"lr={rate}", make_lines(20, seed=number), settings)
        (folder / "run.log").write_text(f"the log of {number}\n")
        samples = [{"step": n, "prompt": "It", "text": f"{number} at {n}"} for n in (5, 10)]
        (folder / "samples.jsonl").write_text("".join(json.dumps(one) + "\n" for one in samples))
    address = write_page(tmp_path, RunSet([tmp_path]).runs)
    tab = visit(address, viewport={"width": 1400, "height": 900})
    heads = tab.locator("#differences th").all_inner_texts()
    assert heads == ["", "optim.lr", *(f"lr={rate}" for rate in rates)]
    assert tab.locator("#differences td").all_inner_texts() == [*rates]
    assert tab.locator("#outcome select").is_hidden(), "one key differs"
    script = "document.querySelector('#outcome .plot').data.map(t => [t.name, t.x[0], t.y[0]])"
    wait_until(tab, "document.querySelector('#outcome').dataset.state === 'drawn'")
    assert tab.evaluate(script) == [[f"lr={rate}", float(rate), 3.0] for rate in rates]
    assert tab.locator("#samples td").all_inner_texts() == ["0 at 10", "1 at 10", "2 at 10"]
    tab.select_option("#samples select", "5")
    assert tab.locator("#samples td").all_inner_texts() == ["0 at 5", "1 at 5", "2 at 5"]
    tab.select_option("#log select", "lr=1e-2")
    assert tab.locator("#log pre").inner_text().strip() == "the log of 2"
    tab.uncheck("#runs .list label:nth-of-type(2) input")
    assert tab.locator("#samples td").all_inner_texts() == ["0 at 5", "2 at 5"]
    tab.select_option("#mfu select", "hfu")
    assert [name for name, _, _ in read_traces(tab, "mfu")] == ["lr=1e-3", "lr=1e-2"]
