"""States of recurrent mixers by kernels, which pass a state through all tokens of a piece.

Plain code passes states from chunk to chunk between its products (`context_parallel/states.py`).
Where context ranks divide samples, only what a piece does to a state is passed, and what its tokens
read of the state before it is added afterwards.

Shape legend: B samples, S tokens, G key heads, R value heads of each, H value heads, K and V their
widths, P pieces of samples, T tokens of a piece, F the channels that decay by themselves: K, or 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megaframe.context_parallel.states import join_chunks, pass_states, split_chunks
from megaframe.model.layer_inputs import MicrobatchInputs
from megaframe.ops.kernel_dispatch import Kernels

Run = Callable[[], tuple[Tensor, Tensor | None]]
"""Returns outputs, and the state after all tokens if it is known."""


def find_delta_rule(
    kernels: Kernels,
    query_BSGK: Tensor,
    key_BSGK: Tensor,
    value_BSGRV: Tensor,
    strength_BSGR: Tensor,
    falls_BSGRF: Tensor,
    inputs: MicrobatchInputs,
) -> Run | None:
    """Return what computes `apply_delta_rule` of these arguments by a kernel, or None if plain code
    should.

    Args:
        kernels: Of the run.
        query_BSGK: Queries.
        key_BSGK: Keys.
        value_BSGRV: Values.
        strength_BSGR: How much of what is wrong a token corrects.
        falls_BSGRF: Logarithms of the decays.
        inputs: Of the microbatch.
    """
    if not kernels.has("delta_rule"):
        return None
    heads = value_BSGRV.flatten(2, 3), strength_BSGR.flatten(2), falls_BSGRF.flatten(2, 3)
    arguments = _split_pieces(inputs, query_BSGK, key_BSGK, *heads)
    kernel = kernels.find("delta_rule", *arguments)
    if kernel is None:
        return None

    def run() -> tuple[Tensor, Tensor]:
        out_PTHV, state_PHKV = _apply_delta_rule(kernel, inputs, *arguments)
        return _join_pieces(out_PTHV, inputs, value_BSGRV.shape), state_PHKV.unflatten(
            1, value_BSGRV.shape[2:4]
        )

    return run


def _apply_delta_rule(
    kernel: Callable[..., Any],
    inputs: MicrobatchInputs,
    query_PTGK: Tensor,
    key_PTGK: Tensor,
    value_PTHV: Tensor,
    *others: Tensor,
) -> tuple[Tensor, Tensor]:
    if inputs.context.size == 1:
        return kernel(query_PTGK, key_PTGK, value_PTHV, *others)
    key_dim, value_dim = key_PTGK.shape[-1], value_PTHV.shape[-1]
    # Beside the values, which begin with a state of zero, are zeros, which begin with the identity.
    # So these show what the piece does to any state, and what its tokens read of one.
    identity = torch.eye(key_dim, device=value_PTHV.device)
    initial = F.pad(identity, (value_dim, 0)).expand(len(value_PTHV), value_PTHV.shape[2], -1, -1)
    values = F.pad(value_PTHV, (0, key_dim))
    out, final = kernel(query_PTGK, key_PTGK, values, *others, initial)
    out_PTHV, read_PTHK = out.split((value_dim, key_dim), -1)
    added, decay = final.split((value_dim, key_dim), -1)
    states = pass_states(decay.unsqueeze(1), added.unsqueeze(1), inputs.context, torch.matmul)
    far = read_PTHK.transpose(1, 2) @ states.squeeze(1).to(read_PTHK)
    return out_PTHV + far.transpose(1, 2), added


def find_ssd(
    kernels: Kernels,
    query_BSGK: Tensor,
    key_BSGK: Tensor,
    value_BSGRV: Tensor,
    falls_BSGR: Tensor,
    inputs: MicrobatchInputs,
) -> Run | None:
    """Return what computes `pass_through_states` of these arguments by a kernel, or None if plain
    code should.

    Args:
        kernels: Of the run.
        query_BSGK: Queries.
        key_BSGK: Keys.
        value_BSGRV: What is added to the states, with keys.
        falls_BSGR: Logarithms of the decays.
        inputs: Of the microbatch.
    """
    if not kernels.has("ssd"):
        return None
    heads = value_BSGRV.flatten(2, 3), falls_BSGR.flatten(2)
    arguments = _split_pieces(inputs, query_BSGK, key_BSGK, *heads)
    kernel = kernels.find("ssd", *arguments)
    if kernel is None:
        return None

    def run() -> tuple[Tensor, Tensor]:
        out_PTHV, state_PHKV = kernel(*arguments)
        if inputs.context.size > 1:
            query, falls, documents = arguments[0], *arguments[3:]
            out_PTHV = out_PTHV + _read_before(query, falls, documents, state_PHKV, inputs)
        state_PGRKV = state_PHKV.unflatten(1, value_BSGRV.shape[2:4])
        return _join_pieces(out_PTHV, inputs, value_BSGRV.shape), state_PGRKV.movedim(-2, 2)

    return run


def _read_before(
    query_PTGK: Tensor,
    falls_PTH: Tensor,
    documents_PT: Tensor,
    added_PHKV: Tensor,
    inputs: MicrobatchInputs,
) -> Tensor:
    """Return what tokens read of the state before their piece, [P, T, H, V]."""
    decays = falls_PTH.cumsum(1).exp() * (documents_PT == 0).unsqueeze(-1)
    decay = decays[:, -1, :, None, None]
    states = pass_states(decay.unsqueeze(1), added_PHKV.unsqueeze(1), inputs.context).squeeze(1)
    states = states.to(query_PTGK).unflatten(1, (query_PTGK.shape[2], -1))
    read_PGRTV = query_PTGK.transpose(1, 2).unsqueeze(2) @ states
    return read_PGRTV.flatten(1, 2).transpose(1, 2) * decays.unsqueeze(-1).to(states)


def _split_pieces(inputs: MicrobatchInputs, *tensors_BS: Tensor) -> tuple[Tensor, ...]:
    """Return tensors of this rank's pieces, [P, T, ...], and in the end how many documents have
    begun since the start of a piece, int32 [P, T]."""
    length = inputs.length // len(inputs.context.own_pieces)
    pieces = [
        split_chunks(x, length, inputs.context).squeeze(1)
        for x in (*tensors_BS, inputs.begins_BS.int())
    ]
    return *pieces[:-1], pieces[-1].cumsum(1, dtype=torch.int32)


def _join_pieces(out_PTHV: Tensor, inputs: MicrobatchInputs, shape: torch.Size) -> Tensor:
    """Return outputs of pieces as those of samples, in a shape [B, S, G, R, V]."""
    return join_chunks(out_PTHV.unsqueeze(1), inputs.batch, inputs.length).reshape(shape)
