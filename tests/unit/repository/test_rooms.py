"""Rules of the repository: style and types, imports point downward, kernels are independent, the
planner has no torch, the design names every room, and the config stays small."""

import ast
import os
import re
import subprocess
import sys
from collections import defaultdict
from itertools import chain
from pathlib import Path

import pytest
from pydantic import BaseModel
from slow_cases import slow

from megaframe.config import RunConfig

ROOT = Path(__file__).resolve().parents[3]


def test_imports_point_to_a_lower_room():
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    paths = os.pathsep.join((str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")))
    environment = {**os.environ, "PYTHONPATH": paths}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
    assert "5 kept, 0 broken" in result.stdout


# mypy reads everything for half a minute.
@pytest.mark.parametrize(
    "command", [["ruff", "check"], ["ruff", "format", "--check"], slow(["mypy"])], ids=" ".join
)
def test_style_and_types(command):
    program = Path(sys.executable).with_name(command[0])
    process = subprocess.run([program, *command[1:]], cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr


def find_repeated_classes():
    """Return the files of each class name that is defined in several. Parsing takes long, so only
    files are parsed in which a name stands that another one has as well."""
    files = defaultdict(list)
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True)
    for name in listed.stdout.split():
        if name.partition("/")[0] in ("megaframe", "kernels", "tools", "benchmarks", "tests"):
            text = (ROOT / name).read_text(encoding="utf-8")
            for class_name in {*re.findall(r"^ *class (\w+)[:(]", text, re.MULTILINE)}:
                files[class_name].append(name)
    named = {name: some for name, some in files.items() if len(some) > 1}
    trees = {file: ast.parse((ROOT / file).read_text("utf-8")) for file in chain(*named.values())}
    defined = {
        file: {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
        for file, tree in trees.items()
    }
    sure = {name: [file for file in some if name in defined[file]] for name, some in named.items()}
    return {name: some for name, some in sure.items() if len(some) > 1}


def test_a_class_name_has_one_meaning():
    assert not find_repeated_classes()


def list_imported_modules(path):
    """Yield the modules that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            yield node.module or ""


def test_what_tests_share_is_in_support():
    """No test module imports another one, and what is in `support` imports none."""
    for path in (ROOT / "tests").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if not re.search(r"^ *(from|import) .*\btest_", text, re.MULTILINE):
            continue  # parsing takes long
        imported = [name for name in list_imported_modules(path) if name.startswith("test_")]
        assert not imported, f"{path.relative_to(ROOT)} imports {imported}"


def test_what_is_shipped_imports_no_mocks():
    """What a layer computes while it is measured is given to it (`LayerRoutines`)."""
    command = ["git", "grep", "-lE", r"^ *(from|import) unittest", "--", "megaframe", "kernels"]
    found = subprocess.run([*command, "tools"], cwd=ROOT, capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (1, ""), found.stderr


def test_no_module_lies_outside_the_rooms():
    beside = {path.name for path in (ROOT / "megaframe").iterdir() if path.is_file()}
    assert beside == {"__init__.py", "errors.py", "layout.py", "py.typed"}


def test_the_import_contract_has_at_most_twelve_layers():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (layers,) = re.findall(r'type = "layers"\n.*?\nlayers = \[\n(.*?)\n\]', text, re.DOTALL)
    assert 3 < len(layers.splitlines()) <= 12


def test_the_planner_runs_without_torch():
    code = (
        "import sys; import megaframe.config, megaframe.layout, megaframe.schedule, "
        "megaframe.planner.advice, megaframe.planner.plan_page; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def list_keys(section):
    """Yield the name and description of each key of a section and of the sections in it."""
    for name, field in section.model_fields.items():
        yield name, field.description
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from list_keys(field.annotation)


def test_every_key_of_a_run_is_documented_read_and_tested():
    """How many keys a config has says nothing; what each of them must be worth does."""

    def find_words(*folders):
        files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
        config = ROOT / "megaframe" / "config"
        texts = (path.read_text("utf-8") for path in files if not path.is_relative_to(config))
        return {word for text in texts for word in re.findall(r"[a-z]+(?:_?[a-z0-9]+)*", text)}

    keys = [*list_keys(RunConfig)]
    read, tested = find_words("megaframe", "tools"), find_words("tests")
    assert len(keys) > 50
    assert [name for name, description in keys if not description] == []
    assert sorted({name for name, _ in keys} - read) == []
    assert sorted({name for name, _ in keys} - tested) == []


def test_the_design_names_every_room():
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    house = text[text.index("## Module structure") : text.index("## Contracts")]
    named = set(re.findall(r"[a-z_]+(?:\.py|/)", house))
    modules = {path.name for path in (ROOT / "megaframe").glob("*.py")} - {"__init__.py"}
    rooms = {f"{path.parent.name}/" for path in (ROOT / "megaframe").glob("*/__init__.py")}
    assert modules | rooms <= named, sorted((modules | rooms) - named)
    for line in house.splitlines():
        listed = re.match(r"    ([a-z_/]+(?:\.py|/))  ", line)
        if listed:
            assert (ROOT / "megaframe" / listed[1]).exists(), line


def test_no_merge_is_left_open():
    command = ["git", "grep", "-nE", "^(<{7}|>{7}) "]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 1, process.stdout
