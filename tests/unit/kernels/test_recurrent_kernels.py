"""Recurrent mixers against the passing of a state from token to token in fp64: outputs, final
states and all gradients, with documents, initial states, and decays of heads and of channels.

`tests/parity/test_kernels.py` compares whole steps: `megaframe.model.recurrent_kernels`.
"""

import pytest
import torch
from kernel_exactness import DTYPES, check, make_random
from megaframe_kernels.recurrent import recurrence
from slow_cases import slow
from torch.nn import functional

pytestmark = pytest.mark.numeric


def make_arguments(shape, dtype, channels=False, initial=False, begins=(), strongest=1.0, fall=1.0):
    """Return arguments of the delta rule. shape: B, S, G, H, K and V; begins: of documents; fall:
    about the logarithm of a decay."""
    batch, length, groups, heads, width, values = shape
    query = make_random(batch, length, groups, width)
    key = functional.normalize(make_random(batch, length, groups, width, seed=1), dim=-1)
    value = make_random(batch, length, heads, values, seed=2)
    strength = strongest * make_random(batch, length, heads, seed=3).sigmoid()
    falls = -fall * make_random(batch, length, heads, width if channels else 1, seed=4).abs()
    documents = torch.zeros(batch, length, dtype=torch.int32)
    documents[:, list(begins)] = 1
    state = make_random(batch, heads, width, values, seed=5).requires_grad_() if initial else None
    tensors = *(x.to(dtype) for x in (query * width**-0.5, key, value)), strength, falls
    leaves = [x.detach().requires_grad_() for x in tensors]
    return *leaves, documents.cumsum(1, dtype=torch.int32), state


def check_delta_rule(arguments, length=None, scale=0.5):
    length = length or arguments[2].shape[1] * arguments[2].shape[-1]
    options = {"scale": scale, "precision": arguments[0].dtype}
    return check(recurrence.DELTA_RULE, "triton", arguments, None, length, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels", [False, True])
def test_delta_rule(dtype, channels):
    shape = (2, 45, 1, 2, 8, 12)
    check_delta_rule(make_arguments(shape, dtype, channels, True, begins=(7, 31)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_ssd(dtype):
    query, key, value, _, falls, documents, initial = make_arguments(
        (2, 45, 1, 3, 8, 5), dtype, initial=True, begins=(7, 31)
    )
    tensors = query, key, value, falls.detach()[..., 0].requires_grad_(), documents, initial
    options = {"scale": 0.5, "precision": dtype}
    check(recurrence.SSD, "triton", tensors, None, 45 * 8, **options)


ODD = [
    ((1, 1, 1, 1, 1, 1), {}),
    ((1, 16, 2, 2, 16, 16), {}),
    ((3, 17, 1, 1, 17, 33), {"begins": (0, 16)}),
    ((1, 33, 2, 4, 3, 40), {"channels": True, "begins": (1, 2)}),
]


@pytest.mark.parametrize(("shape", "options"), ODD)
def test_odd_sizes(shape, options):
    check_delta_rule(make_arguments(shape, torch.float32, **options))


@pytest.mark.parametrize("channels", [False, slow(True)])
def test_strong_decays_and_reflections(channels):
    """Decays of e^-60 a token are 0 beside others; corrections of strength 2 keep lengths."""
    options = {"strongest": 2.0, "fall": 60.0}
    strong = make_arguments((1, 40, 1, 1, 8, 8), torch.float32, channels, True, **options)
    # A decay is the difference of two sums of logarithms, so its error is that of these sums.
    largest = float(strong[4].detach().unfold(1, 16, 8).sum(-1).abs().max())
    check_delta_rule(strong, int(largest**2))
    weak = make_arguments((1, 40, 1, 1, 8, 8), torch.float32, channels, strongest=2.0, fall=0.01)
    check_delta_rule(weak, 40 * 40 * 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_keys_do_not_cancel(dtype):
    """Powers of the system would be as large as binomial coefficients."""
    query, _, value, _, *others = make_arguments((1, 64, 1, 1, 8, 8), dtype, fall=0.0)
    key = functional.one_hot(torch.zeros(1, 64, 1, dtype=torch.long), 8).to(dtype)
    if dtype == torch.bfloat16:
        # Corrections alternate: as they are rounded, sums of 64 have no exact gradients.
        query, value, others[0] = (x.detach() for x in (query, value, others[0]))
    arguments = query, key, value, torch.full((1, 64, 1), 0.999), *others
    check_delta_rule(arguments, scale=64**0.5)


def test_rows_that_are_not_adjacent():
    arguments = make_arguments((2, 20, 2, 2, 16, 16), torch.float32)
    joint = torch.cat([x.detach() for x in arguments[:3]], -1)
    parts = [x.requires_grad_() for x in joint.split(16, -1)]
    check_delta_rule((*parts, *arguments[3:]))


def test_gradients_are_bitwise_repeatable():
    arguments = make_arguments((1, 40, 1, 2, 8, 8), torch.bfloat16)

    def compute_gradients():
        out, _ = recurrence.run_triton_delta_rule(*arguments)
        return torch.autograd.grad(out.float().square().sum(), arguments[:5])

    for first, second in zip(compute_gradients(), compute_gradients(), strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("dtype", "width", "channels", "reason"),
    [
        (torch.float64, 8, False, "float64"),
        (torch.float32, 136, False, "136"),
        (torch.bfloat16, 264, False, "264"),
        (torch.float32, 72, True, "72 channels"),
    ],
)
def test_what_does_not_fit_is_refused(dtype, width, channels, reason):
    arguments = make_arguments((1, 2, 1, 1, width, 4), dtype, channels)
    refusal = recurrence.DELTA_RULE.implementations["triton"].explain_refusal(*arguments)
    assert reason in refusal
