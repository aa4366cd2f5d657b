"""Cross-entropy over whole and divided vocabularies, and fused with its linear, against fp64."""

import pytest
import torch
from kernel_exactness import DEVICE, DTYPES, assert_close, check, generator, rand, wide
from megaframe_kernels import cross_entropy, linear_cross_entropy
from megaframe_kernels import loss as loss_kernel
from megaframe_kernels.cross_entropy import IGNORE

OPTIONS = [
    {},
    {"label_smoothing": 0.1},
    {"z_loss": 0.02},
    {"label_smoothing": 0.05, "z_loss": 0.01, "softcap": 3.0},
]


def labels(tokens, vocab):
    chosen = torch.randint(0, vocab, (tokens,), generator=generator(7), device="cpu").to(DEVICE)
    chosen[1::3] = IGNORE
    return chosen


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_cross_entropy(options, dtype):
    logits = rand(7, 45, dtype=dtype, scale=3.0).requires_grad_()
    check(cross_entropy.KERNEL, "triton", (logits, labels(7, 45)), options, 45)


@pytest.mark.parametrize("shape", [(1, 1), (0, 5), (3, 9000)])
def test_odd_sizes(shape):
    logits = rand(*shape).requires_grad_()
    given = (logits, labels(*shape))
    check(cross_entropy.KERNEL, "triton", given, {"z_loss": 0.1}, shape[1], scale=0.1)


def test_strided_and_large_logits():
    logits = rand(40, 6, scale=1e4).t()[:, 3:36].requires_grad_()
    check(cross_entropy.KERNEL, "triton", (logits, labels(6, 33)), {}, 33)
    check(cross_entropy.KERNEL, "torch", (rand(6, 33).requires_grad_(), labels(6, 33)), {}, 33)


class VocabularyRanks:
    """Joins the partial results of ranks that run one after another in this process.

    In the first round every rank calls `collect`, in the second `join` returns the whole.
    """

    def __init__(self):
        self.parts = []

    def collect(self, partition, label):
        self.parts.append((partition, label))
        return partition, label

    def join(self, partition, label):
        whole = torch.stack([p for p, _ in self.parts]).logsumexp(0)
        return whole, torch.stack([t for _, t in self.parts]).sum(0)


def on_ranks(compute, vocab, bounds):
    """Return compute(slice, join) of each part of the vocabulary; `join` combines all parts."""
    ranks = VocabularyRanks()
    parts = [slice(a, b) for a, b in zip((0, *bounds), (*bounds, vocab), strict=True)]
    for part in parts:
        compute(part, ranks.collect)
    return [compute(part, ranks.join) for part in parts]


@pytest.mark.parametrize("options", OPTIONS)
def test_a_divided_vocabulary_gives_the_losses_and_gradients_of_the_whole(options):
    whole, chosen = rand(6, 29, scale=2.0).requires_grad_(), labels(6, 29)
    exact = wide(whole)
    want = cross_entropy.reference(exact, chosen, **options)
    (truth,) = torch.autograd.grad(want.sum(), exact)

    def compute(part, join):
        logits = whole.detach()[:, part].requires_grad_()
        loss = cross_entropy.run_triton(
            logits, chosen, start=part.start, vocab=29, join=join, **options
        )
        return loss.detach(), torch.autograd.grad(loss.sum(), logits)[0]

    results = on_ranks(compute, 29, (7, 20))
    for loss, _ in results:
        assert_close(cross_entropy.KERNEL, loss, want.detach(), 29, "loss")
    d_logits = torch.cat([g for _, g in results], 1)
    assert_close(cross_entropy.KERNEL, d_logits, truth, 29, "gradient")


