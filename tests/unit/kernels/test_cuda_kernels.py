"""The CUDA C++ kernels: compiled for every chip, and run on a CPU that emulates a GPU."""

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from kernel_exactness import DEVICE, deterministic, make_generator
from megaframe_kernels import cuda_library
from megaframe_kernels.cuda_build import (
    CHIPS,
    BuildError,
    build,
    find_cached_library,
    find_nvcc,
    list_sources,
)
from megaframe_kernels.experts import expert_order
from megaframe_kernels.kernel import refuse_nothing
from slow_cases import mark_slow, slow

from megaframe.config import RunConfig
from megaframe.ops.kernel_dispatch import make_kernels

try:
    NVCC = find_nvcc()
except BuildError as error:
    pytest.skip(str(error), allow_module_level=True)


EMULATED_GPU = Path(__file__).parents[2] / "support/emulated_gpu.h"


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    """Compile the same sources for the CPU, with `emulated_gpu.h` in place of CUDA's runtime."""
    folder = tmp_path_factory.mktemp("emulated")
    everything, library = folder / "all.cc", folder / "kernels.so"
    everything.write_text("\n".join(f'#include "{s}"' for s in list_sources() if s.stem != "probe"))
    command = [NVCC, "-std=c++20", "-O1", "-shared", "-Xcompiler=-fPIC,-pthread", "-x", "c++"]
    command += ["-include", str(EMULATED_GPU), str(everything)]
    subprocess.run([*command, "-o", str(library)], check=True)
    return cuda_library.load(library)


@pytest.fixture
def library(request, monkeypatch):
    """Use the real library if there is a GPU, otherwise the emulated one."""
    if DEVICE == "cpu":
        emulated = request.getfixturevalue("emulated")
        monkeypatch.setattr(cuda_library, "_find", lambda: emulated)


@pytest.mark.parametrize("chip", mark_slow(CHIPS, except_for=[90]))
def test_compiles_without_spills(chip, tmp_path):
    target = f"-gencode=arch=compute_{chip},code=sm_{chip}"
    everything = tmp_path / "all.cu"
    everything.write_text("\n".join(f'#include "{source}"' for source in list_sources()))
    command = [NVCC, "-std=c++17", "-O3", "-Xptxas=-v", target, "-cubin", str(everything)]
    process = subprocess.run(
        [*command, "-o", str(tmp_path / "cubin")], capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    stacks = re.findall(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes", process.stderr
    )
    assert len(stacks) == 3 and set(stacks) == {("0", "0", "0")}


@pytest.mark.parametrize(
    ("tokens", "k", "experts"),
    [(0, 2, 4), (1, 1, 1), slow(1100, 2, 5), slow(700, 8, 300), (9, 4, 1024)],
)
def test_expert_order(library, tokens, k, experts):
    chosen = torch.randint(0, experts, (tokens, k), generator=make_generator(3), device="cpu")
    chosen = chosen.to(torch.int32).to(DEVICE)
    expected = expert_order.run_reference_order(chosen, experts)
    for actual, exact in zip(
        expert_order.launch_order_cuda(chosen, experts), expected, strict=True
    ):
        assert actual.dtype == torch.int32 and torch.equal(actual, exact)


def test_a_config_reaches_every_function(library, monkeypatch):
    """But for the probe, by which the library is tried when it is loaded."""
    names = {"megaframe_probe"}
    sources = "".join(source.read_text() for source in list_sources())
    for function in ("call", "count"):
        ask = getattr(cuda_library, function)
        monkeypatch.setattr(
            cuda_library, function, lambda name, *rest, ask=ask: names.add(name) or ask(name, *rest)
        )
    implementations = expert_order.ORDER.implementations
    on_any_device = replace(implementations["cuda"], refuses=refuse_nothing)
    monkeypatch.setitem(implementations, "cuda", on_any_device)
    config = RunConfig(model={"moe": {"experts": 4}}, kernels={"experts": "cuda"})
    chosen = torch.tensor([[0, 2], [1, 0]], dtype=torch.int32, device=DEVICE)
    order = make_kernels(config, torch.device(DEVICE)).find("expert_order", chosen, 4)
    order(chosen, 4)
    assert names == set(re.findall(r"^MEGAFRAME_EXPORT \w+ (\w+)\(", sources, re.MULTILINE))


@pytest.mark.parametrize("stranger", [-1, 5, 4096])
def test_an_order_leads_to_choices_whatever_was_chosen(library, stranger):
    chosen = (
        torch.randint(0, 5, (40, 2), generator=make_generator(3), device="cpu").int().to(DEVICE)
    )
    chosen[3, 1] = chosen[30, 0] = stranger
    with deterministic():
        order, places, ends = expert_order.launch_order_cuda(chosen, 5)
    assert ((order >= 0) & (order < 80)).all() and ((places >= 0) & (places < 80)).all()
    assert ends[-1] == 78


def make_compiler(folder, *lines):
    """Create an nvcc that prints these lines and fails; return its CUDA folder."""
    nvcc = folder / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text("\n".join(("#!/bin/sh", *(f"echo '{line}'" for line in lines), "exit 1\n")))
    nvcc.chmod(0o755)
    return str(folder)


def test_a_build_is_of_its_compiler_and_of_its_processor(tmp_path, monkeypatch):
    paths = set()
    for version in ("12.8", "13.0"):
        monkeypatch.setenv("CUDA_HOME", make_compiler(tmp_path / version, version))
        for processor in ("x86_64", "aarch64"):
            monkeypatch.setattr("platform.machine", lambda name=processor: name)
            paths.add(find_cached_library(90))
    assert len(paths) == 4


def test_a_fatal_complaint_is_told(tmp_path, monkeypatch):
    complaint = "nvcc fatal   : Unsupported gpu architecture"
    monkeypatch.setenv("CUDA_HOME", make_compiler(tmp_path, "nvcc warning : old", complaint))
    with pytest.raises(BuildError, match=complaint):
        build(tmp_path / "library.so", (1,))


def test_what_stands_in_the_way_is_one_line(tmp_path):
    path = tmp_path / "library.so"
    with pytest.raises(BuildError, match="nvcc failed"):
        build(path, (1,))
    assert not path.exists() and not list(tmp_path.iterdir())
    reason = cuda_library.explain_missing_library()
    assert (reason is None) == (DEVICE == "cuda") and "\n" not in str(reason)
    path.write_bytes(b"not a library")
    with pytest.raises(BuildError, match="do not load"):
        cuda_library.load(path)
