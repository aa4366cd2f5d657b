"""Losses from outside: those of plain autograd on whole logits, however ranks divide the words."""

from typing import Literal

import pytest
import torch
from patience import PATIENCE
from tolerances import assert_near, promised

from megaframe.architecture import output_head
from megaframe.architecture.output_head import compute_loss_bytes_per_logit
from megaframe.architecture.spec import Box, Constant, ParamSpec, locate_shard
from megaframe.config import RunConfig
from megaframe.config.parts import LossPart
from megaframe.data.microbatch import IGNORE
from megaframe.distributed.collectives import ALONE
from megaframe.distributed.mesh import Mesh, read_world_size
from megaframe.errors import UserError
from megaframe.layout import Layout
from megaframe.model import loss as loss_module
from megaframe.model import vocabulary as vocabulary_module
from megaframe.model.loss import LossOptions, compute_head_loss
from megaframe.model.vocabulary import Vocabulary, compute_part_losses
from megaframe.parameters.parameter import Parameter

TOKENS, VOCAB, HIDDEN, SCALE = 12, 17, 6, 0.3


class Focal(LossPart):
    kind: Literal["focal"] = "focal"

    def compute_losses(self, logits, labels, vocabulary):
        log_p = vocabulary.pick(logits, labels) - vocabulary.log_sum_exp(logits)
        return -((-log_p.expm1()) ** 2) * log_p

    def compute_expected(self, logits, labels):
        p = logits.softmax(-1).gather(1, labels[:, None])[:, 0]
        return -((1 - p) ** 2) * p.log()


