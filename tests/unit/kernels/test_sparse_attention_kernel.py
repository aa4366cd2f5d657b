"""Attention to the latents of chosen keys against the same over gathered latents in fp64: outputs,
log-sum-exps, shares and gradients, with queries that see all that is chosen, some of it or nothing.

`megaframe.ops.latent_attention`, its plain code, is compared with the same reference.
"""

import math

import pytest
import torch
from kernel_exactness import DTYPES, assert_close, check, make_generator, make_random
from megaframe_kernels.sparse_attention import chosen_latents, launches
from tolerances import assert_near

from megaframe.ops import latent_attention
from megaframe.ops.kernel_dispatch import NO_KERNELS

pytestmark = pytest.mark.numeric


def draw_places(queries, keys, chosen, blind=()):
    """Return distinct keys of each query, of which early queries see few and `blind` ones none."""
    places = torch.stack(
        [torch.randperm(keys, generator=make_generator(q), device="cpu") for q in range(queries)]
    )[:, :chosen].int()
    seen = torch.arange(chosen, device="cpu") <= torch.arange(queries, device="cpu")[:, None]
    seen[list(blind)] = False
    return torch.where(seen, places, -1)


def make_arguments(shape, dtype=torch.float32, blind=()):
    """Return queries, latents and places, and options. shape: Q, T, C, H, width, value_width."""
    queries, keys, chosen, heads, width, values = shape
    query = make_random(queries, heads, width, dtype=dtype).requires_grad_()
    latents = make_random(keys, width, dtype=dtype, seed=1).requires_grad_()
    places = draw_places(queries, keys, chosen, blind).to(query.device)
    return (query, latents, places), {"value_width": values, "scale": width**-0.5}


def check_kernel(arguments, options):
    query, _, places = arguments
    length = max(query.shape[-1], places.numel() * query.shape[1])
    sizes = {"length": length, "scale": 0.5, "precision": query.dtype}
    out, lse = check(chosen_latents.KERNEL, "triton", arguments, options, **sizes)
    detached = *(x.detach() for x in arguments), lse.detach()
    check(chosen_latents.SHARES, "triton", detached, options, **sizes)
    return out, lse


@pytest.mark.parametrize("dtype", DTYPES)
def test_kernel_equals_gathered_latents(dtype):
    check_kernel(*make_arguments((9, 50, 37, 3, 12, 8), dtype))


@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1, 2, 1), (5, 17, 16, 16, 48, 32), (3, 40, 33, 18, 21, 4)]
)
def test_odd_sizes(shape):
    check_kernel(*make_arguments(shape))


def test_gradients_are_the_same_in_any_number_of_parts_and_repeatable():
    """Each part of the queries adds to what those before have added."""
    (query, latents, places), options = make_arguments((7, 9, 5, 2, 12, 8))
    tensors = query.detach(), latents.detach(), places
    out, lse = launches.launch_forward(*tensors, **options)
    d_out = make_random(*out.shape, seed=3)

    def differentiate(together):
        return launches.launch_backward(d_out, *tensors, out, lse, **options, together=together)

    whole, again, single = map(differentiate, (7, 7, 3))
    for first, second, other in zip(whole, again, single, strict=True):
        assert torch.equal(first, second)
        assert_near(other, first, 7 * 2 * 5)


def test_a_query_that_sees_nothing():
    (query, latents, places), options = make_arguments((3, 8, 4, 2, 6, 4), blind=(0, 1, 2))
    out, lse = chosen_latents.run_triton(query, latents, places, **options)
    assert torch.equal(out, torch.zeros_like(out)) and bool((lse == -math.inf).all())
    for gradient in torch.autograd.grad(out.sum(), (query, latents)):
        assert torch.equal(gradient, torch.zeros_like(gradient))


@pytest.mark.parametrize("heads", [1, 6])
def test_plain_code_equals_gathered_latents(heads):
    """In fp64 to rounding, a query at a time and several."""
    arguments, options = make_arguments((8, 11, 5, heads, 12, 8), torch.float64, blind=(3,))
    results = []
    for attend in (
        lambda: chosen_latents.run_reference(*arguments, **options),
        lambda: latent_attention.attend_to_latents(NO_KERNELS, *arguments, **options),
    ):
        out, lse = attend()
        gradients = torch.autograd.grad(out.square().sum(), arguments[:2])
        results.append((out, lse.exp(), *gradients))
    detached = *(x.detach() for x in arguments), lse
    shares = latent_attention.sum_shares(NO_KERNELS, *detached, **options)
    expected = chosen_latents.run_reference_shares(*detached, **options)
    for first, second in (*zip(*results, strict=True), (expected, shares)):
        assert_near(second, first, 8 * heads * 12)


def test_plain_code_of_narrow_types_sums_in_fp32():
    arguments, options = make_arguments((8, 11, 5, 3, 12, 8), torch.bfloat16)
    exact = [x.detach().double() if x.is_floating_point() else x for x in arguments]
    out, lse = latent_attention.attend_to_latents(NO_KERNELS, *arguments, **options)
    expected, _ = chosen_latents.run_reference(*exact, **options)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    assert_close(chosen_latents.KERNEL, out.detach(), expected, 12, "output", 0.5)


@pytest.mark.parametrize(
    ("shape", "dtype", "reason"),
    [
        ((2, 2, 1, 1, 12, 8), torch.float64, "float64"),
        ((2, 2, 1, 1, 8, 8), torch.float32, "only scored"),
        ((2, 2, 1, 1, 264, 257), torch.float32, "257"),
        ((2, 2, 1, 1, 520, 513), torch.bfloat16, "513"),
    ],
)
def test_what_does_not_fit_is_refused(shape, dtype, reason):
    arguments, options = make_arguments(shape, dtype)
    triton = chosen_latents.KERNEL.implementations["triton"]
    assert reason in triton.explain_refusal(*arguments, **options)
