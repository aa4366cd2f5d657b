"""Mamba-2 (Dao and Gu 2024, "Transformers are SSMs"), with its convolution, gates and norms.

Each head has a matrix S. A token decays it by a_t = exp(-rate d_t) and adds its own input,
S_t = a_t S_{t-1} + k_t^T d_t x_t, where d_t is its step; its output is y_t = q_t S_t + g x_t. Keys
and queries (`B` and `C` in the paper) are those of a group of heads.

Tensor ranks that share a group have its keys and queries, and the inputs and states of some of its
heads.

Tokens of a chunk see each other through products, as in attention, and what is before the chunk
through the state (section 6 of the paper), by a kernel or in plain torch.
Decays are sums of logarithms, and nothing is divided by one.

Shape legend: B samples, S tokens, G groups, R heads of each, V width of a head, K that of a key, X
numbers for a group, P pieces of samples, C chunks, L tokens of a chunk, T tokens of a piece with
those before it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megaframe.architecture.mamba2 import Mamba2Description
from megaframe.architecture.spec import count_copies
from megaframe.context_parallel.states import (
    join_chunks,
    pass_states,
    prepend_tokens,
    split_chunks,
)
from megaframe.distributed.collectives import all_reduce
from megaframe.model.causal_convolution import convolve, convolve_last
from megaframe.model.key_value_cache import StateCache
from megaframe.model.layer_inputs import LayerSetup, MicrobatchInputs
from megaframe.model.pass_state import PassState
from megaframe.model.recurrent_kernels import find_ssd
from megaframe.ops.autograd import recompute
from megaframe.parameters.parameter import Module, Parameter
from megaframe.tensor_parallel.linear import Elementwise, Linear


class Mamba2(Module):
    """The groups of this tensor rank for the tokens of this context rank."""

    def __init__(self, name: str, description: Mamba2Description, setup: LayerSetup) -> None:
        """Make the layers.

        Args:
            name: Of the layer in the model.
            description: What it declares.
            setup: What the run fixes.
        """
        self.description, self.context, self.kernels = description, setup.context, setup.kernels
        self.tensor = setup.tensor.group
        self.sharing = count_copies(description.groups, self.tensor.size)
        inner, keys = description.width // self.sharing, description.state_dim
        self.channel_widths = inner, keys, keys
        self.input = Linear(f"{name}.input", description.input, setup.tensor)
        specs = description.convolution.declare_parameters(f"{name}.convolution")
        self.convolution, *bias = map(Parameter, specs)
        self.convolution_bias: Parameter | None = bias[0] if bias else None
        self.rate, self.step = map(Parameter, description.decay.declare_parameters(f"{name}.decay"))
        (self.skip,) = map(Parameter, description.skip.declare_parameters(f"{name}.skip"))
        norm = description.norm
        gains = [] if norm is None else [*map(Parameter, norm.declare_parameters(f"{name}.norm"))]
        self.gain: Parameter | None = gains[0] if gains else None
        self.output = Linear(f"{name}.output", description.output, setup.tensor)

    def __call__(
        self, x: Tensor, norm: Elementwise | None, inputs: MicrobatchInputs, state: PassState
    ) -> Tensor:
        """Mix the tokens of samples. The arguments are those of `Attention`."""
        rows = inputs.rows.remove_padding(self.input(x, state.deferred, norm))
        groups_BSGX = rows.view(inputs.batch, inputs.length, -1, sum(self.description.widths))
        cache = state.find_state(self)
        if cache is None:
            # Only the result of the product is kept; all that follows is computed again from it.
            kept: list[Tensor] = []
            mix = partial(self._mix, inputs, kept=kept)
            out_BSGX = recompute(mix, groups_BSGX, kept=kept)
        elif cache.tensors:
            out_BSGX = self._mix_token(groups_BSGX, cache)
        else:
            out_BSGX = self._mix(inputs, groups_BSGX, cache)
        return self.output(inputs.rows.pad(out_BSGX.flatten(0, 1).flatten(1)), state.deferred)

    def _mix(
        self,
        inputs: MicrobatchInputs,
        groups_BSGX: Tensor,
        cache: StateCache | None = None,
        kept: list[Tensor] | None = None,
    ) -> Tensor:
        """Return the gated outputs of groups, [B, S, G, R * V], and put what is left of whole
        samples into a cache, and what a second call needs of this one into `kept`."""
        gate, seen_BSGX, steps = self._split_groups(groups_BSGX)
        seen_PTGX = prepend_tokens(seen_BSGX, self.description.taps - 1, self.context)
        gains = self._select_channels(self.convolution.use(), 1)
        x, key, query = self._split_channels(convolve(seen_PTGX, gains, inputs))
        steps, falls = self._compute_decays(steps)
        value = x * steps.unsqueeze(-1).to(x)
        heads = query, key, value, falls
        run = find_ssd(self.kernels, *heads, inputs)
        if run is None:
            chunk, needs_state = self.description.chunk, cache is not None
            run = partial(pass_through_states, *heads, inputs, chunk, needs_state)
        out, state = run()
        if cache is not None and state is not None:
            cache.replace(inputs.length, seen=seen_PTGX[:, inputs.length :], state=state)
        return self._finish(out, x, gate, kept)

    def _mix_token(self, groups_B1GX: Tensor, cache: StateCache) -> Tensor:
        """Do the same for one token after those of the cache."""
        assert groups_B1GX.shape[1] == 1, "after the first pass tokens come one by one"
        gate, seen_B1GX, steps = self._split_groups(groups_B1GX)
        seen_BTGX = torch.cat((cache.tensors["seen"], seen_B1GX), 1)
        gains = self._select_channels(self.convolution.use(), 1)
        x, key, query = self._split_channels(convolve_last(seen_BTGX, gains))
        steps, falls = self._compute_decays(steps)
        state = cache.tensors["state"]
        value, key, query = (x * steps.unsqueeze(-1)).to(state), key.to(state), query.to(state)
        added = key.squeeze(1)[..., None, None] * value.transpose(1, 2)
        state = falls.exp().transpose(1, 2).unsqueeze(-1) * state + added
        out = (query.transpose(1, 2) @ state.flatten(-2)).to(x).view_as(x)
        cache.replace(1, seen=seen_BTGX[:, 1:], state=state)
        return self._finish(out, x, gate)

    def _split_groups(self, groups_BSGX: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gates, what the convolution sees, and what makes the steps, of the heads of
        this rank."""
        widths = self.description.widths
        gate, seen, steps = groups_BSGX.split((widths[0], sum(widths[1:4]), widths[4]), -1)
        return self._select_heads(gate), self._select_channels(seen), self._select_heads(steps)

    def _select_heads(self, x: Tensor, dim: int = -1) -> Tensor:
        """Return what belongs to the heads of this rank, of a dim with the heads of a group."""
        return x.chunk(self.sharing, dim)[self.tensor.index % self.sharing]

    def _select_channels(self, x: Tensor, dim: int = -1) -> Tensor:
        """Return the same of a dim with inputs, keys and queries, of which the last two are those
        of all heads."""
        if self.sharing == 1:
            return x
        of_heads, *of_group = x.split(self.description.widths[1:4], dim)
        return torch.cat((self._select_heads(of_heads, dim), *of_group), dim)

    def _split_channels(self, mixed_BSGX: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the inputs of heads [B, S, G, R, V], keys and queries [B, S, G, K]."""
        if self.convolution_bias is not None:
            mixed_BSGX = mixed_BSGX + self._select_channels(self.convolution_bias.use())
        x, key, query = F.silu(mixed_BSGX).split(self.channel_widths, -1)
        return x.unflatten(-1, (-1, self.description.head_dim)), key, query

    def _compute_decays(self, steps_BSGR: Tensor) -> tuple[Tensor, Tensor]:
        """Return the steps and the logarithms of decays in at least fp32, [B, S, G, R]."""
        wide = torch.promote_types(steps_BSGR.dtype, torch.float32)
        rate, step = (self._select_heads(x.use().to(wide)) for x in (self.rate, self.step))
        smallest, largest = self.description.steps
        steps = F.softplus(steps_BSGR.to(wide) + step).clamp(smallest, largest)
        return steps, -rate.exp() * steps

    def _finish(
        self,
        out_BSGRV: Tensor,
        x_BSGRV: Tensor,
        gate_BSGX: Tensor,
        kept: list[Tensor] | None = None,
    ) -> Tensor:
        """Return outputs of groups with their inputs, normalised and gated, [B, S, G, R * V]."""
        skip = self._select_heads(self.skip.use())
        out = (out_BSGRV + x_BSGRV * skip.unsqueeze(-1)).flatten(3)
        gate = F.silu(gate_BSGX)
        place, eps = self.description.norm_place, self.description.norm_eps
        out = out * gate if place != "before_gate" else out
        if self.gain is not None:
            if self.sharing == 1:
                out = F.rms_norm(out, out.shape[-1:], None, eps)
            else:
                out = _SharedRMSNorm.apply(out, self, [] if kept is None else kept)
            out = out * self._select_heads(self.gain.use())
        return out * gate if place == "before_gate" else out

    def average_squares(self, sums_BSG1: Tensor) -> Tensor:
        """Return the mean over a group of what ranks that share it have each summed over their
        heads."""
        groups, own = self.description.groups, self.tensor.index // self.sharing
        sums_BSGN = F.pad(sums_BSG1, (own, groups - 1 - own))
        mean_BSGN = all_reduce(sums_BSGN, self.tensor).wait() / self.description.width
        return mean_BSGN[..., own : own + 1].contiguous()


class _SharedRMSNorm(torch.autograd.Function):
    """y = x r with r = (mean(x^2) + eps)^(-1/2), where the mean is over all heads of a group, of
    which this rank has some: dx = r (dy - y mean(dy y)). Only the first of two equal passes sums
    squares over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, own: Mamba2, kept: list[Tensor]) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        if not kept:
            squares = own.average_squares(wide.square().sum(-1, keepdim=True))
            kept.append((squares + own.description.norm_eps).rsqrt_())
        ctx.save_for_backward(x, kept[0])
        ctx.own = own
        return (wide * kept[0]).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        x, scale = ctx.saved_tensors
        normed, dy = x.to(scale.dtype) * scale, gradients[0].to(scale.dtype)
        mean = ctx.own.average_squares((dy * normed).sum(-1, keepdim=True))
        return (dy - normed * mean).mul_(scale).to(x.dtype), None, None


