"""The measures of a source tree count what they say, and the page is made of the kept numbers."""

import ast
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tools"))
import measure_tree  # noqa: E402
import tree_counts  # noqa: E402
import tree_names  # noqa: E402
from trace_step import trace_step  # noqa: E402

UPPER = '''# Licence: of no interest

"""A module."""
from package.lower import thing
from package.beside import other


class Twice:
    # why
    def held(self):  # a reason
        """Return one."""
        return 1

    @property
    def size(self):
        return 2  # noqa: RUF100

    def measure_size(self):
        text = """
        # a string, and no comment
        """
        return text


class Twice:
    pass
'''


@pytest.fixture
def package(tmp_path):
    folder = tmp_path / "package"
    for name, text in {
        "__init__.py": "",
        "upper/__init__.py": UPPER,
        "lower/__init__.py": "def thing():\n    pass\n",
        "beside.py": "def other():\n    from . import upper\n    return upper\n",
        "tests/test_all.py": "def test_nothing():\n    pass\n",
    }.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_measures_of_a_small_package(package):
    measures = tree_counts.measure_tree(package)
    assert measures["files"] == 4 and measures["file_max"] == len(UPPER.splitlines())
    assert measures["functions"] == 5 and measures["function_max"] == 5
    assert measures["short_functions"] == 100 and measures["long_functions"] == 0
    assert (measures["classes"], measures["repeated_classes"]) == (1, 1)
    assert (measures["rooms"], measures["loose_modules"]) == (2, 1)
    # `upper` and `beside` import each other, and `lower` is below both.
    assert (measures["import_depth"], measures["rooms_in_cycles"]) == (2, 2)


def test_lines_of_code_and_of_comments(package):
    counts = tree_counts.TreeCounts()
    tree_counts.count_file(counts, package, package / "upper" / "__init__.py")
    # Neither the licence, the text, `noqa` nor a docstring counts; two comments do.
    assert (counts.code_lines, counts.comment_lines) == (15, 2)
    assert counts.functions == ["held", "measure_size"]


@pytest.mark.parametrize("name", ["measure", "_find_rows", "is_ready", "to_bytes", "__init__", "_"])
def test_good_names(name):
    assert tree_counts.begins_with_verb(name)


@pytest.mark.parametrize("name", ["held", "beside", "_told", "room_of", "there"])
def test_names_that_are_no_verbs(name):
    assert not tree_counts.begins_with_verb(name)


def test_the_page_is_made_of_the_kept_numbers():
    trees = json.loads(measure_tree.RESULTS.read_text(encoding="utf-8"))
    assert measure_tree.PAGE.read_text(encoding="utf-8") == measure_tree.format_page(trees)
    assert measure_tree.format_table(trees).startswith("| | modules | rooms | now | torchtitan |")


def test_files_that_one_more_touches_are_those_of_the_page():
    touched = json.loads(measure_tree.RESULTS.read_text(encoding="utf-8"))["now"]["touched"]
    texts = tree_names.read_texts(ROOT / "megaframe")
    for kind in tree_names.KINDS:
        files = tree_names.find_naming_files(texts, kind.pattern)
        names = [path.relative_to(ROOT / "megaframe").as_posix() for path in files]
        assert names == touched[kind.heading], "run `python tools/measure_tree.py now=. --write`"


def test_what_an_extension_brings_is_in_one_file():
    counts = tree_names.measure_outside(ROOT)
    assert counts == {kind.heading: 1 for kind in tree_names.KINDS if kind.outside}


NAMES = '''"""Names lion in no code."""
from package.muon import update

def step(run: "RunConfig", stage: int, config: RunConfig | None = None):
    # lion
    return {"adabelief": update}

class Pass:
    stage: Stage | None
    run: RunConfig

    def __init__(self, stage, microbatch: Optional[Microbatch], kind: dict[str, int | str]):
        self.lion = stage
'''


def test_names_takers_and_types_of_words():
    tree = ast.parse(NAMES)
    names = set(tree_names.list_names(tree))
    assert {"package.muon", "adabelief", "lion", "Pass"} <= names
    assert not any("Names lion" in name for name in names)
    assert [node.name for node in tree_names.find_takers(tree, "RunConfig")] == ["step"]
    types = tree_names.count_word_types([tree], ["stage", "run", "microbatch", "kind", "number"])
    assert types == {"stage": 2, "run": 1, "microbatch": 1, "kind": 1, "number": 0}


def test_the_layers_of_the_import_contract_are_counted():
    assert measure_tree.count_contract_layers(ROOT) == 12
    assert measure_tree.count_contract_layers(ROOT / "tests") is None


@pytest.mark.slow
def test_a_step_is_traced():
    traced = trace_step(ROOT)
    assert "block.py" in traced["block_path"][-1]
    assert traced["block_calls"] == len(traced["block_path"]) < 12
    assert traced["block_calls"] < traced["step_files"] < traced["step_calls"]
