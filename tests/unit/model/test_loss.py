"""The chunked head: chunks change no result, and low precision stays within its type's error."""

import pytest
import torch
import torch.nn.functional as F
from patience import PATIENCE
from tolerances import assert_near, assert_within, compute_roundoff, estimate_growth

from megaframe.architecture import output_head
from megaframe.architecture.spec import Box, Constant, ParamSpec, locate_shard
from megaframe.data.microbatch import IGNORE
from megaframe.distributed.collectives import ALONE
from megaframe.distributed.mesh import Mesh, read_world_size
from megaframe.layout import Layout
from megaframe.model import loss as loss_module
from megaframe.model.loss import LossOptions, compute_head_loss
from megaframe.parameters.parameter import Parameter

pytestmark = pytest.mark.numeric

TOKENS, VOCAB, HIDDEN = 29, 53, 8
SCALE = 0.3
"""Not a power of two, multiplication by which is exact."""


def make_head(dtype, master):
    generator = torch.Generator().manual_seed(0)
    weight = Parameter(ParamSpec("head.weight", (VOCAB, HIDDEN), Constant(0), role="head"))
    value = torch.randn(VOCAB, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)
    weight.bind(Box((0, 0), (VOCAB, HIDDEN)), lambda: None)
    weight.value, weight.grad = value, torch.full(value.shape, 7.0, dtype=master)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    labels[::5] = IGNORE
    return hidden, labels, weight


def compute_loss(hidden, labels, weight, options=None, tensor=ALONE):
    scale = torch.tensor(SCALE, dtype=torch.float64)
    return compute_head_loss(hidden, labels, weight, options or LossOptions(), scale, tensor)


def compute_expected(hidden, labels, weight):
    """Return loss and gradients by plain autograd in fp64, from the same rounded inputs."""
    hidden = hidden.double().requires_grad_()
    matrix = weight.value.double().requires_grad_()
    loss = F.cross_entropy(hidden @ matrix.T, labels, ignore_index=IGNORE, reduction="sum")
    (loss * SCALE).backward()
    return loss.detach(), hidden.grad, matrix.grad


