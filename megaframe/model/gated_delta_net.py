"""Gated delta net (Yang et al. 2024, "Gated Delta Networks: Improving Mamba2 with Delta Rule"),
with the convolution, the norms and the gates that Qwen3-Next has.

Each value head has a matrix S. A token decays it, reads what it has for the token's key, and
corrects that towards the token's value: S_t = a_t S_{t-1} + k_t^T c_t, where the correction is
c_t = b_t (v_t - a_t k_t S_{t-1}). Its output is o_t = q_t S_t. In Kimi delta attention (Kimi Linear
2025) each channel of a key has a decay a_t of its own.

Within a chunk the corrections are a triangular system, (I + A) C = b V - b a K S, where S is the
state before the chunk and A_ts = b_t a_(s+1..t) k_t k_s for s < t. So products compute all tokens
of a chunk at once (section 3.3 of the paper), by a kernel or in plain torch. Decays are sums of
logarithms, and nothing is divided by one. Those of channels are inside of the products k_t k_s and
q_t k_s: a pair of tokens lies in the two halves of some block of 2, 4, 8, ... tokens, and both
decays count from its middle (`multiply_decayed`).

Shape legend: B samples, S tokens, G key heads, R value heads of each, K and V their widths, X
numbers for a key head, P pieces of samples, C chunks, L tokens of a chunk, T tokens of a piece with
those before it, F the channels that decay by themselves: K, or 1.
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
from megaframe.model.recurrent_kernels import find_delta_rule
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
        self.down: Linear | None = None
        if description.latents:
            self.down = Linear(f"{name}.down", description.down, setup.tensor)
        ups = description.ups.items()
        self.ups = [Linear(f"{name}.{part}", spec, setup.tensor) for part, spec in ups]
        (convolution,) = description.convolution.declare_parameters(f"{name}.convolution")
        self.convolution = Parameter(convolution)
        self.rate, self.step = map(Parameter, description.decay.declare_parameters(f"{name}.decay"))
        self.gate_function = F.silu if description.gate_function == "silu" else torch.sigmoid
        self.norm = Norm(f"{name}.norm", description.norm)
        self.output = Linear(f"{name}.output", description.output, setup.tensor)

    def __call__(
        self, x: Tensor, norm: Elementwise | None, inputs: MicrobatchInputs, state: PassState
    ) -> Tensor:
        """Mix the tokens of samples. The arguments are those of `Attention`."""
        products = [self.input(x, state.deferred, norm)]
        if self.down is not None:
            ranks = [rank for rank, _ in self.description.latents.values()]
            latents = self.down(x, state.deferred, norm).split(ranks, 1)
            for up, latent in zip(self.ups, latents, strict=True):
                products.append(up(latent, state.deferred))
        widths = [sum(self.description.widths)]
        widths += [width for _, width in self.description.latents.values()]
        made = [
            inputs.rows.remove_padding(rows).view(inputs.batch, inputs.length, -1, width)
            for rows, width in zip(products, widths, strict=True)
        ]
        cache = state.find_state(self)
        if cache is None:
            # Only the results of products are kept; all that follows is computed again from them.
            out_BSGX = recompute(partial(self._mix, inputs, None), *made)
        elif cache.tensors:
            out_BSGX = self._mix_token(cache, *made)
        else:
            out_BSGX = self._mix(inputs, cache, *made)
        return self.output(inputs.rows.pad(out_BSGX.flatten(0, 1).flatten(1)), state.deferred)

    def _mix(self, inputs: MicrobatchInputs, cache: StateCache | None, *made: Tensor) -> Tensor:
        """Return the gated outputs of heads, [B, S, G, R * V], and put what is left of whole
        samples into a cache.

        Args:
            inputs: Of the microbatch.
            cache: None in training.
            made: What the stream makes of key heads, and what the latents do, [B, S, G, X] each.
        """
        seen_BSGX, gates = self._split_heads(made[0])
        seen_PTGX = prepend_tokens(seen_BSGX, self.description.taps - 1, self.context)
        mixed = convolve(seen_PTGX, self.convolution.use(), inputs)
        query, key, value = self._split_channels(mixed)
        gate, strength, falls = self._split_gates(gates, *made[1:])
        heads = query, key, value, strength, falls
        run = find_delta_rule(self.kernels, *heads, inputs)
        if run is None:
            chunk, needs_state = self.description.chunk, cache is not None
            run = partial(apply_delta_rule, *heads, inputs, chunk, needs_state)
        out, state = run()
        if cache is not None and state is not None:
            seen = seen_PTGX[:, inputs.length :]
            cache.replace(inputs.length, seen=seen, state=state)
        return self._finish(out, gate)

    def _mix_token(self, cache: StateCache, *made: Tensor) -> Tensor:
        """Do the same for one token after those of the cache."""
        assert made[0].shape[1] == 1, "after the first pass tokens come one by one"
        seen_B1GX, gates = self._split_heads(made[0])
        seen_BTGX = torch.cat((cache.tensors["seen"], seen_B1GX), 1)
        mixed = convolve_last(seen_BTGX, self.convolution.use())
        query, key, value = (x.squeeze(1) for x in self._split_channels(mixed))
        gate, strength, falls = self._split_gates(gates, *made[1:])
        state = falls.squeeze(1).exp().unsqueeze(-1) * cache.tensors["state"]
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

    def _split_gates(self, gates_BSGX: Tensor, *more: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gates of outputs [B, S, G, R * V], and in at least fp32 the strengths of
        corrections [B, S, G, R] and the logarithms of decays [B, S, G, R, F].

        Args:
            gates_BSGX: What comes from the stream.
            more: What comes from the latents.
        """
        gate, strength, decay = gates_BSGX.split(self.description.widths[3:], -1)
        of_latents = dict(zip(self.description.latents, more, strict=True))
        gate, decay = of_latents.get("gate_up", gate), of_latents.get("decay_up", decay)
        wide = torch.promote_types(gates_BSGX.dtype, torch.float32)
        rate, step = (x.use().to(wide)[..., None] for x in (self.rate, self.step))
        step = step.squeeze(-1) if self.description.decay_rank else step
        decay = decay.unflatten(-1, (self.description.per_group, -1)).to(wide)
        falls = -rate.exp() * F.softplus(decay + step)
        return gate, strength.to(wide).sigmoid() * self.description.strongest, falls

    def _finish(self, out_BSGRV: Tensor, gate_BSGX: Tensor) -> Tensor:
        """Return outputs of heads, normalised and gated, [B, S, G, R * V]."""
        return self.norm(out_BSGRV, self.kernels).flatten(3) * self.gate_function(gate_BSGX)


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
    falls_BSGRF: Tensor,
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
        falls_BSGRF: Logarithms of the decays, a.
        inputs: Of the microbatch.
        chunk: Tokens of a chunk, at most.
        returns_state: Whether samples are whole and the state after them is needed.
    """

    def split(x_BS: Tensor, heads: int) -> Tensor:
        """Return chunks with tokens after the heads: [P, C, *heads, L, ...]."""
        return split_chunks(x_BS, chunk, inputs.context).movedim(2, 2 + heads)

    query, key = (split(x_BSGK, 1).unsqueeze(3) for x_BSGK in (query_BSGK, key_BSGK))
    value, strength, falls = (split(x, 2) for x in (value_BSGRV, strength_BSGR, falls_BSGRF))
    begins = split(inputs.begins_BS.int(), 0)[:, :, None, None, :, None]
    # Since the chunk's start: logarithms of decays, and how many documents have begun.
    each, total, strength = falls, falls.sum(-2, keepdim=True), strength.unsqueeze(-1)
    falls, number = falls.cumsum(-2), begins.cumsum(-2)
    last = number[..., -1:, :]
    same = (number == number.mT).tril()
    before = compute_decays(falls, number == 0)
    after = compute_decays(total - falls, number == last).to(key)
    if falls.shape[-1] == 1:
        within = compute_decays(falls - falls.mT, same)
        system = (key @ key.mT).to(within) * within * strength
        scores = query @ key.mT * within.to(key)
    else:
        system = multiply_decayed(key, key, each).to(falls).masked_fill(~same, 0) * strength
        scores = multiply_decayed(query, key, each).masked_fill(~same, 0)
    wanted = torch.cat((value * strength.to(value), key * (strength * before).to(key)), -1)
    solved = invert(system).to(key) @ wanted
    # Of a state of zero, and of the state before the chunk.
    corrections, removed = solved.split((value.shape[-1], key.shape[-1]), -1)
    added, lost = ((key * after).mT @ solved).split((value.shape[-1], key.shape[-1]), -1)
    left = compute_decays(total, last == 0).squeeze(-2)
    kept = torch.diag_embed(left.expand(lost.shape[:-1])) - lost
    states = pass_states(kept, added, inputs.context, torch.matmul)
    last_state = kept[:, -1] @ states[:, -1] + added[:, -1] if returns_state else None
    states = states.to(key)
    corrections = corrections - removed @ states
    out = (query * before.to(query)) @ states + scores @ corrections
    return join_chunks(out.movedim(-2, 2), inputs.batch, inputs.length), last_state


def compute_decays(falls: Tensor, sees: Tensor) -> Tensor:
    """Return exp(falls), and zero for what is of another document or comes later."""
    return falls.masked_fill(~sees, -torch.inf).exp()


def multiply_decayed(left_LK: Tensor, right_LK: Tensor, falls_LK: Tensor) -> Tensor:
    """Return the products of each token's row with those of the tokens up to itself, decayed on the
    way by channels, [L, L]; zero above the diagonal.

    Args:
        left_LK: Rows of the tokens that see.
        right_LK: Rows of those that are seen.
        falls_LK: Logarithms of the decays that each token makes, at most 0, in at least fp32.
    """
    length = left_LK.shape[-2]
    missing = (1 << (length - 1).bit_length()) - length  # up to a power of 2
    left, right, falls = left_LK, right_LK, falls_LK
    if missing:
        left, right, falls = (F.pad(x, (0, 0, 0, missing)) for x in (left, right, falls))
    falls = falls.cumsum(-2)
    blocks = (left * right).sum(-1)[..., None, None].expand(*falls.shape[:-1], 1, 1)
    half = 1
    while half < falls.shape[-2]:
        # The halves of each block, [..., blocks, tokens of a half, K].
        (_, late), (early, _), (before, after) = (
            x.unflatten(-2, (-1, 2, half)).unbind(-3) for x in (left, right, falls)
        )
        middle = before.unbind(-2)[-1].unsqueeze(-2)
        late = late * (after - middle).exp().to(left)
        early = early * (middle - before).exp().to(right)
        upper, lower = blocks.unflatten(-3, (-1, 2)).unbind(-3)
        upper = F.pad(upper, (0, half))
        blocks = torch.cat((upper, torch.cat((late @ early.mT, lower), -1)), -2)
        half *= 2
    met = blocks.squeeze(-3)
    return met[..., :length, :length] if missing else met


def invert(system_LL: Tensor) -> Tensor:
    """Return the inverse of I + A of a matrix A, of which only what is below the diagonal is
    read."""
    identity = torch.eye(system_LL.shape[-1], dtype=system_LL.dtype, device=system_LL.device)
    return torch.linalg.solve_triangular(
        system_LL, identity.expand_as(system_LL), upper=False, unitriangular=True
    )
