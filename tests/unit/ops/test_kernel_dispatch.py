"""What a run says about its kernels: which it uses and why not faster ones, what they refuse, and
errors where it would be slow without a word."""

import builtins
import json

import pytest
import torch

from megaframe.config import RunConfig
from megaframe.errors import UserError
from megaframe.ops.attention_kernel import attend_by_kernel
from megaframe.ops.attention_mask import AttentionMask, SequenceMask
from megaframe.ops.fp8 import check_fp8
from megaframe.ops.kernel_dispatch import FAMILIES, NO_KERNELS, make_kernels

CPU, GPU = torch.device("cpu"), torch.device("cuda")
MOE = {"moe": {"experts": 4, "top_k": 2}}
without_gpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="says of a machine without a GPU what it lacks"
)


def report(device, kernels=None, compiler=None, **sections):
    config = RunConfig(kernels=kernels or {}, **sections)
    return list(make_kernels(config, device, compiler).report())


def test_plain_code_on_a_cpu_is_one_line():
    (line,) = report(CPU)
    assert line.startswith("kernels: plain code, because the device is a cpu")


@without_gpu
def test_on_a_gpu_every_kernel_that_a_step_calls_is_named_with_what_is_faster():
    head, *lines = report(GPU)
    assert head == "kernels, and why not faster ones:"
    families = [line.split()[0] for line in lines]
    assert families == ["elementwise:", "attention:", "loss:", "update:"]
    assert lines[0] == "  elementwise: norm, activation, rotary, qkv_rotary triton"
    assert "attention triton (not cudnn: torch sees no GPU; not torch-flash" in lines[1]
    assert "flash-attn is not installed" in lines[1]
    mamba = {"blocks": [{"mixer": {"kind": "mamba2", "heads": 4, "head_dim": 8}}]}
    adapted = {**MOE, **mamba, "adapters": {"quantize_base": {"block": 32}}}
    latent = {"query_rank": 8, "kv_rank": 8, "head_dim": 4, "rotary_dim": 4, "value_dim": 8}
    absorbed = {
        "latent": latent,
        "indexer": {"heads": 4, "head_dim": 8, "top_k": 3, "absorb": True},
        "norm": "rmsnorm",
    }
    reports = report(GPU, model=adapted, train={"fp8": "row"}), report(GPU, model=absorbed)
    named = {line.split()[0].rstrip(":") for lines in reports for line in lines[1:]}
    assert named == {*FAMILIES}


def test_the_config_is_a_reason():
    lines = report(
        GPU,
        kernels={"loss": "reference", "attention": "triton"},
        compiler=lambda function: function,
        train={"compile": "inductor"},
    )
    assert "  elementwise: plain code, because train.compile=inductor compiles it" in lines
    assert "  loss: plain code, because kernels.loss=reference" in lines
    (attention,) = (line for line in lines if line.startswith("  attention:"))
    assert "not cudnn: triton is requested by name" in attention
    plain = report(GPU, kernels=dict.fromkeys(FAMILIES, "reference"))
    assert "  update: plain code, because kernels.update=reference" in plain
    one = report(CPU, kernels={"update": "torch"})
    assert any("square_sum torch (not triton: torch is requested by name)" in x for x in one)
    assert any(line.startswith("  loss: plain code, because the device is a cpu") for line in one)


def test_the_record_is_that_of_the_report():
    config = RunConfig(kernels={"loss": "reference"})
    record = json.loads(json.dumps(make_kernels(config, GPU).record()))
    assert record["norm"] == {"uses": "triton", "not": {}}
    assert "flash-attn" in record["attention"]["not"]
    assert record["loss"] == {"uses": "reference", "why": "kernels.loss=reference"}


# -------------------------------------------------------------------------------- without a library


@pytest.fixture(params=[ImportError("No module named 'triton'"), AttributeError("no knobs")])
def no_library(request, monkeypatch):
    """The kernel library raises an error when it is imported."""
    real = builtins.__import__

    def importing(name, *arguments, **options):
        if name.startswith("megaframe_kernels"):
            raise request.param
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", importing)
    return str(request.param)


def test_a_gpu_without_the_library_is_an_error_that_names_the_way_out(no_library):
    with pytest.raises(UserError) as error:
        make_kernels(RunConfig(), GPU)
    text = str(error.value)
    assert no_library in text and "pip install triton" in text
    keys = text.partition("plain code: ")[2].split()
    assert keys[0] == "kernels.elementwise=reference" and len(keys) == 4
    section = dict(key.removeprefix("kernels.").split("=") for key in keys)
    assert list(make_kernels(RunConfig(kernels=section), GPU).report())
    with pytest.raises(UserError, match=r"kernels\.experts=reference"):
        make_kernels(RunConfig(model=MOE), GPU)


def test_a_cpu_needs_the_library_only_for_what_is_named(no_library):
    assert make_kernels(RunConfig(), CPU).list_active() == {}
    for keys in ({"kernels": {"loss": "triton"}}, {"train": {"fp8": "row"}}):
        with pytest.raises(UserError, match=r"needs the library of kernels, which needs Triton"):
            make_kernels(RunConfig(**keys), CPU)


# -------------------------------------------------------------------------------------- refusals


@without_gpu
def test_what_a_kernel_refuses_is_said_once_with_the_reason():
    messages = []
    kernels = make_kernels(RunConfig(model=MOE), GPU, note=messages.append)
    x = torch.ones(2, 8, dtype=torch.float64)
    for _ in range(3):
        kernels.find("norm", x, x[0])
        kernels.find("router", x, 2)
    norm, router = messages
    assert norm.startswith("kernel norm: torch in place of triton") and "torch.float64" in norm
    assert router.startswith("warning: kernel router: reference in place of triton")
    assert "router not triton: torch.float64" in kernels.explain_refusal("router", x, 2)
    assert kernels.explain_refusal("norm", x.float(), x[0].float()) is None


def test_8_bits_on_a_cpu_are_a_warning():
    def warned(**keys):
        config = RunConfig(**keys)
        return check_fp8(config.train, config.kernels, CPU, torch.float32, NO_KERNELS)

    assert warned() is None
    assert "warning: train.fp8=row is emulated on a cpu" in warned(train={"fp8": "row"})
    warning = warned(train={"fp8": "row"}, kernels={"fp8": "reference"})
    assert "runs as the reference" in warning and "kernels.fp8=reference" in warning


@without_gpu
def test_scores_are_bounded_and_have_sinks_in_a_kernel_that_computes_them():
    lines = []
    kernels = make_kernels(RunConfig(), GPU, note=lines.append)
    heads, mask = torch.zeros(1, 4, 2, 16), SequenceMask(AttentionMask(None, None), 1, 4, CPU)
    operands = heads, heads, heads, mask.spans
    found = kernels.find("attention", *operands, scale=1.0, softcap=5.0, sinks_N=torch.zeros(2))
    assert found.__name__ == "run_triton" and not lines
    named = make_kernels(RunConfig(kernels={"attention": "torch"}), GPU)
    with pytest.raises(UserError, match=r"attention=torch cannot run here: .* softcap"):
        attend_by_kernel(named, heads, heads, heads, mask, 1.0, 5.0)
