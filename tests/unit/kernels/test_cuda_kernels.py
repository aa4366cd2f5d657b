"""The CUDA C++ kernels: compiled for every chip, and run on a CPU that emulates a GPU."""

import re
import subprocess
from pathlib import Path

import pytest
import torch
from kernel_exactness import DEVICE, assert_close, deterministic, generator, rand
from megaframe_kernels import cuda_library, permute, scattered
from megaframe_kernels.cuda_build import CHIPS, BuildError, build, cached, find_nvcc, sources
from tolerances import assert_near

try:
    NVCC = find_nvcc()
except BuildError as error:
    pytest.skip(str(error), allow_module_level=True)

OPTIONS = {"lr": 0.01, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "step": 3}


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    """Compile the same sources for the CPU, with `emulated_gpu.h` in place of CUDA's runtime."""
    folder = tmp_path_factory.mktemp("emulated")
    everything, library = folder / "all.cc", folder / "kernels.so"
    everything.write_text("\n".join(f'#include "{s}"' for s in sources() if s.stem != "probe"))
    command = [NVCC, "-std=c++20", "-O1", "-shared", "-Xcompiler=-fPIC,-pthread", "-x", "c++"]
    command += ["-include", str(Path(__file__).with_name("emulated_gpu.h")), str(everything)]
    subprocess.run([*command, "-o", str(library)], check=True)
    return cuda_library.load(library)


@pytest.fixture
def library(request, monkeypatch):
    """Use the real library if there is a GPU, otherwise the emulated one."""
    if DEVICE == "cpu":
        emulated = request.getfixturevalue("emulated")
        monkeypatch.setattr(cuda_library, "_find", lambda: emulated)


