"""Every command of the README and of the guides is run, in order, in a copy of what git tracks."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NOT_HERE = {"make test": "is what runs this test"}
GUIDES = (
    "pipeline",
    "tensor",
    "experts",
    "checkpoints",
    "plan",
    "prediction",
    "dashboard",
    "faults",
    "clusters",
    "gpu",
)
"""In this order, of docs/."""
SHORTER = {"make demo": 'make demo OVERRIDES="train.steps=5 train.eval_every=5"'}


def commands(text):
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line]


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A copy of what git tracks, beside this environment."""
    folder = tmp_path_factory.mktemp("clone")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    (folder / ".venv").symlink_to(sys.prefix)
    return folder


def run_all(found, clone):
    """Run commands one after the other; the last message if one fails."""
    environment = {**os.environ, "PYTHONPATH": str(clone)}
    for command in found:
        if command in NOT_HERE:
            continue
        result = subprocess.run(
            ["bash", "-c", SHORTER.get(command, command)],
            cwd=clone,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"


def test_the_commands_of_the_readme_and_then_of_the_guides_work(clone):
    found = commands((ROOT / "README.md").read_text())
    assert len(found) > 8 and set(NOT_HERE) | set(SHORTER) <= set(found)
    run_all(found, clone)
    assert (clone / "runs/demo/metrics.jsonl").read_text().count("\n") == 5
    assert (clone / "runs/demo/checkpoints/latest").exists()
    for guide in GUIDES:
        run_all(commands((ROOT / f"docs/{guide}.md").read_text()), clone)
    drawn, shown = (root / "docs/images/zb-v.svg" for root in (clone, ROOT))
    assert drawn.read_text() == shown.read_text(), "the picture in the guide is another"


def test_links_of_the_documents_lead_somewhere():
    for document in (ROOT / "README.md", *ROOT.glob("docs/*.md"), ROOT / "benchmarks/README.md"):
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name}: {target}"


def test_ci_runs_the_test_command_of_the_readme():
    assert "make test" in (ROOT / ".ci/run").read_text()
    assert "make test" in commands((ROOT / "README.md").read_text())
