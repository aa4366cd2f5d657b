"""Files are written by `megaframe/io/regular_file.py` alone, because a writer of its own follows a
link that somebody has planted. The exceptions are few, and each has its reason."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
WRITER = "megaframe/io/regular_file.py"
EXCEPTIONS = {
    "megaframe/io/closed_output.py": "opens /dev/null, and must not need what the writer imports",
    "tools/chaos/": "damages the files of its own runs",
    "tools/measure_tree.py": "writes its two pages of this repository, of which it needs no module",
    "tools/trace_step.py": "runs other checkouts, in a temporary folder of its own",
}
METHODS = {"write_text", "write_bytes", "touch", "write_html", "write_image", "tofile"}
"""Methods that write to a path."""
FUNCTIONS = {
    *("os.truncate", "os.mkfifo", "shutil.copy", "shutil.copy2", "shutil.copyfile", "shutil.move"),
    *("shutil.copytree", "np.save", "np.savez", "np.savetxt", "tempfile.mktemp", "os.creat"),
}
NAMES = {"open", *METHODS, *(name.rpartition(".")[2] for name in FUNCTIONS)}
"""How what may write is called, without its module."""
WRITING_FLAGS = {"O_WRONLY", "O_RDWR", "O_CREAT", "O_APPEND", "O_TRUNC"}


def find_writers(source):
    """Yield the line and the call of everything that writes to a path by itself. A file that must
    be new (mode `x`) follows no link."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        attribute = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if attribute not in NAMES and not attribute.endswith(("memmap", "MemoryMap")):
            continue
        name = ast.unparse(node.func)
        if name in FUNCTIONS or attribute in METHODS:
            yield node.lineno, name
        elif name == "os.open":
            flags = {part.attr for part in ast.walk(node.args[1]) if hasattr(part, "attr")}
            if flags & WRITING_FLAGS:
                yield node.lineno, name
        elif name in ("open", "gzip.open", "io.open"):
            yield from _judge_mode(node, name, 1)
        elif name.endswith(("memmap", "MemoryMap")):
            yield from _judge_mode(node, name, 2)
        elif attribute == "open" and isinstance(node.func, ast.Attribute):
            yield from _judge_mode(node, name, 0)


def _judge_mode(node, name, position):
    modes = [keyword.value for keyword in node.keywords if keyword.arg == "mode"]
    modes = modes or node.args[position : position + 1]
    mode = modes[0].value if modes and isinstance(modes[0], ast.Constant) else None
    if modes and position and not isinstance(mode, str):
        yield node.lineno, f"{name} with a mode that is not written there"
    if isinstance(mode, str) and set(mode) <= set("rwabt+") and set(mode) & set("wa+"):
        yield node.lineno, f"{name} {mode!r}"


def list_sources():
    """Yield the programs and modules, except the writer and the exceptions."""
    for path in [*ROOT.glob("megaframe/**/*.py"), *ROOT.glob("tools/**/*.py"), *ROOT.glob("*.py")]:
        name = path.relative_to(ROOT).as_posix()
        if name != WRITER and not name.startswith(tuple(EXCEPTIONS)):
            yield path


def test_nothing_else_writes_to_a_path():
    found = [
        f"{path.relative_to(ROOT)}:{line}: {call}"
        for path in list_sources()
        for line, call in find_writers(path.read_text(encoding="utf-8"))
    ]
    assert not found


def test_every_exception_is_needed():
    for name in EXCEPTIONS:
        paths = [*ROOT.glob(f"{name}*.py")] if name.endswith("/") else [ROOT / name]
        assert any([*find_writers(path.read_text(encoding="utf-8"))] for path in paths), name


@pytest.mark.parametrize(
    "call",
    [
        *("open(p, 'w')", "open(p, mode='ab')", "p.open('w')", "open(p, 'r+b')", "open(p, mode)"),
        *("p.write_text('')", "(a / b).write_bytes(c)", "p.touch()", "np.memmap(p, t, 'w+')"),
        *("os.open(p, os.O_WRONLY | os.O_CREAT)", "shutil.copyfile(a, b)", "os.truncate(p, 1)"),
    ],
)
def test_a_writer_is_found(call):
    assert [*find_writers(call)]


@pytest.mark.parametrize(
    "call",
    [
        *("open(p)", "open(p, 'rb')", "open(p, 'xb')", "p.open()", "store.open(p, lock=True)"),
        *("np.memmap(p, t, 'r')", "os.open(p, os.O_RDONLY)", "open_append(p)", "self._open(step)"),
    ],
)
def test_a_reader_is_no_writer(call):
    assert not [*find_writers(call)]
