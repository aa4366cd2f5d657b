"""Progress: one line on a terminal, few in a log, and the speed."""

import io

import pytest

from megaframe.io.progress import Progress


class FakeText(io.StringIO):
    """A text that is a terminal or is none."""

    def __init__(self, is_terminal):
        super().__init__()
        self.isatty = lambda: is_terminal


def run(is_terminal, seconds, **arguments):
    """Return what a work of as many steps as seconds writes, each of 10 of its tokens."""
    stream, now = FakeText(is_terminal), [0.0]
    with Progress("a.txt", stream=stream, clock=lambda: now[0], **arguments) as progress:
        for done in range(1, seconds + 1):
            now[0] += 1.0
            progress.report(10 * done, 10 * seconds)
    return stream.getvalue()


def test_a_terminal_has_one_line_and_then_the_speed():
    text = run(True, 3)
    first, *_, last = text.split("\r\x1b[K")[1:]
    assert "\n" not in text[:-1]
    assert first == "a.txt: 10 of 30 tokens, 10 a second, 2 s left"
    assert last == "a.txt: 30 tokens in 3.0 s, 10 a second\n"


def test_a_log_has_a_line_now_and_then_and_none_of_short_work():
    assert run(False, 14) == ""
    lines = run(False, 47).splitlines()
    assert lines[0] == "a.txt: 150 of 470 tokens, 10 a second, 32 s left"
    assert [line.split()[1] for line in lines] == ["150", "300", "450"]


def test_where_the_text_itself_is_the_progress_only_the_speed_is_told():
    assert run(True, 3, is_shown=False) == "a.txt: 30 tokens in 3.0 s, 10 a second\n"
    assert run(False, 100, is_shown=False) == ""


def test_an_error_stands_on_a_line_of_its_own():
    stream = FakeText(True)
    with pytest.raises(ZeroDivisionError), Progress("a.txt", stream=stream):
        raise ZeroDivisionError
    assert stream.getvalue() == "\r\x1b[K"