class Entropy(LossPart):
    """Sums over words of what has sums over words in it."""

    kind: Literal["entropy"] = "entropy"

    def compute_losses(self, logits, labels, vocabulary):
        log_p = logits - vocabulary.log_sum_exp(logits)[:, None]
        entropy = -vocabulary.sum(log_p.exp() * log_p)
        return entropy * entropy - vocabulary.pick(log_p, labels)

    def compute_expected(self, logits, labels):
        log_p = logits.log_softmax(-1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        return entropy**2 - log_p.gather(1, labels[:, None])[:, 0]


class Weighted(LossPart):
    """Knows which words its logits belong to."""

    kind: Literal["weighted"] = "weighted"

    def compute_losses(self, logits, labels, vocabulary):
        words = vocabulary.list_words(logits.device) / vocabulary.size
        return vocabulary.sum((logits * words) ** 2) + vocabulary.log_sum_exp(logits) ** 2

    def compute_expected(self, logits, labels):
        words = torch.arange(VOCAB) / VOCAB
        return ((logits * words) ** 2).sum(-1) + logits.logsumexp(-1) ** 2


class Infinite(LossPart):
    """Has infinite gradients where the label is word 0, which stands for no label too."""

    kind: Literal["infinite"] = "infinite"

    def compute_losses(self, logits, labels, vocabulary):
        return vocabulary.log_sum_exp(logits) / (labels != 0)


class Excluding(LossPart):
    """Leaves out words, which may be all of a rank's part."""

    kind: Literal["excluding"] = "excluding"

    def compute_losses(self, logits, labels, vocabulary):
        words = vocabulary.list_words(logits.device)
        return vocabulary.log_sum_exp(logits.masked_fill(words >= VOCAB // 2, -torch.inf))

    def compute_expected(self, logits, labels):
        return logits[:, : VOCAB // 2].logsumexp(-1)


LOSSES = {part.kind: part for part in (Focal(), Entropy(), Weighted(), Excluding())}


def make_tensors():
    """Return hidden states, labels (none of word 0) and the head's weight."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator, dtype=torch.float64)
    weight = torch.randn(VOCAB, HIDDEN, generator=generator, dtype=torch.float64)
    labels = torch.randint(1, VOCAB, (TOKENS,), generator=generator)
    labels[::5] = IGNORE
    return hidden, labels, weight


def compute_on_rank(part, softcap, most):
    """Return this rank's loss, its rows of the gradient of the hidden states, and its rows of that
    of the weight. most: logits of a chunk."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (loss_module, vocabulary_module, output_head):
            patch.setattr(module, "get_max_logits_per_chunk", lambda host: most)
        return _compute_on_rank(part, softcap)


def _compute_on_rank(part, softcap):
    mesh = Mesh(Layout(tensor=read_world_size()), device="cpu", timeout=PATIENCE)
    tensor = mesh.group("tensor")
    hidden, labels, whole = make_tensors()
    start, count = locate_shard(VOCAB, tensor.index, tensor.size)
    first, rows = locate_shard(TOKENS, tensor.index, tensor.size)
    weight = Parameter(ParamSpec("head.weight", (VOCAB, HIDDEN), Constant(0), role="head"))
    weight.bind(Box((start, 0), (count, HIDDEN)), lambda: None)
    weight.value = whole[start : start + count].clone()
    weight.grad = torch.zeros_like(weight.value)
    result = compute_head_loss(
        hidden[first : first + rows],
        labels,
        weight,
        LossOptions(softcap=softcap, part=part),
        torch.tensor(SCALE, dtype=torch.float64),
        tensor,
    )
    mesh.finish()
    return float(result.loss), result.d_hidden, weight.grad


@pytest.mark.parametrize(
    ("ranks", "softcap", "most"),
    # Chunks of 3 rows, each processed row by row, and of all.
    [(1, None, 10**6), (1, 3.0, 51), (2, 3.0, 10**6), (2, None, 27), (3, None, 10**6)],
)
@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradients_are_those_of_whole_logits(name, ranks, softcap, most, pool):
    part = LOSSES[name]
    results = pool.run(ranks, compute_on_rank, part, softcap, most)
    hidden, labels, weight = (tensor.clone() for tensor in make_tensors())
    hidden.requires_grad_()
    weight.requires_grad_()
    logits = hidden @ weight.T
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    valid = labels != IGNORE
    expected = part.compute_expected(logits[valid], labels[valid]).sum()
    (SCALE * expected).backward()
    assert sum(loss for loss, _, _ in results) == promised(float(expected.detach()))
    for position, wanted in ((1, hidden.grad), (2, weight.grad)):
        actual = torch.cat([result[position] for result in results])
        # Each gradient is a sum over words or tokens of products with the logits' own gradients.
        assert_near(actual, wanted, VOCAB * TOKENS, size=10 * float(wanted.abs().max()))


def test_ranks_with_unequal_parts_have_equally_many_chunks(pool):
    """The parts have 9 and 8 words: of their own, 5 and 6 rows would fit into 51 logits."""
    for part in (None, LOSSES["focal"]):
        first, second = pool.run(2, compute_on_rank, part, None, 51)
        assert first[0] and second[0] == 0


def test_a_token_without_a_label_adds_nothing():
    _, labels, _ = make_tensors()
    logits = torch.randn(TOKENS, VOCAB, dtype=torch.float64)
    vocabulary = Vocabulary(0, VOCAB, VOCAB, ALONE)
    compute_part_losses(Infinite(), logits, labels, vocabulary, torch.tensor(1.0), None)
    ignored = labels == IGNORE
    assert not logits[ignored].any() and logits[~ignored].isfinite().all()


class Summed(Focal):
    kind: Literal["summed"] = "summed"

    def compute_losses(self, logits, labels, vocabulary):
        return super().compute_losses(logits, labels, vocabulary).sum()


class Detached(Focal):
    kind: Literal["detached"] = "detached"

    def compute_losses(self, logits, labels, vocabulary):
        return super().compute_losses(logits.detach(), labels, vocabulary)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (Summed(), r"train.loss=summed: compute_losses returns \[\]; return one loss .* \[12\]"),
        (Detached(), r"train.loss=detached: .* without a gradient"),
    ],
)
def test_what_is_no_loss_of_each_token_is_refused(part, message):
    logits, labels = torch.randn(TOKENS, VOCAB), torch.ones(TOKENS, dtype=torch.int64)
    vocabulary = Vocabulary(0, VOCAB, VOCAB, ALONE)
    with pytest.raises(UserError, match=message):
        compute_part_losses(part, logits, labels, vocabulary, torch.tensor(1.0), None)


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)]
)
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("name", LOSSES)
def test_the_plan_counts_the_tensors_that_exist(name, softcap, precision, dtype):
    """Measured by torch's own record of allocations. In fp32 the logits are not copied."""
    part, tokens, words = LOSSES[name], 64, 1024
    logits = torch.randn(tokens, words).to(dtype)
    labels = torch.ones(tokens, dtype=torch.int64)
    vocabulary = Vocabulary(0, words, words, ALONE)
    with torch.autograd.profiler.profile(profile_memory=True, use_kineto=True) as profile:
        compute_part_losses(part, logits, labels, vocabulary, torch.tensor(1.0), softcap)
    events = [event for event in profile.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    total = most = 0
    for event in events:
        total += event.nbytes()
        most = max(most, total)
    config = RunConfig(
        model={"vocab": words, "logit_softcap": softcap},
        train={"precision": precision, "loss": part},
    )
    planned = compute_loss_bytes_per_logit(config.model, config.train, dtype.itemsize)
    # Numbers for each token are not counted.
    assert 0.25 * planned < most / logits.numel() < 1.02 * planned
