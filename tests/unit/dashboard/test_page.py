"""The page in a real browser: every panel draws, names stay text, new lines appear."""

import json
import shutil
import socket
import time
import urllib.error
import urllib.request

import pytest
from run_folders import make_lines, write

from megaframe.dashboard.page import PAGE_FILE, render_page, write_atomically
from megaframe.dashboard.panels import PANELS, POINTS, build_page_data
from megaframe.dashboard.run_folder import RunFolder
from megaframe.dashboard.serve import DashboardServer

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
DRAWN = "html[data-first]"
PATIENCE = 90.0
"""Seconds; on two cores shared by twenty processes, a browser has taken more than 30."""


@pytest.fixture(scope="module")
def browser():
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip(f"none of {', '.join(BROWSERS)} is here")
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as player:
        # Chromium's sandbox does not run as root, which is common in containers.
        chromium = player.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def visit(browser):
    """visit(address, **context) -> a page that has drawn what is in view.

    Fails on errors, dialogs, and requests to other addresses.
    """
    opened, errors = [], []

    def go(address, **context):
        tab = browser.new_context(**context).new_page()
        tab.set_default_timeout(1000 * PATIENCE)
        tab.on("pageerror", lambda error: errors.append(str(error)))
        tab.on("console", lambda line: line.type == "error" and errors.append(line.text))
        tab.on("dialog", lambda box: errors.append(box.message))
        home = address.split("?")[0]
        tab.on(
            "request",
            lambda request: (
                request.url.startswith((home, "data:", "blob:")) or errors.append(request.url)
            ),
        )
        tab.goto(address)
        tab.wait_for_selector(DRAWN, state="attached")
        opened.append(tab)
        return tab

    yield go
    for tab in opened:
        tab.context.close()
    assert errors == []


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
    assert set(panel_states.values()) == {"drawn"}
    falls = tab.evaluate("document.querySelector('#waterfall .plot').data.map(t => [t.name, t.x])")
    assert [name for name, _ in falls] == ["run", "predicted for cpu"]
    assert falls[0][1] == falls[1][1], "both fall in one order"
    assert tab.locator(".plot .main-svg").count() >= len(PANELS)
    assert "MFU" in tab.locator("#waterfall").inner_text()
    light = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    tab.click("#theme")
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") != light
    tab = visit(address, viewport={"width": 360, "height": 740}, color_scheme="dark")
    assert tab.evaluate("document.documentElement.scrollWidth") <= 360
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") != light


@pytest.mark.slow
def test_it_is_useful_without_a_mouse(visit, tmp_path):
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
    two = RunFolder(write(tmp_path / "plain", make_lines(20)))
    tab = visit(write_page(tmp_path, [first_run, two]))
    assert name in tab.locator("h1").inner_text()
    assert tab.locator("img, main b, main i, svg b").count() == 0
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
    assert tab.locator("#differences td").all_inner_texts() == ["1", "2"]
    tab.uncheck("#runs label:nth-of-type(1) input")
    wait_until(tab, f"!({names}).includes('one')")
    assert "two" in tab.evaluate(names)


@pytest.mark.slow
def test_what_is_written_arrives(visit, tmp_path):
    all_lines = list(make_lines(60))
    run = write(tmp_path / "run", all_lines[:20])
    server = DashboardServer([RunFolder(run)])
    server.start()
    try:
        assert server.address.startswith("http://127.0.0.1:")
        tab = visit(server.address)
        assert "1 to 20" in tab.locator("#summary").inner_text()
        with open(run / "metrics.jsonl", "a") as file:
            file.write("".join(json.dumps(line) + "\n" for line in all_lines[20:]))
        wait_until(tab, "document.querySelector('#summary').innerText.includes('1 to 60')")
        wait_until(tab, "document.querySelector('#loss .plot').data[0].x.length === 60")
        assert "checkpoint of step 50" in tab.locator("#events").text_content()
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
