"""Compiling for chips that are not present, with Triton's own compiler and the assembler's
report."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from megaframe_kernels.ahead import CHIPS, Usage
from megaframe_kernels.examples import EXAMPLES
from megaframe_kernels.registry import KERNELS

PACKAGE = Path(__file__).resolve().parents[3] / "kernels"


def compile_kernels(folder, *arguments):
    """Compile into a folder. Return the rows of the report."""
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE), "TRITON_CACHE_DIR": str(folder)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "megaframe_kernels.ahead", *arguments]
    process = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout.splitlines()[1:]


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ("--kernels", "rotary", "router", "--chips", *map(str, CHIPS)),
        ("--kernels", "grouped_scaled_product", "--examples", "blocks", "--chips", "90", "100"),
        ("--kernels", "attention", "--examples", "head 64", "head 128", "--chips", "90"),
        ("--kernels", "delta_rule", "--examples", "heads of 128", "--chips", "90"),
        ("--kernels", "sparse_attention", "--examples", "16 heads of 64 + 512", "--chips", "90"),
    ],
)
def test_nothing_spills(arguments, tmp_path):
    rows = compile_kernels(tmp_path, *arguments)
    if "grouped_scaled_product" in arguments:
        assert_keeps_nan(tmp_path)
        units = {row.split()[-1] for row in rows if row.startswith("_multiply")}
        assert units == {"wgmma", "tcgen05.mma"}
    if "attention" in arguments:
        units = {row.split()[-1] for row in rows if not row.startswith("prepare_backward")}
        assert len(rows) == 8 and units == {"wgmma"}


@pytest.mark.slow
def test_no_maximum_or_minimum_of_numbers_loses_nan(tmp_path):
    """The interpreter cannot show this: its maximum of two numbers always keeps NaN."""
    compile_kernels(tmp_path, "--kernels", "activation", "quantise", "--chips", "90")
    assert_keeps_nan(tmp_path)


def assert_keeps_nan(folder):
    text = "".join(path.read_text() for path in folder.rglob("*.ptx"))
    instructions = set(re.findall(r"\b(?:max|min)\.[\w.]*f32", text))
    assert instructions and all(".NaN." in name for name in instructions)


def test_what_does_not_fit_is_told():
    fits = Usage("k", "e", 90, 255, 0, 200 * 1024, 0, 0, "wgmma")
    assert fits.clean
    spills = {"stack": 8}, {"spill_stores": 4}, {"spill_loads": 4}
    for bad in (*spills, {"shared": 228 * 1024}, {"serial": True}, {"columns": 576}):
        assert not replace(fits, **bad).clean
    assert not replace(fits, chip=80).clean


def test_every_triton_kernel_has_examples():
    # These are compiled by the examples of other kernels.
    written = {"attention_backward", "grouped_gradient"}
    written |= {
        "attention_shares",
        "grouped_scaled_gradient",
        "quantise_experts",
        "quantise_columns",
    }
    names = {n for n, k in KERNELS.items() if "triton" in k.implementations} - written
    names = {"permute" if n in ("unpermute", "expert_order") else n for n in names}
    assert names == set(EXAMPLES)
