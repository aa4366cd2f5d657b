"""Gated delta net (Yang et al. 2024, "Gated Delta Networks: Improving Mamba2 with Delta Rule"),
with the convolution, the norms and the gates that Qwen3-Next has.

Each value head has a matrix S. A token decays it, reads what it has for the token's key, and
corrects that towards the token's value: S_t = a_t S_{t-1} + k_t^T c_t, where the correction is
c_t = b_t (v_t - a_t k_t S_{t-1}). Its output is o_t = q_t S_t.

Within a chunk the corrections are a triangular system, (I + A) C = b V - b a K S, where S is the
state before the chunk and A_ts = b_t a_(s+1..t) k_t k_s for s < t. So products compute all tokens
of a chunk at once (section 3.3 of the paper), in plain torch; there is no kernel of our own yet.
Decays are sums of logarithms, and nothing is divided by one.

Shape legend: B samples, S tokens, G key heads, R value heads of each, K and V their widths, X
numbers for a key head, P pieces of samples, C chunks, L tokens of a chunk, T tokens of a piece with
those before it.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from megaframe.architecture.gated_delta_net import GatedDeltaNetDescription
from megaframe.context_parallel.states import (
    join_chunks,
    pass_states,
    prepend_tokens,
    split_chunks,
)
from megaframe.model.causal_convolution import convolve, convolve_last
from megaframe.model.key_value_cache import StateCache
from megaframe.model.layer_inputs import LayerSetup, MicrobatchInputs
from megaframe.model.norm import Norm
from megaframe.model.pass_state import PassState
from megaframe.ops.autograd import recompute
from megaframe.parameters.parameter import Module, Parameter
from megaframe.tensor_parallel.linear import Elementwise, Linear

_LENGTH_EPS = 1e-6
"""Added to the squared length of a query or a key."""


class GatedDeltaNet(Module):
    """The heads of this tensor rank for the tokens of this context rank."""

    def __init__(self, name: str, description: GatedDeltaNetDescription, setup: LayerSetup) -> None:
        """Make the layers.

        Args:
            name: Of the layer in the model.
            description: What it declares.
            setup: What the run fixes.
        """
        self.description, self.context, self.kernels = description, setup.context, setup.kernels
        self.input = Linear(f"{name}.input", description.input, setup.tensor)
        (convolution,) = description.convolution.declare_parameters(f"{name}.convolution")
        self.convolution = Parameter(convolution)
        self.rate, self.step = map(Parameter, description.decay.declare_parameters(f"{name}.decay"))
        self.norm = Norm(f"{name}.norm", description.norm)
        self.output = Linear(f"{name}.output", description.output, setup.tensor)

    def __call__(
        self, x: Tensor, norm: Elementwise | None, inputs: MicrobatchInputs, state: PassState
    ) -> Tensor:
        """Mix the tokens of samples. The arguments are those of `Attention`."""
        rows = inputs.rows.remove_padding(self.input(x, state.deferred, norm))
        heads_BSGX = rows.view(inputs.batch, inputs.length, -1, sum(self.description.widths))
        cache = state.find_state(self)
        if cache is None:
            # Only the result of the product is kept; all that follows is computed again from it.
            out_BSGX = recompute(partial(self._mix, inputs), heads_BSGX)
        elif cache.tensors:
            out_BSGX = self._mix_token(heads_BSGX, cache)
        else:
            out_BSGX = self._mix(inputs, heads_BSGX, cache)
        return self.output(inputs.rows.pad(out_BSGX.flatten(0, 1).flatten(1)), state.deferred)

    def _mix(
        self, inputs: MicrobatchInputs, heads_BSGX: Tensor, cache: StateCache | None = None
    ) -> Tensor:
        """Return the gated outputs of heads, [B, S, G, R * V], and put what is left of whole
        samples into a cache."""
        seen_BSGX, gates = self._split_heads(heads_BSGX)
        seen_PTGX = prepend_tokens(seen_BSGX, self.description.taps - 1, self.context)
        mixed = convolve(seen_PTGX, self.convolution.use(), inputs)
        query, key, value = self._split_channels(mixed)
        gate, strength, falls = self._split_gates(gates)
        heads = query, key, value, strength, falls
        out, state = apply_delta_rule(*heads, inputs, self.description.chunk, cache is not None)
        if cache is not None and state is not None:
            seen = seen_PTGX[:, inputs.length :]
            cache.replace(inputs.length, seen=seen, state=state)
        return self._finish(out, gate)

    def _mix_token(self, heads_B1GX: Tensor, cache: StateCache) -> Tensor:
        """Do the same for one token after those of the cache."""
        assert heads_B1GX.shape[1] == 1, "after the first pass tokens come one by one"
        seen_B1GX, gates = self._split_heads(heads_B1GX)
        seen_BTGX = torch.cat((cache.tensors["seen"], seen_B1GX), 1)
        mixed = convolve_last(seen_BTGX, self.convolution.use())
        query, key, value = (x.squeeze(1) for x in self._split_channels(mixed))
        gate, strength, falls = self._split_gates(gates)
        state = falls.squeeze(1).exp()[..., None, None] * cache.tensors["state"]
        key, value = key.unsqueeze(2).to(state), value.to(state)  # [B, G, 1, K], [B, G, R, V]
        wrong = value - (key.unsqueeze(-2) @ state).squeeze(-2)
        correction = strength.squeeze(1).unsqueeze(-1) * wrong
        state = state + key.unsqueeze(-1) * correction.unsqueeze(-2)
        out = (query[:, :, None, None].to(state) @ state).squeeze(-2).to(query)
        cache.replace(1, seen=seen_BTGX[:, 1:], state=state)
        return self._finish(out.unsqueeze(1), gate)

    def _split_heads(self, heads_BSGX: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the convolution sees, and the rest."""
        widths = self.description.widths
        seen, rest = heads_BSGX.split((sum(widths[:3]), sum(widths[3:])), -1)
        return seen, rest

    def _split_channels(self, mixed_BSGX: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries and keys [B, S, G, K] of length 1, and values [B, S, G, R, V]."""
        key_dim, value_dim = self.description.key_dim, self.description.value_dim
        query, key, value = F.silu(mixed_BSGX).split(self.description.widths[:3], -1)
        query = normalize_length(query) * key_dim**-0.5
        return query, normalize_length(key), value.unflatten(-1, (-1, value_dim))

    def _split_gates(self, gates_BSGX: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gates of outputs [B, S, G, R * V], and in at least fp32 the strengths of
        corrections and the logarithms of decays, [B, S, G, R]."""
        gate, strength, decay = gates_BSGX.split(self.description.widths[3:], -1)
        wide = torch.promote_types(gates_BSGX.dtype, torch.float32)
        rate, step = self.rate.use().to(wide), self.step.use().to(wide)
        falls = -rate.exp() * F.softplus(decay.to(wide) + step)
        return gate, strength.to(wide).sigmoid() * self.description.strongest, falls

    def _finish(self, out_BSGRV: Tensor, gate_BSGX: Tensor) -> Tensor:
        """Return outputs of heads, normalised and gated, [B, S, G, R * V]."""
        return self.norm(out_BSGRV, self.kernels).flatten(3) * F.silu(gate_BSGX)


def normalize_length(x: Tensor) -> Tensor:
    """Return x over its length along the last dim."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = (torch.linalg.vecdot(wide, wide).unsqueeze(-1) + _LENGTH_EPS).rsqrt()
    return (wide * scale).to(x.dtype)


def apply_delta_rule(
    query_BSGK: Tensor,
    key_BSGK: Tensor,
    value_BSGRV: Tensor,
    strength_BSGR: Tensor,
    falls_BSGR: Tensor,
    inputs: MicrobatchInputs,
    chunk: int,
    returns_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return the outputs of value heads, [B, S, G, R, V], and the state after all tokens of whole
    samples, in at least fp32, [B, G, R, K, V], if that is asked for.

    Args:
        query_BSGK: Queries.
        key_BSGK: Keys, of length 1.
        value_BSGRV: Values.
        strength_BSGR: How much of what is wrong a token corrects, b.
        falls_BSGR: Logarithms of the decays, a.
        inputs: Of the microbatch.
        chunk: Tokens of a chunk, at most.
        returns_state: Whether samples are whole and the state after them is needed.
    """

    def split(x_BS: Tensor, heads: int) -> Tensor:
        """Return chunks with tokens after the heads: [P, C, *heads, L, ...]."""
        return split_chunks(x_BS, chunk, inputs.context).movedim(2, 2 + heads)

    query, key = (split(x_BSGK, 1).unsqueeze(3) for x_BSGK in (query_BSGK, key_BSGK))
    value, strength, falls = (split(x, 2) for x in (value_BSGRV, strength_BSGR, falls_BSGR))
    begins = split(inputs.begins_BS.int(), 0)[:, :, None, None]
    # Since the chunk's start: logarithms of decays, and how many documents have begun.
    total, falls, number = falls.sum(-1, keepdim=True), falls.cumsum(-1), begins.cumsum(-1)
    last = number[..., -1:]
    same = (number[..., None] == number[..., None, :]).tril()
    within = compute_decays(falls.unsqueeze(-1) - falls.unsqueeze(-2), same)
    before = compute_decays(falls, number == 0).unsqueeze(-1)
    after = compute_decays(total - falls, number == last).unsqueeze(-1).to(key)
    weights, strength = within.to(key), strength.unsqueeze(-1)
    system = (key @ key.mT).to(within) * within * strength
    wanted = torch.cat((value * strength.to(value), key * (strength * before).to(key)), -1)
    solved = invert(system).to(key) @ wanted
    # Of a state of zero, and of the state before the chunk.
    corrections, removed = solved.split((value.shape[-1], key.shape[-1]), -1)
    added, lost = ((key * after).mT @ solved).split((value.shape[-1], key.shape[-1]), -1)
    kept = torch.diag_embed(compute_decays(total, last == 0).expand(lost.shape[:-1])) - lost
    states = pass_states(kept, added, inputs.context, torch.matmul)
    last_state = kept[:, -1] @ states[:, -1] + added[:, -1] if returns_state else None
    states = states.to(key)
    corrections = corrections - removed @ states
    out = (query * before.to(query)) @ states + (query @ key.mT * weights) @ corrections
    return join_chunks(out.movedim(-2, 2), inputs.batch, inputs.length), last_state


def compute_decays(falls: Tensor, sees: Tensor) -> Tensor:
    """Return exp(falls), and zero for what is of another document or comes later."""
    return falls.masked_fill(~sees, -torch.inf).exp()


def invert(system_LL: Tensor) -> Tensor:
    """Return the inverse of I + A of a matrix A, of which only what is below the diagonal is
    read."""
    identity = torch.eye(system_LL.shape[-1], dtype=system_LL.dtype, device=system_LL.device)
    return torch.linalg.solve_triangular(
        system_LL, identity.expand_as(system_LL), upper=False, unitriangular=True
    )
