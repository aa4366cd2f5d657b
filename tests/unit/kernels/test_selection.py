"""The choice of implementations, the reasons why others are not chosen, and the tolerance."""

import json
import sys

import pytest
import torch
import triton
from kernel_exactness import assert_close, make_random
from megaframe_kernels import installed, selection
from megaframe_kernels.kernel import REFERENCE, KernelError
from megaframe_kernels.registry import KERNELS
from megaframe_kernels.selection import TABLE, KernelChoice, read_chip_name, select


def test_the_table_names_what_exists():
    for kernels in json.loads(TABLE.read_text()).values():
        assert set(kernels) <= set(KERNELS)
        for name, order in kernels.items():
            assert set(order) <= set(KERNELS[name].implementations) | {REFERENCE}
            assert len(set(order)) == len(order)


def test_every_kernel_has_a_choice_and_says_what_is_absent():
    choices = select(KERNELS)
    assert set(choices) == set(KERNELS)
    if not torch.cuda.is_available():
        assert choices["attention"].active == "triton"
        assert choices["attention"].absent["cudnn"] == "torch sees no GPU"
        assert choices["scaled_product"].active == REFERENCE


def test_what_is_refused_goes_to_the_next_and_at_last_to_the_reference():
    choice = select(KERNELS)["norm"]
    x, gain = make_random(2, 8), make_random(8)
    assert choice.find(x, gain) == KERNELS["norm"].implementations["triton"].run
    assert choice.find(x.double(), gain) == KERNELS["norm"].implementations["torch"].run
    router = select(KERNELS)["router"]
    assert router.find(x.double(), 2) == KERNELS["router"].reference
    assert_close(KERNELS["router"], router(x, 2)[0], router(x.double(), 2)[0], 8, "weights")


def test_an_override_runs_or_is_an_error():
    x, gain = make_random(2, 8), make_random(8)
    choice = select(KERNELS, {"norm": "torch"})["norm"]
    assert choice.find(x, gain) == KERNELS["norm"].implementations["torch"].run
    assert select(KERNELS, {"norm": REFERENCE})["norm"].find(x, gain) == KERNELS["norm"].reference
    choice = select(KERNELS, {"norm": "triton"})["norm"]
    with pytest.raises(KernelError, match=r"norm=triton cannot run here: .*float64"):
        choice(x.double(), gain.double())
    if not torch.cuda.is_available():
        with pytest.raises(KernelError, match=r"attention=cudnn cannot run here: torch"):
            select(KERNELS, {"attention": "cudnn"})


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"nrom": "triton"}, "did you mean norm"),
        ({"norm": "tritno"}, "did you mean triton"),
        ({"norm": "cudnn"}, "valid are triton, torch, liger, reference"),
    ],
)
def test_an_override_that_names_nothing_is_told_what_does(overrides, message):
    with pytest.raises(KernelError, match=message):
        select(KERNELS, overrides)


def test_a_measured_chip_has_its_own_order(tmp_path, monkeypatch):
    table = tmp_path / "choices.json"
    table.write_text(json.dumps({"unmeasured": {"norm": ["triton"]}, "h200": {"norm": ["torch"]}}))
    monkeypatch.setattr(selection, "TABLE", table)
    assert select(KERNELS, chip="h200")["norm"].active == "torch"
    assert select(KERNELS, chip="h200")["rotary"].active == REFERENCE
    assert select(KERNELS, chip="another")["norm"].active == "triton"
    assert read_chip_name() == "cpu" or torch.cuda.is_available()


def test_the_unrelated_package_apex_is_told_from_nvidias(tmp_path, monkeypatch):
    def reason(*files):
        for file in files:
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / file).touch()
        for cached in (installed._find_folder, installed.check_apex):
            cached.cache_clear()
        sys.path_importer_cache.clear()
        return installed.check_apex()

    monkeypatch.syspath_prepend(str(tmp_path))
    assert "not installed" in reason()
    assert "not NVIDIA's" in reason("apex/__init__.py")
    assert "without its CUDA extensions" in reason("apex/multi_tensor_apply/__init__.py")
    assert reason("amp_C.py") is None
    for cached in (installed._find_folder, installed.check_apex):
        cached.cache_clear()


def test_a_triton_that_is_too_old_is_named(monkeypatch):
    assert installed.check_triton((3, 5)) is None
    monkeypatch.setattr(triton, "__version__", "3.5.1+gitbfeb0668")  # not a released version
    assert installed.check_triton((3, 5)) is None
    assert "3.6 does" in installed.check_triton((3, 6))
    assert "does not compile it; 99.0 does" in installed.check_triton((99, 0))


def test_the_tolerance_is_that_of_the_type_and_of_the_sum():
    norm = KERNELS["norm"]
    assert norm.compute_tolerance(torch.float32, 1) == norm.constant * 2 * 2**-23
    assert norm.compute_tolerance(torch.bfloat16, 10**4) == norm.constant * (2**-7 + 100 * 2**-23)


def test_a_choice_is_a_plain_value():
    norm = KERNELS["norm"]
    assert KernelChoice(norm, (), {}).active == REFERENCE
