"""A real browser, and pages in it."""

import shutil

import pytest
from patience import PATIENCE

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-software-rasterizer"]
"""Chromium's sandbox does not run as root, which is common in containers. A GPU that is emulated
computes each frame with all processors, whether somebody looks at it or not."""
DRAWN = "html[data-first]"
"""What the dashboard has when it has drawn what is in view."""


@pytest.fixture(scope="session")
def browser():
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip(f"none of {', '.join(BROWSERS)} is here")
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as player:
        chromium = player.chromium.launch(executable_path=path, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture
def visit(browser):
    """visit(address, drawn=..., **context) -> a page that has drawn what is in view.

    Fails on errors, dialogs, and requests to other addresses.
    """
    opened, errors = [], []

    def go(address, drawn=DRAWN, **context):
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
        tab.wait_for_selector(drawn, state="attached")
        opened.append(tab)
        return tab

    yield go
    for tab in opened:
        tab.context.close()
    assert errors == []
