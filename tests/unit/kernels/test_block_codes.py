"""Values of codes by Triton and by bitsandbytes: exact but for the roundings of two or three
products, whatever the blocks are, and nothing is written beside them.

Tests `megaframe_kernels.block_codes`.
"""

from dataclasses import replace

import pytest
import torch
from kernel_exactness import DEVICE, DTYPES, make_generator, make_random
from megaframe_kernels import installed
from megaframe_kernels.installed import require_nothing
from megaframe_kernels.kernel import KernelError
from megaframe_kernels.registry import KERNELS
from megaframe_kernels.selection import select
from parity_runs import FEW, run
from tolerances import assert_near

from megaframe.ops.block_codec import compute_levels

EDGE = 64
"""Elements before and after the values, which nobody may write."""


def make_operands(kind, block, blocks, group=None, dtype=torch.float32):
    """Return arguments of the reference, whose values and codes are inside of larger buffers."""
    per_byte, length = (2 if kind == "nf4" else 1), block * blocks
    generator = make_generator(block * blocks)

    def draw_bytes(count, least, end):
        numbers = torch.randint(least, end, (count + 1,), generator=generator, device="cpu")
        return numbers.to(torch.uint8).to(DEVICE)[1:]  # begins where no word does

    whole = torch.full((length + 2 * EDGE,), 7.0, dtype=dtype)
    scales = make_random(blocks // (group or 1)).abs()
    scales[:1] = 0.0
    shares = None if group is None else draw_bytes(blocks, 1, 256)
    levels = torch.tensor(compute_levels(kind))
    codes = draw_bytes(length // per_byte, 0, 256 if per_byte == 2 else 255)
    return whole, (whole[EDGE:-EDGE], codes, levels, scales, shares)


def compare(name, operands, block):
    """Compare an implementation with the reference in fp64: the type of the values is rounded to,
    and before that their share, their absmax and themselves are rounded to fp32."""
    values, codes, levels, scales, shares = operands
    truth = torch.empty_like(values, dtype=torch.float64)
    exact = truth, codes, levels.double(), scales.double(), shares
    KERNELS["decode_blocks"].reference(*exact, block=block)
    returned = KERNELS["decode_blocks"].implementations[name].run(*operands, block=block)
    assert returned.data_ptr() == values.data_ptr()
    assert_near(values, truth, 3, size=truth.abs())


@pytest.mark.parametrize(
    ("kind", "block", "blocks", "group"),
    [
        ("nf4", 64, 129, None),
        ("nf4", 48, 6, 3),
        ("nf4", 2, 4100, 5),
        ("nf4", 8192, 2, 1),
        ("int8", 64, 130, 65),
        ("int8", 1, 9, None),
        ("int8", 24, 0, None),
    ],
)
def test_triton_makes_the_values_and_nothing_else(kind, block, blocks, group):
    for dtype in DTYPES:
        whole, operands = make_operands(kind, block, blocks, group, dtype)
        compare("triton", operands, block)
        assert (whole[:EDGE] == 7).all() and (whole[-EDGE:] == 7).all()


def test_what_is_not_finite_stays_so():
    _, operands = make_operands("int8", 4, 3)
    operands[3].copy_(torch.tensor([torch.nan, torch.inf, 1.0]))
    compare("triton", operands, 4)
    assert not operands[0][:8].isfinite().all() and operands[0][8:].isfinite().all()


@pytest.fixture(scope="module")
def functional():
    """The functions of bitsandbytes."""
    how = "needs bitsandbytes: pip install 'megaframe[bitsandbytes]'"
    return pytest.importorskip("bitsandbytes.functional", reason=how)


@pytest.mark.parametrize(
    ("block", "blocks", "group"), [(32, 5, None), (64, 128, 16), (1024, 2, None)]
)
def test_bitsandbytes_makes_the_values(block, blocks, group, functional):
    theirs = functional.get_4bit_type("nf4", device=DEVICE)
    for dtype in DTYPES:
        whole, (values, stored, levels, *scales) = make_operands("nf4", block, blocks, group, dtype)
        assert (theirs - levels).abs().max() < 2e-7
        compare("bitsandbytes", (values, stored, theirs, *scales), block)
        assert (whole[:EDGE] == 7).all() and (whole[-EDGE:] == 7).all()


def test_a_run_with_bitsandbytes_has_the_losses_of_plain_code(functional, monkeypatch):
    """Within what rounding to fp32 allows, of which levels that differ by 2e-7 are a part."""
    adapters = {"rank": 3, "quantize_base": {"block": 32, "absmax_block": 2}}
    model = {"layers": 1, "hidden": 64, "ffn": 64, "adapters": adapters}
    train, calls, dequantize = {**FEW, "precision": "fp32"}, [], functional.dequantize_4bit

    def watched(*arguments, **options):
        calls.append(0)
        return dequantize(*arguments, **options)

    monkeypatch.setattr(functional, "dequantize_4bit", watched)
    with torch.device("cpu"):
        plain, other = (
            run(model, train, kernels={"codes": name}) for name in ("reference", "bitsandbytes")
        )
    assert calls
    terms = 4 * 64 + 37  # of the products of a block, one after the other, up to the loss
    assert_near(torch.tensor(other.losses), torch.tensor(plain.losses), terms, dtype=torch.float32)


@pytest.mark.parametrize(
    ("name", "kind", "block", "dtype", "message"),
    [
        ("triton", "nf4", 3, torch.float32, "of two blocks, which have 3 elements"),
        ("triton", "nf4", 64, torch.float64, "torch.float64 is not one of"),
        ("bitsandbytes", "int8", 64, torch.float32, "codes are of 8 bits"),
        ("bitsandbytes", "nf4", 48, torch.float32, "blocks of 48 are none of 32, 64, "),
        ("bitsandbytes", "nf4", 64, torch.float64, "torch.float64 is not one of"),
    ],
)
def test_what_a_named_implementation_does_not_take_is_said(
    name, kind, block, dtype, message, monkeypatch
):
    kernel = KERNELS["decode_blocks"]
    present = replace(kernel.implementations[name], explain_absence=require_nothing)
    monkeypatch.setitem(kernel.implementations, name, present)
    choice = select({"decode_blocks": kernel}, {"decode_blocks": name})["decode_blocks"]
    _, operands = make_operands(kind, block, 2, dtype=dtype)
    with pytest.raises(KernelError, match=f"decode_blocks={name} cannot run here: .*{message}"):
        choice(*operands, block=block)


def test_an_older_bitsandbytes_is_none(monkeypatch):
    monkeypatch.setattr(installed, "_find_folder", lambda module: installed.Path(module))
    for version, message in (("0.49.2", "bitsandbytes 0.49.2 "), ("0.50.0", None), ("1.2.0", None)):
        monkeypatch.setattr(installed.metadata, "version", lambda name, version=version: version)
        reason = installed.check_bitsandbytes.__wrapped__()
        assert reason is message is None or reason.startswith(message)
