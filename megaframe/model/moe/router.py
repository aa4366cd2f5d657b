"""Router: which experts a token goes to, with what weight, and what keeps the experts equally busy.

Everything is computed in at least fp32. Auxiliary losses are sums over the tokens that have a
label, like the model's loss, and therefore depend neither on the layout nor on the size of
microbatches.

Shape legend: R rows of this rank, K choices, E experts, G groups of experts, B samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megaframe.architecture.hash_table import DIGIT
from megaframe.architecture.moe import MoEDescription
from megaframe.distributed.collectives import all_reduce
from megaframe.expert_parallel.dispatch import DROPPED
from megaframe.model.layer_inputs import LayerSetup, MicrobatchInputs
from megaframe.model.pass_state import PassState
from megaframe.parameters.parameter import Module, Parameter
from megaframe.tensor_parallel.deferred_gradients import DeferredGradients


class Router(Module):
    """Scores every expert for every row. With model.moe.balance=bias, `balance` is added to the
    scores when experts are chosen; otherwise it is the load of the last step, 1 on average. Its
    gradient is the load of the current step. With a table of the experts of each token there is
    none, and nothing is balanced."""

    def __init__(self, name: str, description: MoEDescription, setup: LayerSetup) -> None:
        self.name, self.moe, self.setup = name, description.moe, setup
        weight, known, *others = map(Parameter, description.router.declare_parameters(name))
        self.weight = weight
        by_scores = description.router.table is None
        self.balance: Parameter | None = known if by_scores else None
        self.table: Parameter | None = None if by_scores else known
        self.gain: Parameter | None = others.pop() if self.moe.expert_gain else None
        self.bias: Parameter | None = others.pop() if others else None

    def __call__(
        self, x_RH: Tensor, inputs: MicrobatchInputs, state: PassState
    ) -> tuple[Tensor, Tensor]:
        """Choose the experts of each row.

        Args:
            x_RH: This rank's normalised rows.
            inputs: Of the microbatch.
            state: Of its pass; its statistics get the auxiliary losses.

        Returns:
            The experts of each row, int64 [R, K], in training with `DROPPED` for choices above the
            capacity, and their weights [R, K] in the type of x.
        """
        moe = self.moe
        if moe.jitter and inputs.dropout is not None:
            x_RH = x_RH * inputs.dropout.draw_jitter(x_RH, self.name, moe.jitter)
        logits_RE = _Logits.apply(x_RH, self.weight, state.deferred)
        if self.bias is not None:
            logits_RE = logits_RE + self.bias.use().to(logits_RE.dtype)
        scores_RE = _SCORES[moe.score](logits_RE)
        by_kernel = self._choose_by_kernel(logits_RE)
        chosen_RK, gates_RK = by_kernel or self._choose_plain(scores_RE, inputs)
        gates_RK = gates_RK * moe.scale
        if self.gain is not None:
            gates_RK = gates_RK * self.gain.use().to(gates_RK.dtype)[chosen_RK]
        # Only where gradients are recorded, so that a block that is recomputed counts once.
        if torch.is_grad_enabled():
            gates_RK = self._balance(logits_RE, scores_RE, gates_RK, chosen_RK, inputs, state)
        # An evaluation drops nothing: its loss would depend on what happens to be beside a text.
        if moe.capacity is not None and inputs.gradient_scale is not None:
            chosen_RK = self._drop_above_capacity(chosen_RK, gates_RK, inputs, state)
        # Rounded once, after everything that is computed from the weights.
        return chosen_RK, gates_RK.to(x_RH.dtype)

    def _choose_by_kernel(self, logits_RE: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return choices and their weights, or None if no kernel takes these arguments."""
        moe = self.moe
        unknown = moe.normalise_eps or moe.score == "sqrtsoftplus"
        if moe.top_groups < moe.groups or unknown or self.balance is None:
            return None
        bias = self.balance.value if moe.balance == "bias" else None
        options = {"score": moe.score, "normalise": moe.normalise}
        kernel = self.setup.kernels.find("router", logits_RE, moe.top_k, bias, **options)
        if kernel is None:
            return None
        gates_RK, chosen_RK = kernel(logits_RE, moe.top_k, bias, **options)
        return chosen_RK.long(), gates_RK

    def _choose_plain(self, scores_RE: Tensor, inputs: MicrobatchInputs) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            # Which experts are chosen has no gradient; their weights have one, through `gather`.
            # A table without numbers has all experts equally often, as scores without numbers.
            if self.table is not None and not self.table.value.is_meta:
                chosen_RK = _look_up_experts(self.table.value, inputs.tokens_R)
            else:
                chosen_RK = self._choose_by_scores(scores_RE)
        # From the scores without the balance bias, which decides only who is chosen.
        gates_RK = scores_RE.gather(1, chosen_RK)
        if self.moe.normalise:
            sums_R1 = gates_RK.sum(-1, keepdim=True)
            sums_R1 = sums_R1 + self.moe.normalise_eps if self.moe.normalise_eps else sums_R1
            gates_RK = gates_RK / sums_R1.clamp_min(1e-20)
        return chosen_RK, gates_RK

    def _choose_by_scores(self, scores_RE: Tensor) -> Tensor:
        if self.balance is not None and self.moe.balance == "bias":
            scores_RE = scores_RE + self.balance.value
        return self.setup.routines.choose_experts(self.moe, scores_RE)

    def _balance(
        self,
        logits_RE: Tensor,
        scores_RE: Tensor,
        gates: Tensor,
        chosen: Tensor,
        inputs: MicrobatchInputs,
        state: PassState,
    ) -> Tensor:
        """Count the load, and attach the auxiliary losses to the gates in the autograd graph."""
        moe, counted_R1 = self.moe, inputs.label_weights_R[:, None]
        losses = {}
        if self.balance is not None:
            # Rows without a label, among them padding, count for nothing.
            picked_RE = torch.zeros_like(scores_RE).scatter_(1, chosen, 1.0) * counted_R1
            # The gradient of `balance` is the load of the current step.
            self.balance.add(picked_RE.sum(0))
            balanced = moe.balance_loss > 0 and moe.balance != "none"
            with torch.set_grad_enabled(balanced):
                # Not all scores sum to 1. The entropy below needs no graph, a balance loss does.
                share_RE = scores_RE / scores_RE.sum(-1, keepdim=True)
            if balanced:
                if moe.balance == "global":
                    # The load of the last step, 1 on average.
                    load_RE = self.balance.value.to(share_RE.dtype)[None]
                else:
                    load_RE = self._load_of_sequences(picked_RE, inputs)
                losses["balance"] = moe.balance_loss * (load_RE * share_RE * counted_R1).sum()
            with torch.no_grad():
                entropy = -(torch.special.xlogy(share_RE, share_RE) * counted_R1).sum()
            state.statistics.add(self.balance.spec.name, entropy)
        if moe.z_loss:
            square_R1 = logits_RE.logsumexp(-1, keepdim=True).square()
            losses["router_z"] = moe.z_loss * (square_R1 * counted_R1).sum()
        for name, loss in losses.items():
            state.statistics.add_loss(name, loss.detach())
            assert inputs.gradient_scale is not None, "only what is trained has losses of its own"
            # No output depends on the loss. Attached to the gates, it gets its gradient when theirs
            # is computed.
            gates = _AddLoss.apply(gates, loss * inputs.gradient_scale)
        return gates

    def _load_of_sequences(self, picked_RE: Tensor, inputs: MicrobatchInputs) -> Tensor:
        """Return the load of each expert in each row's sample, 1 on average."""
        sample_R = inputs.sample_R
        # One row more, for the padding, whose sample number is `batch`.
        loads_BE = picked_RE.new_zeros(inputs.batch + 1, picked_RE.shape[1])
        loads_BE.index_add_(0, sample_R, picked_RE)
        # The tokens of a sample are divided over these ranks.
        loads_BE = all_reduce(loads_BE, self.setup.experts.sequence).wait()
        # Not 0 where no token of a sample has a label.
        mean_B1 = loads_BE.mean(1, keepdim=True).clamp_min(torch.finfo(loads_BE.dtype).tiny)
        return (loads_BE / mean_B1)[sample_R]

    def _drop_above_capacity(
        self, chosen_RK: Tensor, gates_RK: Tensor, inputs: MicrobatchInputs, state: PassState
    ) -> Tensor:
        """Where an expert was chosen by more tokens than its capacity, drop the choices with the
        least weight. Padding takes no place."""
        assert self.moe.capacity is not None
        choices, experts, is_token_R = chosen_RK.shape[1], self.moe.experts, inputs.is_token_R
        # The dropped choices below make the host wait as well.
        tokens = int(is_token_R.sum())
        most = max(1, int(self.moe.capacity * tokens * choices / experts))
        # Padding chooses an expert behind the last one, which has no place at all.
        chosen = chosen_RK.masked_fill(~is_token_R[:, None], experts).flatten()
        # Two stable sorts: expert after expert, and the greatest weights of each first. Ties keep
        # the order of rows.
        by_weight = gates_RK.detach().flatten().argsort(descending=True, stable=True)
        order = by_weight[chosen[by_weight].argsort(stable=True)]
        load = torch.bincount(chosen, minlength=experts + 1)
        first = load.cumsum(0) - load
        # Place of each choice among those of its expert.
        nth = torch.arange(len(order), device=order.device) - first[chosen[order]]
        dropped = order[(nth >= most) | (chosen[order] == experts)]
        if torch.is_grad_enabled():
            weights = inputs.label_weights_R[dropped // choices]
            state.statistics.add("dropped_choices", weights.sum())
        return chosen.index_fill(0, dropped, DROPPED).view(chosen_RK.shape)


def _look_up_experts(table_VKD: Tensor, tokens_R: Tensor) -> Tensor:
    """Return the experts of tokens, int64 [R, K], from digits of their numbers."""
    high_RK, low_RK = table_VKD[tokens_R].long().unbind(-1)
    return high_RK * DIGIT + low_RK


class _SqrtSoftplus(torch.autograd.Function):
    """y = log(1 + e^x)^(1/2). Keeps only y: dx = dy (1 - e^(-y^2)) / 2y."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = F.softplus(x).sqrt_()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        slope = y.square().neg_().expm1_().neg_()
        return gradients[0] * slope / (2 * y).clamp_min(torch.finfo(y.dtype).tiny)


_SCORES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "softmax": partial(torch.softmax, dim=-1),
    "sqrtsoftplus": _SqrtSoftplus.apply,
}
"""What makes scores of logits."""


class _Logits(torch.autograd.Function):
    """x W^T in at least fp32. The weight gradient may be deferred, like that of any matrix."""

    @staticmethod
    def forward(ctx: Any, x_RH: Tensor, weight: Parameter, deferred: DeferredGradients) -> Tensor:
        ctx.save_for_backward(x_RH)
        ctx.weight, ctx.deferred = weight, deferred
        wide = torch.promote_types(x_RH.dtype, torch.float32)
        # Copied to fp32 for this product alone; the activations are kept in their own type.
        return x_RH.to(wide) @ weight.value.to(wide).t()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (x_RH,), weight, dy = ctx.saved_tensors, ctx.weight, gradients[0]
        x_RH = x_RH.detach()  # otherwise a deferred weight gradient keeps the graph alive
        ctx.deferred.add(lambda: weight.add_product(dy, x_RH.to(dy.dtype)))
        return (dy @ weight.value.to(dy.dtype)).to(x_RH.dtype), None, None


class _AddLoss(torch.autograd.Function):
    """Return x. The backward pass also gives `loss` a gradient of 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (loss,) = ctx.saved_tensors
        return gradients[0], torch.ones_like(loss)
