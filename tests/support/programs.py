"""Programs of the repository in the process of a test, which can look into them."""

import importlib.util
import inspect
import sys
from pathlib import Path

import pytest
from repo_copy import ROOT


def load_program(path):
    """Return a file of the repository, such as tools/plan.py, as a module, without running it."""
    name = f"{Path(path).stem}_program"
    spec = importlib.util.spec_from_file_location(name, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def call_main(monkeypatch, capsys):
    """call_main(main, *words) -> the exit status, the output and the errors of a program's `main`
    in this process."""

    def call(main, *words):
        name = Path(inspect.getfile(inspect.unwrap(main))).name
        monkeypatch.setattr(sys, "argv", [name, *map(str, words)])
        try:
            status = main()
        except SystemExit as ended:
            status = ended.code
        return status or 0, *capsys.readouterr()

    return call


@pytest.fixture
def run_checkpoint_tool(call_main):
    """run_checkpoint_tool(*words) -> the exit status of tools/checkpoint.py, and all that it
    prints."""
    main = load_program("tools/checkpoint.py").main

    def run(*words):
        status, output, errors = call_main(main, *words)
        return status, output + errors

    return run
