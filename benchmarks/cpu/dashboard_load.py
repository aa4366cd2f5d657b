"""How long the dashboard's page of a long, wide run takes to be made and to open in a browser.

The run is synthetic: it has as many steps and ranks as requested, with every number that a real run
has.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))
_PAINTED = "performance.getEntriesByName('first-contentful-paint')[0].startTime"


def main() -> None:
    """Measure, print, and write the results if requested."""
    from playwright.sync_api import sync_playwright
    from run_folders import make_lines, write

    from megaframe.dashboard.page import PAGE_FILE, render_page, write_atomically
    from megaframe.dashboard.page_data import build_page_data
    from megaframe.dashboard.run_folder import RunFolder

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--ranks", type=int, default=1000)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--browser", default=shutil.which("chromium"))
    parser.add_argument("--write", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        steps, ranks = arguments.steps, arguments.ranks
        records = make_lines(steps, ranks=ranks, stages=8, ranks_every=steps // 100)
        folder = write(Path(name) / "run", records, environment={"ranks": ranks})
        start = time.perf_counter()
        text = render_page(build_page_data([RunFolder(folder)]))
        written = time.perf_counter() - start
        path = Path(name) / PAGE_FILE
        write_atomically(path, text)
        read, opened = [], []
        with sync_playwright() as player:
            browser = player.chromium.launch(
                executable_path=arguments.browser, args=["--no-sandbox"]
            )
            for _ in range(arguments.times):
                tab = browser.new_page(viewport={"width": 1400, "height": 900})
                start = time.perf_counter()
                tab.goto(path.as_uri(), wait_until="commit")
                tab.wait_for_selector("html[data-first]", state="attached")
                opened.append(time.perf_counter() - start)
                read.append(tab.evaluate(_PAINTED) / 1000)
                tab.close()
            browser.close()
    results = {
        "steps": arguments.steps,
        "ranks": arguments.ranks,
        "page_bytes": len(text),
        "made_seconds": written,
        "first_paint_seconds": statistics.median(read),
        "first_screen_seconds": statistics.median(opened),
        "first_screen_slowest": max(opened),
    }
    print(json.dumps(results, indent=1))
    if arguments.write:
        arguments.write.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