def test_words_that_cannot_be():
    """Some logits of a row are -inf, and all logits of one rank."""
    whole, chosen = rand(6, 29, scale=2.0), torch.arange(6)
    whole[:, 9:25] = -float("inf")
    want, truth = loss_kernel.reference(whole.double(), chosen)
    got, made = loss_kernel.run_triton(whole.clone(), chosen)
    assert_close(loss_kernel.KERNEL, got, want, 29, "loss")
    assert_close(loss_kernel.KERNEL, made, truth, 29, "gradient")

    def compute(part, join):
        given = whole[:, part].clone(), chosen
        return loss_kernel.run_triton(*given, start=part.start, vocab=29, join=join)

    results = on_ranks(compute, 29, (9, 20))
    for losses, _ in results:
        assert_close(loss_kernel.KERNEL, losses, want, 29, "loss")
    d_logits = torch.cat([g for _, g in results], 1)
    assert_close(loss_kernel.KERNEL, d_logits, truth, 29, "gradient")


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_cross_entropy(options, dtype):
    hidden = rand(11, 8, dtype=dtype).requires_grad_()
    weight = rand(29, 8, dtype=dtype, seed=1).requires_grad_()
    given = (hidden, weight, labels(11, 29))
    # Logits are rounded before they become probabilities, which are factors of the gradients.
    kernel = linear_cross_entropy.KERNEL
    check(kernel, "triton", given, options, 29 * 11, scale=4.0, precision=dtype)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_become_their_gradient(options, dtype):
    logits, chosen = rand(7, 45, dtype=dtype, scale=3.0), labels(7, 45)
    chosen[chosen < 0] = -1  # every negative label is ignored
    untouched, before = logits.clone(), logits.clone()
    scaled = {**options, "scale": torch.tensor(2.7, dtype=torch.float64)}
    losses, made = check(loss_kernel.KERNEL, "triton", (logits, chosen), scaled, 45, scale=0.1)
    assert made is logits and (made[1::3] == 0).all() and (losses[1::3] == 0).all()
    again, same = loss_kernel.run_triton(untouched, chosen, gradient=False, **options)
    assert torch.equal(again, losses) and torch.equal(same, before)


def test_chunks_change_nothing_and_backward_scales():
    kernel = linear_cross_entropy.KERNEL
    hidden, weight = rand(11, 8).requires_grad_(), rand(29, 8, seed=1).requires_grad_()
    exact = wide(hidden), wide(weight)
    want = kernel.reference(*exact, labels(11, 29))
    truth = want.detach(), *torch.autograd.grad(0.25 * want, exact)
    for chunk in (1, 3 * 29, 10**6):
        loss = linear_cross_entropy.run_triton(hidden, weight, labels(11, 29), chunk=chunk)
        results = loss.detach(), *torch.autograd.grad(0.25 * loss, (hidden, weight))
        for one, true in zip(results, truth, strict=True):
            assert_close(kernel, one, true, 29 * 11, f"chunks of {chunk}", scale=1.0)


def test_chunks_are_whole_tiles(monkeypatch):
    seen = []

    def spy(logits, *rest, **options):
        seen.append(len(logits))
        return loss_kernel.run_triton(logits, *rest, **options)

    monkeypatch.setattr(linear_cross_entropy, "loss_of", spy)
    hidden, weight = rand(300, 4), rand(3, 4, seed=1)
    for rows in (200, 300, 100):
        linear_cross_entropy.run_triton(hidden, weight, labels(300, 3), chunk=3 * rows)
    assert seen == [128, 128, 44, 300, 100, 100, 100]


def test_linear_cross_entropy_on_a_divided_vocabulary():
    hidden, weight = rand(6, 8).requires_grad_(), rand(29, 8, seed=1).requires_grad_()
    options, chosen = {"label_smoothing": 0.1, "z_loss": 0.01}, labels(6, 29)
    exact = wide(hidden), wide(weight)
    want = linear_cross_entropy.reference(*exact, chosen, **options)
    true_hidden, true_weight = torch.autograd.grad(want, exact)

    def compute(part, join):
        mine = weight.detach()[part].requires_grad_()
        loss = linear_cross_entropy.run_triton(
            hidden, mine, chosen, start=part.start, vocab=29, join=join, **options
        )
        return loss.detach(), *torch.autograd.grad(loss, (hidden, mine))

    results = on_ranks(compute, 29, (13,))
    kernel, length = linear_cross_entropy.KERNEL, 29 * 6
    for loss, _, _ in results:
        assert_close(kernel, loss, want.detach(), length, "loss")
    d_hidden, d_weight = sum(h for _, h, _ in results), torch.cat([w for _, _, w in results])
    assert_close(kernel, d_hidden, true_hidden, length, "gradient of hidden", scale=1.0)
    assert_close(kernel, d_weight, true_weight, length, "gradient of the weight", scale=1.0)
