"""Every command of the README and of the guides runs, in order, in a copy of what git tracks.
Links, keys and names in the documents are right."""

import ast
import os
import re
import shlex
import subprocess
import sys

import pytest
from programs import load_program
from repo_copy import ROOT, copy_tracked
from tool_process import run_ranks, run_tool

from megaframe.config import RunConfig, load
from megaframe.config.describe import COMMON
from megaframe.config.keys import get_config_keys
from megaframe.errors import UserError

NOT_HERE = {
    "make test": "is what runs this test",
    "make model": "test_model_command.py runs it",
    ".venv/bin/python benchmarks/prediction/published.py --write": "test_predictions.py runs it",
}
GUIDES = (
    "start",
    "queue",
    "streaming",
    "shaping",
    "finetuning",
    "layout",
    "long_context",
    "resuming",
    "migrating",
    "extensions",
    "evaluation",
    "schedule",
    "kernel",
    "model",
    "pipeline",
    "batch",
    "tensor",
    "experts",
    "islands",
    "checkpoints",
    "plan",
    "theory",
    "scaling",
    "prediction",
    "dashboard",
    "faults",
    "debugging",
    "library",
    "clusters",
    "gpu",
    "tree",
    "road",
)
"""Guides in docs/, in the order in which their commands run."""
SMALLER = "train.seq=64 train.global_batch=4 train.microbatch=2 train.eval_samples=4"
"""Overrides for every run on the demo's data: an eighth of the work, and a shorter evaluation."""
SHORT_DEMO = f'DEMO_MEGABYTES=1 OVERRIDES="train.steps=5 train.eval_every=5 {SMALLER}"'
SHORTER = {"make demo": f"make demo {SHORT_DEMO}"}
"""Its corpus, an eighth as large, is tokenised by several of the other commands again."""
UNMEASURED = "kernels.matmul=torch"
"""Leaves out the measurement at the start of a run, which the first command makes."""


def list_commands(text):
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line]


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """Return a copy of what git tracks, linked to this environment."""
    folder = copy_tracked(tmp_path_factory.mktemp("clone"))
    (folder / ".venv").symlink_to(sys.prefix)
    return folder


def shorten(command):
    """Return the same command with less to compute."""
    programs = ("pretrain_gpt.py", "tools/launch/node.py")
    trains = any(f"{program} --config configs/demo" in command for program in programs)
    trains = trains and "--dry-run" not in command
    return SHORTER.get(command, f"{command} {SMALLER} {UNMEASURED}" if trains else command)


def run_all(commands, clone):
    """Run commands one after the other, and assert that each succeeds."""
    for command in commands:
        if command not in NOT_HERE:
            result = run_command(shorten(command), clone)
            assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"


PROGRAM = r"((?:tools/\w+|examples/\w+|benchmarks/\w+/\w+|pretrain_gpt)\.py[^|<>&;$*!\n]*)"
"""A program of ours and its words, without anything that needs a shell."""


def run_command(command, clone):
    """Run a command in the copy. One that only calls a program of ours is forked from the server
    that has imported torch, which is most of what most of them do. So are its ranks, but for the
    first torchrun of the README, which is the real one."""
    environment = {"PYTHONPATH": str(clone)}
    if plain := re.fullmatch(rf"\.venv/bin/python {PROGRAM}", command):
        return run_tool(*shlex.split(plain[1]), environment=environment, root=clone)
    torchrun = r"\.venv/bin/(?:torchrun|python -m torch\.distributed\.run) --nproc-per-node (\d)"
    ranks = re.fullmatch(rf"{torchrun} {PROGRAM}", command)
    if ranks and command != REAL_TORCHRUN:
        words = shlex.split(ranks[2])
        return run_ranks(int(ranks[1]), *words, environment=environment, root=clone)
    shell, environment = ["bash", "-c", command], {**os.environ, **environment}
    return subprocess.run(shell, cwd=clone, env=environment, capture_output=True, text=True)


README = list_commands((ROOT / "README.md").read_text())
REAL_TORCHRUN = next(shorten(command) for command in README if "/torchrun " in command)


def find_guide(name):
    """Return the path of a guide or a page of reference."""
    (path,) = ROOT.glob(f"docs/**/{name}.md")
    return path


@pytest.fixture(scope="module")
def begun(clone):
    """Return the copy after the README's first command."""
    run_all(README[:1], clone)
    return clone


@pytest.mark.slow
def test_the_first_command_of_the_readme_works(begun):
    assert README[0] == "make demo"
    assert (begun / "runs/demo/metrics.jsonl").read_text().count("\n") == 5
    assert (begun / "runs/demo/checkpoints/latest").exists()


@pytest.mark.slow
def test_the_other_commands_of_the_readme_and_then_of_the_guides_work(begun):
    clone, own_commands = begun, README[1:]
    pages = [ROOT / "CONTRIBUTING.md", *map(find_guide, GUIDES)]
    guides = [line for page in pages for line in list_commands(page.read_text())]
    assert len(own_commands) > 1 and {*NOT_HERE, *SHORTER} <= {*README, *guides}
    run_all([*own_commands, *(command for command in guides if command != README[0])], clone)
    drawn, published = (root / "docs/images/zb-v.svg" for root in (clone, ROOT))
    assert drawn.read_text() == published.read_text(), "the picture in the guide is another"


def list_documents():
    yield from (*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md")))
    yield from (ROOT / "benchmarks/README.md", ROOT / "kernels/README.md")


def strip_code(document):
    """Return a document without its code blocks."""
    return re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL)


