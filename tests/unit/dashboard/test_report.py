"""The report as Markdown and as HTML: both have the same rows, whatever is in their cells."""

import re
from html.parser import HTMLParser

from hypothesis import given
from hypothesis import strategies as st
from run_folders import make_lines, write

from megaframe.dashboard.report import render_html, render_report, render_table
from megaframe.dashboard.run_folder import RunFolder
from megaframe.io.untrusted import sanitize_text


class TableParser(HTMLParser):
    """Collects the cells of a page's tables, and the text outside of them."""

    def __init__(self):
        super().__init__()
        self.tables, self.outside, self._cell = [], "", None

    def handle_starttag(self, tag, attributes):
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self._cell = ""

    def handle_endtag(self, tag):
        if tag in ("td", "th"):
            self.tables[-1][-1].append(self._cell)
            self._cell = None

    def handle_data(self, data):
        if self._cell is None:
            self.outside += data
        else:
            self._cell += data


def parse(html):
    parser = TableParser()
    parser.feed(html)
    return parser


CELLS = st.text(st.characters() | st.sampled_from("|\\-*`<&"), max_size=8)


@given(heads=st.lists(CELLS, min_size=1, max_size=3), data=st.data())
def test_a_table_has_in_html_the_rows_that_it_has_in_markdown(heads, data):
    width = len(heads)
    rows = data.draw(st.lists(st.lists(CELLS, min_size=width, max_size=width), max_size=4))
    parsed = parse(render_html("\n".join(["# name", *render_table(heads, rows), "", "after"])))
    (table,) = parsed.tables
    shown_heads = [heads] if any(text.split() for text in heads) else []
    expected = [
        [sanitize_text(" ".join(cell.split())) for cell in row] for row in [*shown_heads, *rows]
    ]
    assert table == expected
    assert "---" not in parsed.outside and "|" not in parsed.outside


def test_the_report_of_a_run_has_all_rows_of_its_three_tables(tmp_path):
    run = RunFolder(write(tmp_path / "run", make_lines(30), {"model": {"layers": 2, "hidden": 64}}))
    markdown = render_report(run)
    parsed = parse(render_html(markdown))
    what, how_fast, lost = parsed.tables
    assert what[0] == ["model.layers", "2"] and what[1] == ["model.hidden", "64"]
    assert how_fast[0] == ["steps", "1 to 30"] and how_fast[1][0] == "tokens"
    assert lost[0] == ["cause", "of the peak"] and lost[1][0] == "kernels below peak"
    count = len(re.findall(r"^\| (?! )", markdown, re.MULTILINE))
    assert sum(map(len, parsed.tables)) == count
    assert "|" not in parsed.outside


def test_a_measured_critical_batch_is_told_with_what_follows_from_it(tmp_path):
    lines = [
        {**line, "gradient_noise": {"critical_batch": 1e6 + line["step"]}} for line in make_lines(9)
    ]
    train, optim = {"global_batch": 64, "seq": 1024}, {"lr": 0.001, "name": "adamw"}
    settings = {"train": train, "optim": optim}
    report = render_report(RunFolder(write(tmp_path / "run", lines, settings)))
    assert "- **critical batch**: 1,000,009 tokens; with train.global\\_batch=64 (65,536" in report
    assert "train.global\\_batch=512 with optim.lr=0.00283" in report
    for broken in ({"seq": "many"}, {"seq": 0}, {"seq": 1e300}, {"seq": None}):
        other = {**settings, "train": {**train, **broken}}
        unknown = render_report(RunFolder(write(tmp_path / "other", lines, other)))
        assert "critical batch" not in unknown
