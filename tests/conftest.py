"""How tests are collected and divided among workers, and what all processes of a run share."""

import importlib
import os
import sys
from contextlib import suppress
from pathlib import Path

import pytest

# One thread in this process and in every process that a test starts: test files run in parallel,
# and spinning threads cost the others four times what they gain. The number of threads also affects
# the order of sums, so `make test-processors` asks for others. Torch and NumPy read these when they
# are imported. NumPy only computes for Triton's interpreter, in small products.
os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.environ["OMP_NUM_THREADS"] = os.environ.get("TEST_THREADS", "1")
os.environ["MKL_DYNAMIC"] = "FALSE"  # otherwise there are no more threads than cores

# Torch looks up the name of each address that it connects to. By default a lost answer is asked for
# again after 5 seconds; with these options torch continues without it after one.
os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"
# The entry sets this too, but too late for processes that are forked after torch is imported.
os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"

from hypothesis import settings
from slow_cases import COLLECTED

# Examples of each property, where a test does not ask for fewer. `make test` takes the quick ones.
settings.register_profile("full", deadline=None, max_examples=30)
settings.register_profile("quick", deadline=None, max_examples=10)
settings.load_profile("full")


def pytest_configure(config):
    """Load the fixtures, and torch with them, wherever tests run: not in the process that only
    divides them among workers, which wait for it."""
    divides = config.getoption("dist", "no") != "no" and not config.option.collectonly
    if hasattr(config, "workerinput") or not divides:
        config.pluginmanager.import_plugin("shared_fixtures")
        config.pluginmanager.import_plugin("browser_fixtures")
        config.pluginmanager.import_plugin("programs")


def pytest_collection(session):
    """Let each worker begin with its share of the files of a whole run. In a fresh clone pytest
    compiles them, with their asserts rewritten; otherwise every worker would compile all."""
    worker = getattr(session.config, "workerinput", None)
    if worker is None or session.config.args != session.config.getini("testpaths"):
        return
    first = int(worker["workerid"].removeprefix("gw"))
    for path in sorted(Path(__file__).parent.rglob("test_*.py"))[first :: worker["workercount"]]:
        sys.path.insert(0, str(path.parent))
        with suppress(Exception, pytest.skip.Exception):  # told when it is collected
            importlib.import_module(path.stem)


@pytest.hookimpl(tryfirst=True)  # before tests are left out by their marks
def pytest_collection_modifyitems(config, items):
    """Begin with the documents' commands: they take a tenth of all the time, in one file, which
    would go on alone if it were begun late. Of the others, those of one small thing come last, so
    that both workers end together."""
    items.sort(key=rank_file)
    config.stash[COLLECTED] = [*items]


_LONG = {"end_to_end", "parity", "published", "convert", "stores", "support", "tools", "training"}
"""Folders of files that take long, also because they wait for processes."""


def rank_file(item):
    """Return which files come earlier: the lower, the earlier."""
    documents = item.path.name == "test_documents.py"
    return 0 if documents else 1 if item.path.parent.name in _LONG else 2


_SHARED_STARTS = {"transformers": "/convert/", "stand-ins for GPUs": "/test_fake_"}
"""What takes seconds to load or start, and what is in the paths of all files that need it."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Have `--dist loadfile` give files that start the same thing to one worker, as if they were
    one file."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling  # not everywhere are there several workers

    class FilesOfOneStart(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            return next((name for name, part in _SHARED_STARTS.items() if part in file), file)

    return FilesOfOneStart(config, log)
