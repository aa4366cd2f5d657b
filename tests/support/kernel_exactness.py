"""Comparison of a kernel's implementation with its reference in fp64, forward and backward."""

from contextlib import contextmanager

import torch
from megaframe_kernels.kernel import KernelError
from tolerances import assert_within

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def make_random(*shape, dtype=torch.float32, seed=0, scale=1.0):
    """Return normal random numbers of a dtype, the same on every call and every device."""
    numbers = torch.randn(shape, generator=make_generator(seed), device="cpu")
    return (numbers * scale).to(dtype).to(DEVICE)


def make_generator(seed):
    """Return a random generator on the CPU, because generators of devices differ."""
    return torch.Generator("cpu").manual_seed(seed)


@contextmanager
def deterministic(mode=True):
    """Use torch's deterministic algorithms, which fill new memory with NaN or large numbers."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(mode)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def list_tensors(tree):
    """Return all tensors of nested tuples and lists, in order."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, (tuple, list)):
        return [t for item in tree for t in list_tensors(item)]
    return []


def widen(value):
    """Return a floating-point tensor as a new leaf in fp64, anything else as it is."""
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.detach().double().requires_grad_(value.requires_grad)
    return value


def assert_close(kernel, actual, expected, length, name, scale=None, precision=None):
    """Assert that each error is within the kernel's tolerance, relative to the largest element of
    its row, but at least to `scale` (for sums that are smaller than their terms).

    length: terms of the longest sum. precision: dtype of intermediate results, if it is lower than
    the result's.
    """
    assert actual.dtype.is_floating_point
    size = (
        expected.abs().amax(-1, keepdim=True)
        if expected.dim() and expected.numel()
        else expected.abs()
    )
    if scale is not None:
        size = size.clamp_min(scale)
    roundings = (actual.dtype, precision or actual.dtype)
    most = max(kernel.compute_tolerance(dtype, length) for dtype in roundings)
    allowed = most * size.detach() + torch.finfo(actual.dtype).tiny
    assert_within(
        actual, expected, allowed, f"{most:.3g} of the largest of a row, by the kernel", name
    )


def check(
    kernel,
    name,
    arguments,
    options=None,
    length=1,
    gradient_length=None,
    scale=None,
    precision=None,
):
    """Compare an implementation with the reference on the same numbers in fp64.

    Gradients flow from all floating-point outputs, each with random weights. length: terms of the
    longest sum in the forward pass. gradient_length: the same for the backward pass. scale and
    precision: as in `assert_close`. Returns the implementation's outputs.
    """
    options = options or {}
    implementation = kernel.implementations[name]
    reason = implementation.refuses(*arguments, **options)
    if reason is not None:
        raise KernelError(reason)
    truth_in = [widen(a) for a in arguments]
    expected = list_tensors(kernel.reference(*truth_in, **options))
    actual = list_tensors(implementation.run(*arguments, **options))
    assert len(actual) == len(expected)
    for index, (result, exact) in enumerate(zip(actual, expected, strict=True)):
        if exact.is_floating_point():
            assert_close(
                kernel, result.detach(), exact.detach(), length, f"output {index}", scale, precision
            )
        else:
            assert torch.equal(result, exact), f"output {index}"
    leaves = [a for a in arguments if isinstance(a, torch.Tensor) and a.requires_grad]
    if not leaves:
        return actual
    true_leaves = [a for a in truth_in if isinstance(a, torch.Tensor) and a.requires_grad]
    grads = []
    for outputs, inputs in ((actual, leaves), (expected, true_leaves)):
        differentiable = [o for o in outputs if o.requires_grad]
        upstream = [
            make_random(*o.shape, dtype=torch.float32, seed=91 + i)
            for i, o in enumerate(differentiable)
        ]
        upstream = [
            g.to(got_o.dtype).to(o.dtype)
            for g, o, got_o in zip(upstream, differentiable, actual, strict=False)
        ]
        grads.append(torch.autograd.grad(differentiable, inputs, upstream))
    for index, (result, exact) in enumerate(zip(*grads, strict=True)):
        assert_close(
            kernel, result, exact, gradient_length or length, f"gradient {index}", scale, precision
        )
    return actual
