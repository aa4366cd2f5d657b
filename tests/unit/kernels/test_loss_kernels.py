"""Cross-entropy and its gradient, over whole and divided vocabularies, against fp64."""

import pytest
import torch
from kernel_exactness import DEVICE, DTYPES, assert_close, check, make_generator, make_random
from megaframe_kernels import loss
from megaframe_kernels.loss_reference import IGNORE
from torch.nn import functional

OPTIONS = [
    {},
    {"label_smoothing": 0.1},
    {"z_loss": 0.02},
    {"label_smoothing": 0.05, "z_loss": 0.01, "softcap": 3.0},
]


def make_labels(tokens, vocab):
    chosen = torch.randint(0, vocab, (tokens,), generator=make_generator(7), device="cpu").to(
        DEVICE
    )
    chosen[1::3] = IGNORE
    return chosen


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_reference_is_the_cross_entropy_of_torch(smoothing):
    logits, chosen = make_random(7, 45, scale=3.0).double(), make_labels(7, 45)
    leaf = logits.clone().requires_grad_()
    options = {"ignore_index": IGNORE, "reduction": "none", "label_smoothing": smoothing}
    expected = functional.cross_entropy(leaf, chosen, **options)
    (truth,) = torch.autograd.grad(expected.sum(), leaf)
    actual, gradient = loss.run_reference(logits, chosen, label_smoothing=smoothing)
    torch.testing.assert_close(actual, expected.detach(), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(gradient, truth, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("shape", [(1, 1), (0, 5), (3, 9000)])
def test_odd_sizes(shape):
    arguments = (make_random(*shape), make_labels(*shape))
    check(loss.KERNEL, "triton", arguments, {"z_loss": 0.1}, shape[1], scale=0.1)


def test_strided_and_large_logits():
    logits = make_random(6, 40, scale=1e4)[:, 3:36]
    check(loss.KERNEL, "triton", (logits, make_labels(6, 33)), {}, 33)
    reason = loss.KERNEL.implementations["triton"].explain_refusal(
        make_random(40, 6).t(), make_labels(6, 40)
    )
    assert "not contiguous" in reason


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
        joined = torch.stack([p for p, _ in self.parts]).logsumexp(0)
        return joined, torch.stack([t for _, t in self.parts]).sum(0)


def on_ranks(compute, vocab, bounds):
    """Return compute(slice, join) of each part of the vocabulary; `join` combines all parts."""
    ranks = VocabularyRanks()
    parts = [slice(a, b) for a, b in zip((0, *bounds), (*bounds, vocab), strict=True)]
    for part in parts:
        compute(part, ranks.collect)
    return [compute(part, ranks.join) for part in parts]


@pytest.mark.parametrize("options", OPTIONS)
def test_a_divided_vocabulary_gives_the_losses_and_gradients_of_the_whole(options):
    logits, chosen = make_random(6, 29, scale=2.0), make_labels(6, 29)
    expected, truth = loss.run_reference(logits.double(), chosen, **options)

    def compute(part, join):
        arguments = logits[:, part].clone(), chosen
        return loss.run_triton(*arguments, start=part.start, vocab=29, join=join, **options)

    results = on_ranks(compute, 29, (7, 20))
    for losses, _ in results:
        assert_close(loss.KERNEL, losses, expected, 29, "loss")
    d_logits = torch.cat([g for _, g in results], 1)
    assert_close(loss.KERNEL, d_logits, truth, 29, "gradient")


def test_words_that_cannot_be():
    """Some logits of a row are -inf, and all logits of one rank."""
    logits, chosen = make_random(6, 29, scale=2.0), torch.arange(6)
    logits[:, 9:25] = -float("inf")
    expected, truth = loss.run_reference(logits.double(), chosen)
    actual, gradient = loss.run_triton(logits.clone(), chosen)
    assert_close(loss.KERNEL, actual, expected, 29, "loss")
    assert_close(loss.KERNEL, gradient, truth, 29, "gradient")

    def compute(part, join):
        arguments = logits[:, part].clone(), chosen
        return loss.run_triton(*arguments, start=part.start, vocab=29, join=join)

    results = on_ranks(compute, 29, (9, 20))
    for losses, _ in results:
        assert_close(loss.KERNEL, losses, expected, 29, "loss")
    d_logits = torch.cat([g for _, g in results], 1)
    assert_close(loss.KERNEL, d_logits, truth, 29, "gradient")


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_become_their_gradient(options, dtype, weighted):
    logits, chosen = make_random(7, 45, dtype=dtype, scale=3.0), make_labels(7, 45)
    chosen[chosen < 0] = -1  # every negative label is ignored
    untouched, before = logits.clone(), logits.clone()
    scale = torch.tensor(2.7, dtype=torch.float64)
    if weighted:  # by token
        scale = scale * torch.linspace(0.25, 1.0, 7, dtype=torch.float64)
    scaled = {**options, "scale": scale}
    losses, gradient = check(loss.KERNEL, "triton", (logits, chosen), scaled, 45, scale=0.1)
    assert gradient is logits and (gradient[1::3] == 0).all() and (losses[1::3] == 0).all()
    repeated, same = loss.run_triton(untouched, chosen, gradient=False, **options)
    assert torch.equal(repeated, losses) and torch.equal(same, before)