def pass_through_states(
    query_BSGK: Tensor,
    key_BSGK: Tensor,
    value_BSGRV: Tensor,
    falls_BSGR: Tensor,
    inputs: MicrobatchInputs,
    chunk: int,
    returns_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return what tokens read of the states of heads, [B, S, G, R, V], and the state after all
    tokens of whole samples, in at least fp32, [B, G, K, R, V], if that is asked for.

    Args:
        query_BSGK: Queries.
        key_BSGK: Keys.
        value_BSGRV: What is added to the states, with keys.
        falls_BSGR: Logarithms of the decays.
        inputs: Of the microbatch.
        chunk: Tokens of a chunk, at most.
        returns_state: Whether samples are whole and the state after them is needed.
    """

    def split(x_BSG: Tensor) -> Tensor:
        """Return chunks with tokens after the groups: [P, C, G, L, ...]."""
        return split_chunks(x_BSG, chunk, inputs.context).transpose(2, 3)

    query, key, value = split(query_BSGK), split(key_BSGK), split(value_BSGRV)
    # Since the chunk's start: logarithms of decays, and how many documents have begun.
    falls = split(falls_BSGR)
    total, falls = falls.sum(-2, keepdim=True), falls.cumsum(-2)
    begins = split_chunks(inputs.begins_BS.int(), chunk, inputs.context)
    number = begins[:, :, None].cumsum(-1)  # [P, C, 1, L]
    last = number[..., -1:]
    same = (number[..., None] == number[..., None, :]).tril()
    before = compute_decays(falls, (number == 0).unsqueeze(-1))
    after = compute_decays(total - falls, (number == last).unsqueeze(-1))
    falls = falls.mT  # [P, C, G, R, L]
    within = compute_decays(falls.unsqueeze(-1) - falls.unsqueeze(-2), same.unsqueeze(-3))
    # One product for all heads of a group, whose key and query they share: [P, C, G, K, R, V].
    added = (key.mT @ (value * after.unsqueeze(-1).to(value)).flatten(-2)).unflatten(
        -1, value.shape[-2:]
    )
    decay = compute_decays(total, (last == 0).unsqueeze(-1)).unsqueeze(-1)
    states = pass_states(decay, added, inputs.context)
    last_state = decay[:, -1] * states[:, -1] + added[:, -1] if returns_state else None
    read = (query @ states.to(query).flatten(-2)).unflatten(-1, value.shape[-2:])
    scores = (query @ key.mT).unsqueeze(3) * within.to(query)
    out = (scores @ value.movedim(-2, 3)).movedim(3, -2) + read * before.unsqueeze(-1).to(read)
    return join_chunks(out.transpose(2, 3), inputs.batch, inputs.length), last_state


def compute_decays(falls: Tensor, sees: Tensor) -> Tensor:
    """Return exp(falls), and zero for what is of another document or comes later."""
    return falls.masked_fill(~sees, -torch.inf).exp()
