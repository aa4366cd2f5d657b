"""Attention to one key for all heads and to compressed keys (DeepSeek-V4, 2026).

Every tensor rank has the matrices that make the latent of queries, the key, and what is compressed,
and multiplies its own rows by them; queries are of its own heads. A key is its value, too, so what
is rotated of it is turned back in outputs, by the positions of queries. The rotated part of a head
comes first, as in the other attention here.

A cache has the keys of all tokens, what they have for compressed keys, and at the last token of
each window the compressed key.

Shape legend: B samples, S tokens of this rank, P its pieces of samples, K places for compressed
keys of a piece, E those of a sample, T tokens so far, N heads of this rank, D width of a head, W
width of what is compressed, R rows of this rank.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from megaframe.architecture.compressed_attention import CompressedAttentionDescription
from megaframe.context_parallel.axis import ContextParallel
from megaframe.context_parallel.states import prepend_tokens
from megaframe.distributed.differentiable import gather_differentiably
from megaframe.model.attention import attend_to_past
from megaframe.model.compressor import (
    CompressedIndexer,
    Compressor,
    find_window_ends,
    pad_documents,
)
from megaframe.model.group_products import GroupProducts
from megaframe.model.index_scores import IndexedHeads
from megaframe.model.indexer import gather_choice
from megaframe.model.key_value_cache import LayerCache
from megaframe.model.layer_inputs import LayerSetup, MicrobatchInputs
from megaframe.model.norm import Norm
from megaframe.model.pass_state import PassState
from megaframe.model.query_key_norm import divide_by_size
from megaframe.ops.window_attention import WindowSight, attend_in_windows
from megaframe.parameters.parameter import Module, Parameter
from megaframe.tensor_parallel.linear import Elementwise, Linear


class CompressedAttention(Module):
    """The heads of this tensor rank for the tokens of this context rank."""

    def __init__(
        self, name: str, description: CompressedAttentionDescription, setup: LayerSetup
    ) -> None:
        """Make the layers.

        Args:
            name: Of the layer in the model.
            description: What it declares.
            setup: What the run fixes.
        """
        self.description, self.setup, self.rotary = description, setup, description.rotary
        self.sizes = description.query_rank, description.head_dim
        self.down = Linear(f"{name}.down", description.down, setup.tensor)
        self.query_norm = Norm(f"{name}.query_norm", description.query_norm)
        self.key_norm = Norm(f"{name}.key_norm", description.key_norm)
        self.query = Linear(f"{name}.query", description.query, setup.tensor)
        (spec,) = description.sinks.declare_parameters(f"{name}.sinks")
        self.sinks = Parameter(spec)
        self.compressor: Compressor | None = None
        self.indexer: CompressedIndexer | None = None
        of_keys = self.rotary, setup
        if description.compressor is not None:
            inner = f"{name}.compressor"
            self.compressor = Compressor(inner, description.compressor, *of_keys)
        if description.indexer is not None:
            inner = f"{name}.indexer"
            self.indexer = CompressedIndexer(inner, description.indexer, *of_keys)
        self.groups = GroupProducts(f"{name}.groups", description.groups)
        self.output = Linear(f"{name}.output", description.output, setup.tensor)

    def __call__(
        self, x: Tensor, norm: Elementwise | None, inputs: MicrobatchInputs, state: PassState
    ) -> Tensor:
        """Attend within samples. The arguments are those of `Attention`."""
        deferred, kernels = state.deferred, self.setup.kernels
        # Rows and latents are normalised once, for all products.
        x = x if norm is None else norm(x, kernels)
        latent, key = self.down(x, deferred).split(self.sizes, 1)
        latent = self.query_norm(latent, kernels)
        query_BSND, key_BSD = self._make_heads(latent, key, inputs, state)
        parts = [] if self.compressor is None else [self.compressor.make_parts(x, inputs, deferred)]
        indexed: IndexedHeads | None = None
        if self.indexer is not None:
            with torch.no_grad():
                heads = self.indexer.make_heads(x, latent, inputs, deferred)
                parts.append(self.indexer.compressor.make_parts(x, inputs, deferred))
            # Without compressed keys, which depend on what is in a cache.
            indexed = IndexedHeads(heads[0], heads[0].new_empty(0), heads[1])
        cache = state.find_cache(self, None)
        if cache is not None and cache.length:
            out_TV = self._attend_to_past(query_BSND, key_BSD, parts, indexed, cache, inputs)
        else:
            out_TV = self._attend_to_sample(query_BSND, key_BSD, parts, indexed, cache, inputs)
        out_BSND = out_TV.view(query_BSND.shape)
        if self.rotary is not None:
            out_BSND = inputs.rotary[self.rotary].inverse(out_BSND)
        groups = self.description.output_groups // self.setup.tensor.group.size
        made_TO = self.groups(out_BSND.reshape(-1, groups, self.groups.inputs), deferred)
        return self.output(inputs.rows.pad(made_TO), deferred)

    def _make_heads(
        self, latent: Tensor, key: Tensor, inputs: MicrobatchInputs, state: PassState
    ) -> tuple[Tensor, Tensor]:
        """Return rotated queries of this rank's heads [B, S, N, D], and keys of all tokens [B, S,
        D], from latents and keys of this rank's rows."""
        query = inputs.rows.remove_padding(self.query(latent, state.deferred))
        shape = inputs.batch, inputs.length, -1, self.sizes[1]
        query = divide_by_size(query.view(shape), self.description.norm_eps)
        # Not followed by a product, so no linear gathers it. Each rank uses it for its own heads.
        key = self.key_norm(key, self.setup.kernels)
        key = inputs.rows.remove_padding(gather_differentiably(key, self.setup.tensor.group))
        key = key.view(shape)
        if self.rotary is not None:
            rotate = inputs.rotary[self.rotary]
            query, key = rotate(query), rotate(key)
        return query, key.squeeze(2)

    def _attend_to_sample(
        self,
        query_BSND: Tensor,
        key_BSD: Tensor,
        parts: list[Tensor],
        indexed: IndexedHeads | None,
        cache: LayerCache | None,
        inputs: MicrobatchInputs,
    ) -> Tensor:
        """Return the outputs of the heads, [B * S, N * D], and fill the cache, if there is one.

        Args:
            query_BSND: Queries.
            key_BSD: Keys of this rank's tokens.
            parts: What these have for compressed keys, and for those of the indexer.
            indexed: What the indexer computes scores from, without its keys.
            cache: For tokens to come.
            inputs: Of the microbatch.
        """
        compressor, sight = self.compressor, self._make_sight(inputs)
        made: list[Tensor] = []
        if compressor is not None:
            ends = find_window_ends(compressor.description.tokens, inputs)
            sight = replace(sight, compressed=ends.places)
            made.append(compressor(parts[0], ends, inputs))
            if self.indexer is not None and indexed is not None:
                with torch.no_grad():
                    made.append(self.indexer.compressor(parts[1], ends, inputs))
                keys_BED = _gather_keys(inputs.context, made[1])
                with_keys = replace(indexed, keys_BTD=keys_BED)
                sight = self._choose(self.indexer, with_keys, sight, inputs)
        if cache is not None:
            at_ends = [self._put_at_ends(keys_BPKD, inputs) for keys_BPKD in made]
            cache.extend(key_BSD, *chain(*zip(parts, at_ends, strict=True)))
        out = attend_in_windows(
            query_BSND,
            key_BSD,
            made[0] if made else None,
            self.sinks.use(),
            sight,
            partial(_extend, inputs.context, sight.before),
            self.description.score_scale,
        )
        return out.flatten(0, 1).flatten(1)

    def _make_sight(self, inputs: MicrobatchInputs) -> WindowSight:
        """Return what queries see without compressed keys."""
        context, documents = inputs.context, inputs.documents_BS
        if documents is not None:
            documents = pad_documents(documents, inputs.length * context.size)
        return WindowSight(
            window=self.description.window,
            pieces=context.own_pieces,
            length=inputs.length // len(context.own_pieces),
            before=self.description.window - 1 if context.size > 1 else 0,
            documents_BT=documents,
            compressed=None,
            device=inputs.labels_T.device,
        )

    @torch.no_grad()
    def _choose(
        self,
        indexer: CompressedIndexer,
        indexed: IndexedHeads,
        sight: WindowSight,
        inputs: MicrobatchInputs,
    ) -> WindowSight:
        """Return what queries see of what the indexer chooses."""
        places_RC = indexer.choose(indexed, sight, inputs)
        if places_RC is None:
            return sight
        assert sight.compressed is not None, "an indexer chooses compressed keys"
        keys = indexed.keys_BTD.shape[1]
        chosen = replace(gather_choice(places_RC, inputs, self.setup), length=keys)
        return replace(sight, compressed=replace(sight.compressed, chosen=chosen))

    def _put_at_ends(self, keys_BPKD: Tensor, inputs: MicrobatchInputs) -> Tensor:
        """Return compressed keys of whole samples at the last tokens of their windows, [B, S, D],
        for a cache."""
        assert self.compressor is not None
        size, at_ends = self.compressor.description.tokens, keys_BPKD.detach()[:, 0]
        places = at_ends.new_zeros((inputs.batch, inputs.length, at_ends.shape[2]))
        whole = inputs.length // size
        places[:, size - 1 :: size] = at_ends[:, :whole]
        return places

    def _attend_to_past(
        self,
        query_B1ND: Tensor,
        key_B1D: Tensor,
        parts: list[Tensor],
        indexed: IndexedHeads | None,
        cache: LayerCache,
        inputs: MicrobatchInputs,
    ) -> Tensor:
        """Return the outputs of one token of each sample, [B, N * D]. The arguments are those of
        `_attend_to_sample`."""
        indexer = None if self.indexer is None else self.indexer.compressor
        compressors = [each for each in (self.compressor, indexer) if each is not None]
        numbers_B = cache.count_tokens(inputs.batch, key_B1D.device)
        kept: list[Tensor] = []
        for number, (compressor, own) in enumerate(zip(compressors, parts, strict=True)):
            parts_BTW = torch.cat((cache.read()[1 + 2 * number], own), 1)
            kept += own, compressor.compress_last(parts_BTW, numbers_B, inputs)
        cache.extend(key_B1D, *kept)
        (keys_BTD, *of_tokens), seen = cache.see()
        keys_BKD, window = keys_BTD[:, -self.description.window :], self.description.window
        if seen is None:
            seen_BK = torch.ones(keys_BKD.shape[:2], dtype=torch.bool, device=keys_BKD.device)
        else:
            seen_BK = seen[:, 0, 0, -window:]
        if self.compressor is not None:
            size, places = self.compressor.description.tokens, keys_BTD.shape[1]
            last_E = torch.arange(size - 1, places, size, device=numbers_B.device)
            ends_BE = places - 1 - numbers_B[:, None] + last_E
            seen_BE, ends_BE = ends_BE < places, ends_BE.clamp_max(places - 1)
            more_BED, *of_index = (_take(x_BTD, ends_BE) for x_BTD in of_tokens[1::2])
            if self.indexer is not None and indexed is not None:
                with_keys = replace(indexed, keys_BTD=of_index[0])
                seen_BE = self.indexer.mark_largest(with_keys, seen_BE)
            keys_BKD = torch.cat((keys_BKD, more_BED), 1)
            seen_BK = torch.cat((seen_BK, seen_BE), 1)
        keys, scale = keys_BKD.unsqueeze(2), self.description.score_scale
        sinks = self.sinks.use()
        return attend_to_past(query_B1ND, keys, keys, seen_BK[:, None, None], scale, sinks_N=sinks)


def _take(x_BTD: Tensor, places_BE: Tensor) -> Tensor:
    """Return what is at some places of each sample, [B, E, D]."""
    return x_BTD.gather(1, places_BE[..., None].expand(-1, -1, x_BTD.shape[2]))


def _extend(
    context: ContextParallel, before: int, key_BSD: Tensor, compressed: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return keys with those before each piece, and the compressed keys of whole samples."""
    keys = prepend_tokens(key_BSD, before, context).unflatten(0, (len(key_BSD), -1))
    return keys, None if compressed is None else _gather_keys(context, compressed)


def _gather_keys(context: ContextParallel, keys_BPKD: Tensor) -> Tensor:
    """Return the compressed keys of whole samples, [B, E, D], sent in at least fp32."""
    wide = torch.promote_types(keys_BPKD.dtype, torch.float32)
    return context.gather_pieces(keys_BPKD.to(wide)).flatten(1, 2).to(keys_BPKD.dtype)