@pytest.mark.parametrize("rows", [1, 7, 29, 1000])
def test_chunks_change_nothing(rows, monkeypatch):
    for module in (loss_module, output_head):
        monkeypatch.setattr(module, "get_max_logits_per_chunk", lambda host: rows * VOCAB)
    hidden, labels, weight = make_head(torch.float64, torch.float64)
    result = compute_loss(hidden, labels, weight)
    loss, d_hidden, d_weight = compute_expected(hidden, labels, weight)
    # A logit's rounding is carried into its probability, which is a factor of the gradients.
    exponent = 1.0 + float((hidden @ weight.value.T).detach().abs().max())
    assert_near(result.loss, loss, HIDDEN + VOCAB + TOKENS)
    for actual, wanted, terms in (
        (result.d_hidden, d_hidden, HIDDEN + VOCAB),
        (weight.grad, d_weight, HIDDEN + VOCAB + TOKENS),
    ):
        assert_near(actual, wanted, terms, size=exponent * float(wanted.abs().max()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_as_good_as_its_type(dtype):
    hidden, labels, weight = make_head(dtype, torch.float32)
    result = compute_loss(hidden, labels, weight)
    loss, d_hidden, d_weight = compute_expected(hidden, labels, weight)
    eps = 2 * compute_roundoff(dtype)
    # Each logit is rounded once (relative to its own size), and so is each probability.
    largest = float((hidden.double() @ weight.value.double().T).abs().max())
    per_token = eps * (largest + 2)
    assert abs(float(result.loss - loss)) < TOKENS * per_token
    bound = 2 * SCALE * per_token * float(weight.value.double().abs().max()) * 4
    assert float((result.d_hidden.double() - d_hidden).abs().max()) < bound
    bound = 2 * SCALE * per_token * float(hidden.double().abs().max()) * 4
    assert float((weight.grad.double() - d_weight).abs().max()) < bound


SURE = torch.tensor([0.0, 4.0, 6.0, 8.6875, 10.625, 12.0])
"""Logits of the target, if all others are 0: 8.6875 is a probability of 0.991, 10.625 of 0.9987."""


def predict_surely(dtype, options):
    """Return the loss of increasingly sure predictions, and the gradient of this rank's logits
    [T, V]. The hidden states are the identity matrix, so the logits are the weight (transposed) and
    have the weight's gradient."""
    mesh = Mesh(Layout(tensor=read_world_size()), device="cpu", timeout=PATIENCE)
    tensor, tokens = mesh.group("tensor"), len(SURE)
    start, count = locate_shard(VOCAB, tensor.index, tensor.size)
    first, rows = locate_shard(tokens, tensor.index, tensor.size)
    weight = Parameter(ParamSpec("head.weight", (VOCAB, tokens), Constant(0), role="head"))
    weight.bind(Box((start, 0), (count, tokens)), lambda: None)
    logits = torch.zeros(VOCAB, tokens, dtype=dtype)
    logits[-1] = SURE
    weight.value = logits[start : start + count].clone()
    weight.grad = torch.zeros(count, tokens)
    hidden = torch.eye(tokens, dtype=dtype)[first : first + rows]
    labels = torch.full((tokens,), VOCAB - 1)
    result = compute_loss(hidden, labels, weight, LossOptions(**options), tensor)
    mesh.finish()
    return result.loss, weight.grad.t().clone()


OPTIONS = [{}, {"z_loss": 0.01}, {"label_smoothing": 0.1}, {"softcap": 15.0}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sure_predictions_are_rounded_once_and_no_sooner(dtype, ranks, options, pool):
    """Losses are as exact as in fp32. The target's gradient is small, and is rounded only once it
    is known. Others may be rounded before that, as probabilities, and once for each factor."""
    results = pool.run(ranks, predict_surely, dtype, options)
    settings = {"z_loss": 0.0, "label_smoothing": 0.0, "softcap": None, **options}
    leaf = torch.zeros(len(SURE), VOCAB, dtype=torch.float64)
    leaf[:, -1] = SURE
    logits = leaf.requires_grad_()
    if settings["softcap"]:
        logits = settings["softcap"] * (leaf / settings["softcap"]).tanh()
    labels = torch.full((len(SURE),), VOCAB - 1)
    smoothing = {"label_smoothing": settings["label_smoothing"]}
    partition = logits.logsumexp(-1)
    loss = F.cross_entropy(logits, labels, reduction="sum", **smoothing)
    loss = loss + settings["z_loss"] * partition.square().sum()
    (SCALE * loss).backward()
    loss, partition = loss.detach(), partition.detach()
    single = 2 * compute_roundoff(torch.float32)
    assert abs(float(results[0][0] - loss)) < estimate_growth(8, torch.float32) * float(
        partition.abs().sum()
    )
    gradient = torch.cat([part for _, part in results], 1).double()
    eps, probability = 2 * compute_roundoff(dtype), SCALE * logits.softmax(-1).detach()
    probability[:, -1] = 0.0
    allowed = eps * (leaf.grad.abs() + probability) + 8 * single
    assert_within(gradient, leaf.grad, allowed, "a rounding for each factor")


def test_huge_logits_stay_finite():
    hidden, labels, weight = make_head(torch.float32, torch.float32)
    result = compute_loss(hidden * 1e4, labels, weight)
    loss, _, _ = compute_expected(hidden * 1e4, labels, weight)
    assert torch.isfinite(result.d_hidden).all()
    assert_near(result.loss, loss, HIDDEN + VOCAB, dtype=torch.float32)


def test_nothing_valid_is_no_loss():
    hidden, labels, weight = make_head(torch.float64, torch.float64)
    result = compute_loss(hidden, torch.full_like(labels, IGNORE), weight)
    assert result.loss == 0
    assert not result.d_hidden.any() and not weight.grad.any()


@pytest.mark.parametrize(
    ("vocab", "host", "rows"),
    [
        (128_256, False, 4096),  # 4,185 would fit, and cost as much as 4,224
        (50_304, False, 10624),
        (8_000_000, False, 67),  # fewer than a tile
        (2**30, False, 1),
        (50_304, True, 512),
        (128_256, True, 201),
    ],
)
def test_rows_of_a_chunk_fill_the_tiles_of_a_gpu(vocab, host, rows):
    assert output_head.count_rows_per_chunk(vocab, host=host) == rows
