"""Dialogues and questions that `tools/demo_corpus.py` makes of docstrings."""

import ast
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from programs import load_program

demo_corpus = load_program("tools/demo_corpus.py")

SOURCE = '''
"""What the module is for."""

def join(first, *rest, end="\\n"):
    """Join several texts
    by lines.

    And more that is not asked for.
    """

def _private():
    """Nobody is told what this is for."""

class Box(object):
    """A box that holds one thing."""

    def __init__(self, thing=None):
        """Put a thing into the box."""

    def empty(self):
        """Take the thing out of the box."""
'''


@pytest.fixture
def library(tmp_path):
    """Return a library of two modules, one of which has no meaning for Python."""
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools/__init__.py").write_text(SOURCE)
    (tmp_path / "template.py").write_text("class $name: ...")
    (tmp_path / "_own.py").write_text(SOURCE)
    (tmp_path / "pydoc_data").mkdir()
    topics = {"assert": "What assert does.", "if": "What if does."}
    (tmp_path / "pydoc_data/topics.py").write_text(f"# made\ntopics = {topics!r}")
    (tmp_path / "test").mkdir()
    (tmp_path / "test/left_out.py").write_text(SOURCE)
    return tmp_path


def test_what_a_module_describes(library):
    items = [*demo_corpus.read_described_items(library)]
    assert [(item.path, item.call, item.description) for item in items] == [
        ("tools.join", "join(first, *rest, end='\\n')", "Join several texts by lines."),
        ("tools.Box", "Box(thing=None)", "A box that holds one thing."),
        ("tools.Box.empty", "Box.empty()", "Take the thing out of the box."),
    ]


def test_prose_is_docstrings_and_topics(library):
    rows = {row["path"]: row["text"] for row in demo_corpus.read_prose(library)}
    assert list(rows) == [
        "_own.py",
        "pydoc_data/topics.py:assert",
        "pydoc_data/topics.py:if",
        "tools/__init__.py",
    ]
    assert rows["pydoc_data/topics.py:if"] == "What if does."
    assert rows["tools/__init__.py"].startswith("What the module is for.\n\ntools.join(first, ")
    assert "Nobody is told" not in rows["tools/__init__.py"]


def describe(texts):
    return [demo_corpus.Described("module", f"f{n}", f"f{n}()", t) for n, t in enumerate(texts)]


@given(st.lists(st.text("abc ", min_size=20, max_size=24), min_size=1, max_size=60))
def test_no_description_is_both_learnt_and_asked_for(texts):
    """Each question has four choices, of which one is right, if there are as many."""
    items = describe(texts)
    learnt = json.dumps([*demo_corpus.make_dialogues(items)])
    questions = [*demo_corpus.make_questions(items)]
    held_out = {item.description for item in items if item.is_held_out}
    assert {row["choices"][row["answer"]] for row in questions} == held_out
    for item in items:
        assert (json.dumps(item.description) in learnt) != item.is_held_out
    for row in questions:
        assert set(row["choices"]) <= held_out and len(row["choices"]) == 4
        assert len(set(row["choices"])) == min(4, len(held_out))
        (item,) = {i for i in items if f" {i.path} " in row["question"]}
        assert item.description == row["choices"][row["answer"]]


def test_dialogues_alternate_and_a_tenth_is_held_out():
    items = describe([f"Description number {n:04} of many." for n in range(2000)])
    assert 0.08 < sum(item.is_held_out for item in items) / len(items) < 0.12
    dialogues = [*demo_corpus.make_dialogues(items)]
    for row in dialogues:
        roles = [message["role"] for message in row["messages"]]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
    lengths = {len(row["messages"]) // 2 for row in dialogues}
    assert lengths == {1, 2, 3, 4}
    answers = [row["answer"] for row in demo_corpus.make_questions(items)]
    assert {*answers} == {0, 1, 2, 3}


def test_a_file_is_written_up_to_its_limit_or_not_at_all(tmp_path):
    rows = [{"text": "a" * 10}, {"text": "b" * 10}]
    assert demo_corpus.write(rows, tmp_path / "x.jsonl", 19) == (1, 10)
    assert ast.literal_eval((tmp_path / "x.jsonl").read_text()) == rows[0]
    with pytest.raises(demo_corpus.UserError, match="no row under 9 bytes"):
        demo_corpus.write(rows, tmp_path / "y.jsonl", 9)
    assert not (tmp_path / "y.jsonl").exists()
