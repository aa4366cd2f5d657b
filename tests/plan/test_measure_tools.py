"""The tools that measure links and kernels, run on two real ranks of this machine."""

import importlib.util
import json
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest

from megaframe.errors import UserError
from megaframe.plan.chips import CHIPS
from megaframe.plan.cluster import load_cluster
from megaframe.plan.constants import constants_of
from megaframe.plan.kernels import product_seconds, rates

ROOT = Path(__file__).parents[2]
FEW = ["--device", "cpu", "--times", "2", "--smallest", "65536", "--largest", "4194304"]


def measured(*given):
    """Return what the tool prints on this rank."""
    module, sys.argv = loaded("measure_links", *given)
    with redirect_stdout(StringIO()) as printed:
        module.run(module.arguments())
    return printed.getvalue()


def test_measured_links_become_a_cluster(pool, tmp_path):
    path = str(tmp_path / "mine.yaml")
    told, nothing = pool.run(2, measured, *FEW, "--write", path)
    for operation in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        assert f"node        {operation}" in told
    assert nothing == ""
    cluster = load_cluster(path)
    assert [(tier.name, tier.size) for tier in cluster.tiers] == [("node", 2)]
    assert 1e7 < cluster.tiers[0].bandwidth < 1e12


def test_links_of_each_axis_are_measured(pool):
    told, *_ = pool.run(4, measured, *FEW, "--times", "1", "--tensor", "2")
    assert "tensor      all_gather" in told and "data        all_gather" in told


def loaded(name, *given):
    """Return a tool as a module, and its command line."""
    specification = importlib.util.spec_from_file_location(name, ROOT / f"tools/{name}.py")
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module  # dataclasses need it there
    specification.loader.exec_module(module)
    return module, [f"{name}.py", *given]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--chip", "h1000"], "--chip h1000 is unknown; use h100"),
        ([], "links need 2 ranks or more"),
        (["--smallest", "64", "--largest", "64"], "--smallest 64 must be at least 4 and less than"),
    ],
)
def test_wrong_questions_about_links(given, said, monkeypatch):
    module, arguments = loaded("measure_links", *given)
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(UserError, match=said):
        module.run(module.arguments())


def test_kernels_explain_the_products_they_were_fitted_to(monkeypatch, capsys):
    given = ("--json", "--device", "cpu", "--largest", "256", "--precision", "fp32")
    module, arguments = loaded("measure_kernels", *given)
    monkeypatch.setattr(sys, "argv", arguments)
    module.main()
    found = json.loads(capsys.readouterr().out)
    assert all(found[key] > 0 for key in ("product", "memory", "attention", "launch"))
    assert max(map(abs, found["errors"])) < 1.0


def test_the_start_of_a_product_is_found_again():
    module, _ = loaded("measure_kernels")
    chip, known = CHIPS["a100-80gb"], constants_of("a100")
    truth = replace(known, product=0.7, start=256.0)
    sizes = [(n, n, n) for n in (512, 1024, 2048, 4096)] + [(4096, 4096, 64)]
    rate = rates(chip, truth, "bf16")
    taken = [float(product_seconds(rate, *size)) for size in sizes]
    found = module.explained(chip, "bf16", sizes, taken, known)
    assert found.constants.product == pytest.approx(0.7, rel=0.05)
    assert found.constants.start == pytest.approx(256, rel=0.25)
