"""Router, permutation and grouped product of mixture-of-experts layers, against fp64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_exactness import (
    DEVICE,
    DTYPES,
    assert_close,
    check,
    deterministic,
    make_generator,
    make_random,
    widen,
)
from megaframe_kernels.experts import (
    expert_order,
    grouped_gradient,
    grouped_product,
    permute,
    router,
)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize(("tokens", "experts", "k"), [(13, 8, 2), (3, 17, 5), (0, 4, 1), (2, 1, 1)])
def test_router(score, normalise, tokens, experts, k):
    logits = make_random(tokens, experts, scale=2.0).requires_grad_()
    bias = make_random(experts, seed=1, scale=0.3)
    options = {"score": score, "normalise": normalise}
    check(router.KERNEL, "triton", (logits, k, bias), options, experts, scale=0.05)
    check(router.KERNEL, "triton", (logits, k), options, experts, scale=0.05)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_router_of_strided_low_precision_logits_with_ties(dtype):
    logits = (make_random(9, 24, scale=2.0).round() / 2).to(dtype)[:, ::2].requires_grad_()
    check(router.KERNEL, "triton", (logits, 4), {}, 12)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_nan_is_passed_on_and_chooses_experts_that_are_there(score):
    logits = make_random(9, 11)
    logits[2] = torch.nan
    logits[5, 7] = torch.nan
    expected, chosen = router.run_reference(logits, 4, score=score)
    weights, indices = router.run_triton(logits, 4, score=score)
    assert torch.equal(indices, chosen) and torch.equal(weights.isnan(), expected.isnan())
    assert (
        weights[2].isnan().all() and weights[5].isnan().any() and weights.isnan().any(1).sum() == 2
    )


def order_of(tokens, k, experts, seed=0, skipped=()):
    """Return random choices of experts, of which those in `skipped` get none, and their order."""
    allowed = torch.tensor([e for e in range(experts) if e not in skipped], device="cpu")
    draws = torch.rand(tokens, len(allowed), generator=make_generator(seed), device="cpu")
    chosen = allowed[draws.argsort(1)[:, :k]].to(torch.int32).to(DEVICE)
    return chosen, expert_order.ExpertOrder(*expert_order.run_reference_order(chosen, experts))


@settings(max_examples=20)
@given(
    seed=st.integers(0, 10**6),
    tokens=st.integers(0, 300),
    k=st.integers(1, 3),
    experts=st.integers(3, 40),
)
def test_expert_order_of_random_choices(seed, tokens, k, experts):
    chosen, order = order_of(tokens, k, experts, seed)
    actual = expert_order.launch_order(chosen, experts)
    for output, exact in zip(actual, (order.order_P, order.places_TK, order.ends_E), strict=True):
        assert output.dtype == torch.int32 and torch.equal(output, exact)


@pytest.mark.parametrize("stranger", [-1, 5, 4096])
def test_an_order_leads_to_choices_whatever_was_chosen(stranger):
    chosen, order = order_of(40, 2, 5)
    chosen[3, 1] = chosen[30, 0] = stranger
    with deterministic():
        got, places, ends = expert_order.launch_order(chosen, 5)
    assert ((got >= 0) & (got < 80)).all() and ((places >= 0) & (places < 80)).all()
    assert ends[-1] == 78 and (order.ends_E - ends).max() <= 2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "width"), [(11, 33), (0, 16), (1, 1100)])
def test_permute_and_unpermute(dtype, tokens, width):
    _, order = order_of(tokens, 2, 5)
    x = make_random(tokens, width, dtype=dtype).requires_grad_()
    check(permute.PERMUTE, "triton", (x, order.order_P, order.places_TK), length=2)
    y = make_random(2 * tokens, width, dtype=dtype).requires_grad_()
    check(permute.UNPERMUTE, "triton", (y, order.order_P, order.places_TK), {}, 2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_grouped_product(dtype):
    _, order = order_of(37, 2, 6, skipped=(0, 3))
    x = make_random(74, 40, dtype=dtype).requires_grad_()
    weights = make_random(6, 21, 40, dtype=dtype, seed=1).requires_grad_()
    check(grouped_product.KERNEL, "triton", (x, weights, order.ends_E), {}, 40, 74, scale=4.0)


@pytest.mark.parametrize(("tokens", "outputs", "inputs"), [(0, 8, 8), (1, 1, 1), (140, 150, 70)])
def test_grouped_product_of_odd_sizes(tokens, outputs, inputs):
    _, order = order_of(tokens, 1, 3)
    x = make_random(tokens, inputs).requires_grad_()
    weights = make_random(3, inputs, outputs, seed=1).transpose(1, 2).detach().requires_grad_()
    check(
        grouped_product.KERNEL, "triton", (x, weights, order.ends_E), {}, inputs, tokens, scale=4.0
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("add", [False, True])
def test_gradients_of_experts_in_higher_precision(dtype, add):
    _, order = order_of(37, 2, 6, skipped=(0, 3))
    d_y, x = make_random(74, 21, dtype=dtype), make_random(74, 40, dtype=dtype, seed=1)
    arguments = (make_random(6, 21, 40, seed=2), d_y, x, order.ends_E, add)
    check(grouped_gradient.KERNEL, "triton", arguments, {}, 74, scale=4.0)


@pytest.mark.parametrize("name", ["triton", "torch"])
@pytest.mark.parametrize("ends", [[3, 7], [33, 33], [0, 0], [0, 130]])
def test_places_beyond_the_last_expert_are_zero(name, ends):
    x = make_random(130, 16, dtype=torch.bfloat16).requires_grad_()
    weights = make_random(2, 8, 16, dtype=torch.bfloat16, seed=1).requires_grad_()
    arguments = (x, weights, torch.tensor(ends, dtype=torch.int32))
    with deterministic():
        y = grouped_product.KERNEL.implementations[name].run(*arguments)
        d_x, d_weights = torch.autograd.grad(y, (x, weights), torch.ones_like(y))
    assert (y[ends[-1] :] == 0).all() and (d_x[ends[-1] :] == 0).all()
    expected = grouped_product.run_reference(*(widen(t) for t in arguments))
    assert_close(grouped_product.KERNEL, y.detach(), expected.detach(), 16, "product", scale=4.0)
    assert torch.isfinite(d_weights).all()


@pytest.mark.parametrize(
    ("shape", "change", "taken"),
    [
        ((10, 16), lambda x: x, True),
        ((10, 24), lambda x: x[:, :16], True),
        ((2, 24, 16), lambda w: w.transpose(1, 2), True),
        ((10, 12), lambda x: x, False),
        ((10, 20), lambda x: x[:, :16], False),
        ((10, 24), lambda x: x[:, 4:20], False),
        ((10, 32), lambda x: x[:, ::2], False),
        ((1, 16), lambda x: x.expand(10, -1), False),
        ((2, 12, 16), lambda w: w, False),
    ],
)
def test_torch_is_given_strides_of_whole_16_bytes(shape, change, taken):
    reason = grouped_gradient.refuse_strides_for_torch(
        change(make_random(*shape, dtype=torch.bfloat16))
    )
    assert (reason is None) == taken


def test_gradients_are_bitwise_repeatable():
    _, order = order_of(50, 4, 8)
    x, weights = (
        make_random(200, 16).requires_grad_(),
        make_random(8, 24, 16, seed=1).requires_grad_(),
    )

    def gradients():
        y = grouped_product.run_triton(x, weights, order.ends_E)
        return torch.autograd.grad(y.square().sum(), (x, weights))

    for first, other in zip(gradients(), gradients(), strict=True):
        assert torch.equal(first, other)