@pytest.mark.quick(when=lambda chip: chip == 90)
@pytest.mark.parametrize("chip", CHIPS)
def test_compiles_without_spills(chip, tmp_path):
    target = f"-gencode=arch=compute_{chip},code=sm_{chip}"
    everything = tmp_path / "all.cu"
    everything.write_text("\n".join(f'#include "{source}"' for source in sources()))
    command = [NVCC, "-std=c++17", "-O3", "-Xptxas=-v", target, "-cubin", str(everything)]
    done = subprocess.run([*command, "-o", str(tmp_path / "cubin")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    stacks = re.findall(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes", done.stderr
    )
    assert len(stacks) == 5 and set(stacks) == {("0", "0", "0")}


def parameters(lengths, grad, copy, unaligned):
    """Return lists of scattered tensors. unaligned: each starts one element after an aligned
    address."""

    def make(length, seed, dtype=torch.float32, positive=False):
        values = rand(length + unaligned, seed=seed).to(dtype)
        return (values.square() if positive else values)[unaligned:]

    weights = [make(n, 4 * i) for i, n in enumerate(lengths)]
    grads = [make(n, 4 * i + 1, grad) for i, n in enumerate(lengths)]
    means = [make(n, 4 * i + 2) for i, n in enumerate(lengths)]
    squares = [make(n, 4 * i + 3, positive=True) for i, n in enumerate(lengths)]
    copies = [] if copy is None else [w.to(copy) for w in weights]
    return weights, grads, means, squares, copies


def copied(lists, change=torch.Tensor.clone):
    return [[change(t) for t in tensors] for tensors in lists]


@pytest.mark.parametrize(
    ("lengths", "grad", "copy", "unaligned"),
    [
        ([3, 0, 16384, 1, 16385, 40000], torch.float32, torch.bfloat16, 0),
        ([7, 260], torch.bfloat16, torch.float16, 1),
        ([5, 2050], torch.float16, None, 0),
        ([n % 5 for n in range(130)], torch.float32, None, 0),
    ],
)
@pytest.mark.parametrize("divisor", [None, 4.0])
def test_scattered_adamw(library, lengths, grad, copy, unaligned, divisor):
    lists = parameters(lengths, grad, copy, unaligned)
    options = {**OPTIONS, "divisor": None if divisor is None else torch.tensor(divisor)}
    want = scattered.reference_adamw(*copied(lists, torch.Tensor.double), **options)
    mine = copied(lists) if not unaligned else lists
    got = scattered.run_cuda_adamw(*mine, **options)
    for one, true in zip(got, want, strict=True):
        assert_close(scattered.ADAMW, one, true, 1, "state")


def test_a_beta_close_to_1_loses_no_digits(library):
    lists = parameters([70], torch.float32, None, 0)
    for moment in (*lists[2], *lists[3]):
        moment.zero_()
    options = {**OPTIONS, "beta1": 0.99, "beta2": 0.9999, "step": 1}
    want = scattered.reference_adamw(*copied(lists, torch.Tensor.double), **options)
    for one, true in zip(scattered.run_cuda_adamw(*lists, **options), want, strict=True):
        assert_close(scattered.ADAMW, one, true, 1, "state")


def test_a_skipped_step_changes_nothing(library):
    lists = parameters([10, 700], torch.float32, None, 0)
    before = copied(lists)
    scattered.run_cuda_adamw(*lists, **OPTIONS, skip=torch.tensor(1.0))
    for old, new in zip(before, lists, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(old, new, strict=True))
    scattered.run_cuda_adamw(*lists, **OPTIONS, skip=torch.tensor(0.0))
    assert not torch.equal(before[0][0], lists[0][0])


@pytest.mark.parametrize("name", ["triton", "torch"])
def test_other_implementations_of_scattered_adamw(name):
    lists = parameters([3, 70, 1], torch.float32, torch.bfloat16, 0)
    want = scattered.reference_adamw(*copied(lists, torch.Tensor.double), **OPTIONS)
    got = scattered.ADAMW.implementations[name].run(*copied(lists), **OPTIONS)
    for one, true in zip(got, want, strict=True):
        assert_close(scattered.ADAMW, one, true, 1, "state")


@pytest.mark.quick(when=lambda dtype: dtype == torch.bfloat16)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scattered_square_sum(library, dtype):
    scale = 1e25 if dtype == torch.float32 else 100.0
    whole = rand(50000, scale=scale).to(dtype)
    tensors = [whole[:5], whole[5:40], whole[40:40], whole[48:16432], whole[16433:]]
    want = scattered.reference_square_sum(tensors)
    got = scattered.run_cuda_square_sum(tensors)
    assert_near(got, want, len(whole))
    assert_near(scattered.run_triton_square_sum(tensors), want, len(whole))
    assert torch.equal(got, scattered.run_cuda_square_sum(tensors))
    many = list(whole[: 70 * 3].split(3))  # more than one launch takes
    want = scattered.reference_square_sum(many)
    assert_near(scattered.run_cuda_square_sum(many), want, 70 * 3)
    whole[30000] = float("nan")
    assert scattered.run_cuda_square_sum(tensors).isnan()


@pytest.mark.parametrize(
    ("tokens", "k", "experts"), [(0, 2, 4), (1, 1, 1), (1100, 2, 5), (700, 8, 300), (9, 4, 1024)]
)
def test_expert_order(library, tokens, k, experts):
    chosen = torch.randint(0, experts, (tokens, k), generator=generator(3), device="cpu")
    chosen = chosen.to(torch.int32).to(DEVICE)
    want = permute.reference_order(chosen, experts)
    for mine, true in zip(permute.launch_order_cuda(chosen, experts), want, strict=True):
        assert mine.dtype == torch.int32 and torch.equal(mine, true)


@pytest.mark.parametrize("stranger", [-1, 5, 4096])
def test_an_order_leads_to_choices_whatever_was_chosen(library, stranger):
    chosen = torch.randint(0, 5, (40, 2), generator=generator(3), device="cpu").int().to(DEVICE)
    chosen[3, 1] = chosen[30, 0] = stranger
    with deterministic():
        order, places, ends = permute.launch_order_cuda(chosen, 5)
    assert ((order >= 0) & (order < 80)).all() and ((places >= 0) & (places < 80)).all()
    assert ends[-1] == 78


def test_an_address_on_another_device_is_refused(monkeypatch):
    monkeypatch.setattr(scattered, "_cuda_refuses", lambda *_: None)
    lists = parameters([3], torch.float32, None, 0)
    refuses = scattered.ADAMW.implementations["cuda"].refuses
    assert refuses(*lists, divisor=torch.tensor(2.0, device=DEVICE)) is None
    assert "on meta" in refuses(*lists, skip=torch.tensor(0.0, device="meta"))


def compiler(folder, *lines):
    """Create an nvcc that prints these lines and fails; return its CUDA folder."""
    nvcc = folder / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text("\n".join(("#!/bin/sh", *(f"echo '{line}'" for line in lines), "exit 1\n")))
    nvcc.chmod(0o755)
    return str(folder)


def test_a_build_is_of_its_compiler_and_of_its_processor(tmp_path, monkeypatch):
    found = set()
    for version in ("12.8", "13.0"):
        monkeypatch.setenv("CUDA_HOME", compiler(tmp_path / version, version))
        for processor in ("x86_64", "aarch64"):
            monkeypatch.setattr("platform.machine", lambda name=processor: name)
            found.add(cached(90))
    assert len(found) == 4


def test_a_fatal_complaint_is_told(tmp_path, monkeypatch):
    complaint = "nvcc fatal   : Unsupported gpu architecture"
    monkeypatch.setenv("CUDA_HOME", compiler(tmp_path, "nvcc warning : old", complaint))
    with pytest.raises(BuildError, match=complaint):
        build(tmp_path / "library.so", (1,))


def test_what_stands_in_the_way_is_one_line(tmp_path):
    path = tmp_path / "library.so"
    with pytest.raises(BuildError, match="nvcc failed"):
        build(path, (1,))
    assert not path.exists() and not list(tmp_path.iterdir())
    reason = cuda_library.missing_library()
    assert (reason is None) == (DEVICE == "cuda") and "\n" not in str(reason)
    path.write_bytes(b"not a library")
    with pytest.raises(BuildError, match="do not load"):
        cuda_library.load(path)