def list_headings(document):
    """Yield the anchors of a document's headings, as GitHub makes them."""
    for title in re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE):
        yield re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def test_links_of_the_documents_lead_somewhere():
    for document in list_documents():
        for target, anchor in re.findall(r"\]\(([^)#:]*)(#[^)]+)?\)", strip_code(document)):
            destination = document.parent / target if target else document
            assert destination.exists(), f"{document.name}: {target}"
            if anchor and destination.suffix == ".md":
                assert anchor[1:] in list_headings(destination), (
                    f"{document.name}: {target}{anchor}"
                )


def test_the_index_names_every_guide_and_every_command_is_run():
    index = (ROOT / "docs/README.md").read_text()
    for document in ROOT.glob("docs/**/*.md"):
        name = document.stem
        path = document.relative_to(ROOT / "docs").as_posix()
        assert name == "README" or f"({path})" in index, f"docs/README.md lacks {name}.md"
        assert name in GUIDES or not list_commands(document.read_text()), f"{name}.md is not run"


def test_the_table_of_families_is_what_their_rows_say():
    tool = load_program("tools/families.py")
    assert (ROOT / "docs/reference/families.md").read_text() == tool.format_page(), (
        "run: python tools/families.py > docs/reference/families.md"
    )


def test_the_table_of_options_is_what_the_schema_says():
    tool = load_program("tools/options.py")
    assert (ROOT / "docs/reference/options.md").read_text() == tool.format_page(), (
        "run: python tools/options.py > docs/reference/options.md"
    )
    assert all(
        f"`{name}`" in tool.format_page()
        for name, key in get_config_keys().items()
        if not key.section
    )
    rows = re.findall(r"^\| `([a-z_.0-9]+)`", tool.format_page(), re.MULTILINE)
    assert tuple(rows[: len(COMMON)]) == COMMON, "the page begins with what --help shows"


FILES = (
    "run.log",
    "metrics.jsonl",
    "metrics.1.jsonl",
    "model.py",
    "plan.html",
    "data.py",
    "evaluate.py",
    "train.py",
)
"""Names of files that look like keys."""
PAST = ("log", "CHANGELOG", "prediction")
"""Documents that record the past, and may name keys and files that no longer exist."""


def list_keys(document):
    """Yield what looks like a key between backticks. On the page for users of other trainers only
    the last column of tables counts, because the first has those trainers' keys."""
    text = document.read_text()
    if document.stem == "migrating":
        rows = [line.strip("| ").rpartition(" | ")[2] for line in text.splitlines()]
        text = "\n".join(rows)
    for quoted in re.findall(r"`([a-z_]+\.[a-z0-9_.]+(?:=[^`]*)?)`", text):
        for name in re.split(r" (?=[a-z_]+\.[a-z_.]+=)", quoted):
            if name.partition(".")[0] in RunConfig.model_fields and name not in FILES:
                yield name


BESIDE = {
    "model.moe": ["model.moe.experts=8"],
    "model.latent": [
        f"model.latent.{key}=8" for key in ("kv_rank", "head_dim", "rotary_dim", "value_dim")
    ],
    "model.indexer": [f"model.indexer.{key}=8" for key in ("heads", "head_dim", "top_k")],
    "parallel.compress": ["parallel.data_replicate=2"],
}
"""Overrides that are needed together with keys of these prefixes."""


def explain_mistake(name):
    """Return what is wrong with a key or its value, or None."""
    key, equals, value = name.partition("=")
    if key not in get_config_keys():
        return "no such key"
    beside = [
        other_key for part, some in BESIDE.items() if key.startswith(part) for other_key in some
    ]
    try:
        if equals and not value.isupper():  # capitals are a placeholder
            load(None, [*beside, name])
    except UserError as error:
        return str(error)
    return None


def test_keys_that_documents_name_exist_and_take_what_is_given():
    named = [(d, name) for d in list_documents() if d.stem not in PAST for name in list_keys(d)]
    wrong = [
        f"{d.name}: {name}: {problem}" for d, name in named if (problem := explain_mistake(name))
    ]
    assert not wrong and len(named) > 300


def list_definitions(path):
    """Yield the names of a module's functions, classes, methods (with their class) and values."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node.name
        if isinstance(node, ast.ClassDef):
            functions = (n for n in node.body if isinstance(n, ast.FunctionDef))
            yield from (f"{node.name}.{function.name}" for function in functions)
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        yield from (target.id for target in targets if isinstance(target, ast.Name))


def test_what_guides_say_is_in_a_file_is_there():
    """Names after a link to a module exist there: functions with (), and capitalised names."""
    lines_checked = 0
    for document in ROOT.glob("docs/**/*.md"):
        for path, after in re.findall(r"\]\(([^)]+\.py)\)((?:(?!\]\().)*)", document.read_text()):
            names = set(list_definitions(document.parent / path))
            for name in re.findall(r"`([\w.]+\(\)|[A-Z]\w+)`", after):
                assert name.removesuffix("()") in names, f"{document.name}: {path} has no {name}"
                lines_checked += 1
    assert lines_checked > 60


def test_ci_runs_the_test_command_of_the_readme():
    assert "make test-all || make test-again\n" in (ROOT / ".ci/run").read_text()
    assert "run: .ci/run\n" in (ROOT / ".github/workflows/ci.yml").read_text()
    assert "`make test-all`" in strip_code(ROOT / "README.md")
    assert "make test" in README
