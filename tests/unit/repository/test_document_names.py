"""Names in the documents, and in the docstrings of the sources, stand for something that is there,
and every module is named by a test. Only texts are read. tests/end_to_end/test_documents.py has the
commands, links and values of keys.
"""

import re
import subprocess
from pathlib import Path

from megaframe.config.keys import get_config_keys
from megaframe.config.schema import RunConfig

ROOT = Path(__file__).resolve().parents[3]
PAST = {"docs/log.md", "CHANGELOG.md"}
"""Documents that record the past, and may name what no longer exists."""
FOREIGN_FLAGS = {
    "torchrun": "--rdzv-endpoint --shutdown-timeout --signals-to-handle --numa-binding",
    "torchrun on one node": "--standalone",
    "Slurm": "--nodes --signal --time --cpu-bind",
    "Ray": "--head",
    "MPI": "--bind-to",
    "Megatron-LM": "--overlap-grad-reduce",
    "wandb": "--append",
}
FOREIGN_NAMES = {"CAP_SYS_NICE", "NCCL_RUNTIME_CONNECT", "_new_process_group_helper"}
NO_KEYS = {"run.step", "run.metrics"}
"""What a callback is given, which looks like keys."""
NO_SYMBOLS = {"megaframe.state"}
"""Names of other things than modules and what is in them: an entry of a checkpoint."""
FILES = {".py", ".log", ".html", ".json", ".jsonl", ".md", ".partial"}
SOURCES = {".py", ".js", ".yaml", ".toml", ".sh", ".cu", ".h", ".cpp", ".css"}


def list_tracked():
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout
    return [name for name in names.splitlines() if (ROOT / name).is_file()]


TRACKED = list_tracked()
TEXTS = {
    name: (ROOT / name).read_text(errors="replace")
    for name in TRACKED
    if Path(name).suffix in SOURCES or Path(name).name == "Makefile"
}


def list_document_spans():
    """Yield each document's name and each text between backticks in it. On the page for users of
    other trainers only the last column of tables counts: the first has those trainers' names."""
    for name in TRACKED:
        if not name.endswith(".md") or name in PAST:
            continue
        text = re.sub(r"```.*?```", "", (ROOT / name).read_text(), flags=re.DOTALL)
        if name.endswith("migrating.md"):
            text = "\n".join(line.strip("| ").rpartition(" | ")[2] for line in text.splitlines())
        for span in re.findall(r"`([^`\n]+)`", text):
            yield name, span


def list_source_spans():
    """Yield each source file's name and each text between backticks in it, except tests."""
    for name, text in TEXTS.items():
        if name.endswith(".py") and not name.startswith("tests/"):
            for span in re.findall(r"`([^`\n]+)`", text):
                yield name, span


SPANS = [*list_document_spans(), *list_source_spans()]


def find_missing(name):
    """Return what of a dotted name like megaframe.a.b does not exist, or None."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        folder = Path(*parts[:end])
        for path in (f"{folder}.py", f"{folder}/__init__.py"):
            if path in TEXTS:
                rest = parts[end:]
                words = set(re.findall(r"\w+", TEXTS[path]))
                return None if not rest or rest[0] in words else f"{path} has no {rest[0]}"
    return f"there is no module {name}"


def test_keys_exist():
    keys, sections = get_config_keys().keys(), "|".join(RunConfig.model_fields)
    wrong, seen = [], 0
    for place, span in SPANS:
        for name in re.findall(rf"(?<![\w./:-])(?:{sections})\.[a-z_.]*[a-z_](?=[`=]|$)", span):
            seen += 1
            if name not in keys | NO_KEYS and Path(name).suffix not in FILES:
                wrong.append(f"{place}: {name}")
    assert not wrong and seen > 500


def test_flags_exist():
    """Those of this project's commands are in one of them."""
    own = {
        flag
        for name, text in TEXTS.items()
        if not name.startswith("tests/")
        for flag in re.findall(r"[\"'(\s](--[a-z][a-z0-9-]*)", text)
    }
    known = own.union(*(flags.split() for flags in FOREIGN_FLAGS.values()))
    flags = [
        (place, flag)
        for place, span in SPANS
        if not place.endswith("migrating.md")
        for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", span)
    ]
    wrong = [f"{place}: {flag}" for place, flag in flags if flag not in known]
    assert not wrong and len(flags) > 100


def test_dotted_names_exist():
    names = {(p, name) for p, s in SPANS for name in re.findall(r"^megaframe(?:\.\w+)+", s)}
    wrong = [
        f"{place}: {name}: {missing}"
        for place, name in names
        if name not in NO_SYMBOLS and (missing := find_missing(name))
    ]
    assert not wrong and len(names) > 20


def test_names_of_functions_and_variables_stand_in_a_source():
    """Such as `pass_states`, `Mesh.leave` and `PET_NNODES`."""
    words = {word for text in (*TEXTS.values(), *TRACKED) for word in re.findall(r"\w+", text)}
    named = [
        (place, word)
        for place, span in list_document_spans()
        if re.fullmatch(r"[A-Za-z_][\w.]*(\(\))?", span) and not place.endswith("migrating.md")
        for word in re.findall(r"\w+", span)
        if "_" in word.strip("_")
    ]
    wrong = [f"{p}: {word}" for p, word in named if word not in words | FOREIGN_NAMES]
    assert not wrong and len(named) > 300


def list_names_in_tests():
    """Yield the dotted name of everything that a test imports from the library, or names."""
    for name, text in TEXTS.items():
        if name.startswith("tests/") and name.endswith(".py"):
            yield from re.findall(r"megaframe(?:\.\w+)+", text)
            for module, names in re.findall(r"from (megaframe[\w.]*) import (\([^)]*\)|.*)", text):
                yield from (f"{module}.{symbol}" for symbol in re.findall(r"\w+", names))


def test_every_module_is_named_by_a_test():
    """Each module has a test that imports it, has its name, or says that it tests it."""
    prefixes = {
        ".".join(parts[:end])
        for parts in (name.split(".") for name in list_names_in_tests())
        for end in range(2, len(parts) + 1)
    }
    files = {Path(name).stem for name in TEXTS if name.startswith("tests/")}
    modules = [
        ".".join(Path(name).with_suffix("").parts)
        for name in TEXTS
        if name.startswith("megaframe/") and name.endswith(".py") and "__init__" not in name
    ]
    unnamed = [
        module
        for module in modules
        if module not in prefixes
        and not {f"test_{'_'.join(module.split('.')[-n:])}" for n in (1, 2)} & files
    ]
    assert not unnamed and len(modules) > 300


def test_modules_that_tests_name_exist():
    named = {
        (place, name)
        for place, text in TEXTS.items()
        if place.startswith("tests/")
        for name in re.findall(r"`(megaframe(?:\.\w+)+)`", text)
    }
    wrong = [f"{place}: {missing}" for place, name in named if (missing := find_missing(name))]
    assert not wrong and len(named) > 50
