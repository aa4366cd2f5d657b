"""A model's losses and gradients beside those of the plain model, by autograd."""

import pytest
import reference_model as reference
import torch
from tolerances import assert_near

from megaframe.data.microbatch import look_ahead
from megaframe.pipeline_parallel.stage_pass import StagePass

TRAIN = {"label_smoothing": 0.1, "z_loss": 0.01}
TERMS = 6 * (6 * 16 + 12) + 37 + 36
"""Lengths of the sums from a token to a gradient: up to six blocks with six products, in which 16
channels or 12 tokens are added up, then 37 words, and 36 tokens of a weight's gradient."""


def list_matrices(module):
    return [p for p in module.parameters() if p.spec.role == "matrix" and not p.frozen]


def compute_gradients(build, microbatch, train):
    built = build
    valid = float(microbatch.sum_label_weights())
    built.sharded_parameters.start_step()
    scale = torch.tensor(1.0 / valid, dtype=torch.float64)
    loss = built.stage.forward(StagePass(0), microbatch, scale) / valid
    ahead = built.stage.post_process.take_loss_ahead()
    if ahead is not None:
        loss += built.config.train.mtp_weight * ahead / valid
    done = []

    def tell(part, *, last):
        owner = next((unit for unit in built.stage.units if unit.second_half is part), None)
        if owner is not None:  # it can be sent while the rest of the unit computes
            assert not any(p.fresh for p in list_matrices(part))
            assert all(p.fresh for p in list_matrices(owner) if p not in {*part.parameters()})
        done.append(part)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(built.sharded_parameters, "reduce", tell)
        built.stage.backward(StagePass(0))
    parts = [part for unit in built.stage.units[:-1] for part in (unit, unit.second_half) if part]
    assert done == parts[::-1]
    return loss


def compare_with_autograd(built, documents, make_microbatch, weighted=False):
    """Assert that loss and gradients of a microbatch are those of the reference."""
    microbatch = make_microbatch(built.config, documents=documents, weighted=weighted)
    microbatch = look_ahead(microbatch, built.config.model.mtp_depth)
    generator = torch.Generator().manual_seed(0)
    for parameter in built.stage.parameters():
        if parameter.spec.role == "balance":
            parameter.value.uniform_(0.5, 1.5, generator=generator)
    loss = compute_gradients(built, microbatch, TRAIN)
    valid = float(microbatch.sum_label_weights())
    if (aside := built.stage.take_statistics().loss) is not None:
        loss = loss + aside / valid
    weights = {}
    for bucket in built.sharded_parameters.buckets:
        for parameter, _, piece in bucket.iterate_pieces(bucket.weights, bucket.master_span):
            weights[parameter.spec.name] = piece.clone().requires_grad_()
    expected = reference.loss(weights, built.config, microbatch)
    expected.backward()
    assert_near(loss, expected, TERMS)
    # Gradients that cancel, such as those of key biases, are as inexact as others.
    gradients_of = (weight.grad for weight in weights.values() if weight.grad is not None)
    size = max(float(gradient.abs().max()) for gradient in gradients_of)
    for bucket in built.sharded_parameters.buckets:
        if not bucket.trained:  # frozen, as by `model.indexer` without a loss
            continue
        for parameter, _, grad in bucket.iterate_pieces(bucket.grad_sums, bucket.master_span):
            wanted = weights[parameter.spec.name].grad
            if parameter.spec.role == "balance":
                assert grad.sum() == built.config.model.moe.top_k * valid
                continue
            assert_near(grad, wanted, TERMS, size=size, label=parameter.spec.name)
