"""Keys of several tokens each, and the indexer that chooses among them (DeepSeek-V4, 2026).

A key is a mean of what each token of a window has, with learned weights for each element. Windows
are counted from the beginning of a sample or document. A piece of a sample, as context ranks have
it, makes the keys of the windows that end in it, and is sent what it needs of the tokens before.
Two windows end at least so many tokens apart as they are long, so of each stretch of that length of
a piece there is at most one key, which has its place whatever documents there are.

Shape legend: B samples, S tokens of this rank, P its pieces of samples, L tokens of a piece, K
places for keys of a piece, E those of a sample, T tokens that take part in a key, W width of the
parts of a token, D width of a key, R rows of this rank, H heads of the indexer, C chosen keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from megaframe.architecture.compressed_attention import (
    CompressedIndexerDescription,
    CompressorDescription,
)
from megaframe.architecture.rotary import RotaryDescription
from megaframe.context_parallel.states import prepend_tokens
from megaframe.distributed.differentiable import gather_differentiably
from megaframe.model.index_scores import (
    IndexedHeads,
    compute_scores,
    find_largest,
    iterate_queries,
    rotate_rows,
)
from megaframe.model.layer_inputs import LayerSetup, MicrobatchInputs
from megaframe.model.norm import Norm
from megaframe.model.rotary import Rotary
from megaframe.ops.autograd import recompute
from megaframe.ops.window_attention import CompressedPlaces, WindowSight
from megaframe.parameters.parameter import Module, Parameter
from megaframe.tensor_parallel.deferred_gradients import DeferredGradients
from megaframe.tensor_parallel.linear import Linear


@dataclass(frozen=True)
class WindowEnds:
    """Where windows end in the pieces of this rank.

    Attributes:
        last_BPK: The last token of each within its piece.
        numbers_BPK: Tokens before that one in its sample or document.
        places: Those of all pieces of samples.
    """

    last_BPK: Tensor
    numbers_BPK: Tensor
    places: CompressedPlaces


def find_window_ends(size: int, inputs: MicrobatchInputs) -> WindowEnds:
    """Return where windows of so many tokens end."""
    context, device = inputs.context, inputs.labels_T.device
    own = context.own_pieces
    length, pieces = inputs.length // len(own), 1 if context.size == 1 else 2 * context.size
    numbers_BL = _number_tokens(inputs, length * pieces).unflatten(1, (pieces, length))
    keys = -(-length // size)
    is_end = F.pad((numbers_BL + 1) % size == 0, (0, keys * size - length), value=False)
    is_end = is_end.unflatten(2, (keys, size))
    starts_K = torch.arange(0, keys * size, size, device=device)
    last = (starts_K + is_end.to(torch.int32).argmax(-1)).clamp_max(length - 1)
    starts_P = torch.arange(0, length * pieces, length, device=device)
    ends = torch.where(is_end.any(-1), last + starts_P[:, None], length * pieces)
    last, ends = (x.expand(inputs.batch, -1, -1) for x in (last, ends))
    own_last, own_numbers = (
        torch.stack([x[:, piece] for piece in own], 1)
        for x in (last, numbers_BL.expand(inputs.batch, -1, -1))
    )
    own_numbers = own_numbers.gather(2, own_last)
    return WindowEnds(own_last, own_numbers, CompressedPlaces(ends.flatten(1), keys, size))


def _number_tokens(inputs: MicrobatchInputs, length: int) -> Tensor:
    """Return the number of each token of whole samples in its sample, or document if tokens see
    only their own, int64 [1 or B, length]."""
    places = torch.arange(length, device=inputs.labels_T.device)
    if inputs.documents_BS is None:
        return places[None]
    documents = pad_documents(inputs.documents_BS, length)
    begins = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
    return places - (places * begins).cummax(1).values


def pad_documents(documents_BS: Tensor, length: int) -> Tensor:
    """Return the document numbers of samples with padding, which is a document of its own."""
    return F.pad(documents_BS, (0, length - documents_BS.shape[1]), value=-1)


class Compressor(Module):
    """Makes keys of windows of tokens."""

    def __init__(
        self,
        name: str,
        description: CompressorDescription,
        rotary: RotaryDescription | None,
        setup: LayerSetup,
    ) -> None:
        """Make the layers.

        Args:
            name: What the names of its parameters begin with.
            description: What it declares.
            rotary: How keys are rotated, by the position of their window's first token; None if
                they are not.
            setup: What the run fixes.
        """
        self.description, self.rotary, self.setup = description, rotary, setup
        # Not divided: every tensor rank multiplies its own rows.
        self.product = Linear(f"{name}.product", description.product, setup.tensor)
        (spec,) = description.places.declare_parameters(f"{name}.places")
        self.places = Parameter(spec)
        self.norm = Norm(f"{name}.norm", description.norm)

    def make_parts(
        self, x: Tensor, inputs: MicrobatchInputs, deferred: DeferredGradients
    ) -> Tensor:
        """Return what all tokens of this context rank have for keys, and its weights, [B, S, 2 W].

        Args:
            x: This tensor rank's normalised rows of the stream.
            inputs: Of the microbatch.
            deferred: Computes or keeps the weight gradients.
        """
        parts = gather_differentiably(self.product(x, deferred), self.setup.tensor.group)
        return inputs.rows.remove_padding(parts).view(inputs.batch, inputs.length, -1)

    def __call__(self, parts_BSW: Tensor, ends: WindowEnds, inputs: MicrobatchInputs) -> Tensor:
        """Return the keys of windows that end in this rank's pieces, [B, P, K, D]. Where there is
        no window, the key has no meaning."""
        # Only what tokens have is kept; keys are made again from it, and tokens sent again.
        return recompute(partial(self._compress, ends, inputs), parts_BSW)

    def _compress(self, ends: WindowEnds, inputs: MicrobatchInputs, parts_BSW: Tensor) -> Tensor:
        described = self.description
        parts_PLW = prepend_tokens(parts_BSW, described.reach, inputs.context)
        last_PK = ends.last_BPK.flatten(0, 1)
        taken_T = torch.arange(described.reach + 1, device=last_PK.device)
        piece_P = torch.arange(len(last_PK), device=last_PK.device)[:, None, None]
        seen_PKTW = parts_PLW[piece_P, last_PK[..., None] + taken_T]
        positions_BS = inputs.positions_BS.expand(inputs.batch, inputs.length)
        positions_BPL = positions_BS.unflatten(1, (ends.last_BPK.shape[1], -1))
        first_BPK = positions_BPL.gather(2, ends.last_BPK) - (described.tokens - 1)
        numbers_PK = ends.numbers_BPK.flatten(0, 1)
        keys_PKD = self._make_keys(seen_PKTW, numbers_PK, first_BPK.flatten(0, 1), inputs)
        return keys_PKD.unflatten(0, (inputs.batch, -1))

    def compress_last(
        self, parts_BTW: Tensor, numbers_B: Tensor, inputs: MicrobatchInputs
    ) -> Tensor:
        """Return the key of the window that ends at the last token of each sample, if one does,
        [B, 1, D].

        Args:
            parts_BTW: Of the tokens of samples so far, at least of those that take part.
            numbers_B: Tokens before the last one in each sample.
            inputs: Of a microbatch of this token.
        """
        tokens = self.description.reach + 1
        seen = parts_BTW[:, -tokens:]
        seen = F.pad(seen, (0, 0, tokens - seen.shape[1], 0))
        first_B1 = inputs.positions_BS.expand(inputs.batch, 1) - (self.description.tokens - 1)
        return self._make_keys(seen[:, None], numbers_B[:, None], first_B1, inputs)

    def _make_keys(
        self, seen_PKTW: Tensor, numbers_PK: Tensor, first_PK: Tensor, inputs: MicrobatchInputs
    ) -> Tensor:
        """Return the keys of windows, [P, K, D].

        Args:
            seen_PKTW: What the tokens of each have, and the weights of that.
            numbers_PK: Tokens before the last one in the sample or document.
            first_PK: Position of the first token of each.
            inputs: Of the microbatch.
        """
        described, bias = self.description, self.places.use()
        size, width = described.tokens, described.width
        values, logits = seen_PKTW.chunk(2, -1)
        wide = torch.promote_types(values.dtype, torch.float32)
        if described.overlap:
            values, logits = (_take_halves(x, size, width) for x in (values, logits))
            bias = torch.cat(bias.split(width, 1))
        logits = logits.to(wide) + bias.to(wide)
        if described.overlap:
            has_before = (numbers_PK >= 2 * size - 1)[..., None, None]
            before, own = logits.split(size, 2)
            logits = torch.cat((before.masked_fill(~has_before, -torch.inf), own), 2)
        keys = (logits.softmax(2) * values).sum(2).to(values.dtype)
        keys = self.norm(keys, self.setup.kernels)
        if self.rotary is None:
            return keys
        whole = inputs.whole or inputs.length
        rotate = Rotary(self.rotary, first_PK, keys.dtype, self.setup.kernels, whole)
        return rotate(keys.unsqueeze(2)).squeeze(2)


def _take_halves(x_PKTW: Tensor, size: int, width: int) -> Tensor:
    """Return the parts for the next window of the tokens of the window before, and of the others
    those for their own."""
    before, own = x_PKTW.split(size, 2)
    return torch.cat((before.split(width, 3)[0], own.split(width, 3)[1]), 2)


class CompressedIndexer(Module):
    """Scores compressed keys, and chooses those that attention sees. Nothing of it is trained."""

    def __init__(
        self,
        name: str,
        description: CompressedIndexerDescription,
        rotary: RotaryDescription | None,
        setup: LayerSetup,
    ) -> None:
        """Make the layers. The arguments are those of `Compressor`."""
        self.description, self.rotary, self.setup = description, rotary, setup
        self.query = Linear(f"{name}.query", description.query, setup.tensor)
        self.weights = Linear(f"{name}.weights", description.weights, setup.tensor)
        self.compressor = Compressor(name, description.compressor, rotary, setup)

    def make_heads(
        self, x: Tensor, latent: Tensor, inputs: MicrobatchInputs, deferred: DeferredGradients
    ) -> tuple[Tensor, Tensor]:
        """Return the query heads of this rank's rows, [R, H, D], and their weights, [R, H].

        Args:
            x: This rank's normalised rows of the stream.
            latent: Their normalised latents of queries.
            inputs: Of the microbatch.
            deferred: That of other products.
        """
        heads, width = self.description.heads, self.description.compressor.width
        query = self.query(latent, deferred).view(-1, heads, width)
        if self.rotary is not None:
            query = rotate_rows(inputs.rotary[self.rotary], query, inputs)
        return query, self.weights(x, deferred) * (heads * width) ** -0.5

    def choose(
        self, indexed: IndexedHeads, sight: WindowSight, inputs: MicrobatchInputs
    ) -> Tensor | None:
        """Return the places of the compressed keys that each of this rank's rows may see, int32 [R,
        C]; None if all.

        Args:
            indexed: What scores are computed from, with the compressed keys of samples.
            sight: What queries see otherwise.
            inputs: Of the microbatch.
        """
        keys, top_k = indexed.keys_BTD.shape[1], self.description.top_k
        if not self.description.chooses(keys):
            return None
        places_RC = indexed.keys_BTD.new_zeros((len(indexed.queries_RHD), top_k), dtype=torch.int32)
        own_S = inputs.context.compute_positions(inputs.length, places_RC.device)
        for queries in iterate_queries(indexed, inputs, self.description.heads * keys):
            own = queries.find_own_rows(inputs)
            if own is None:
                continue
            part, rows = own
            scores_QE = compute_scores(indexed, rows, indexed.keys_BTD[part.sample])[-1]
            sample = slice(part.sample, part.sample + 1)
            seen_QE = sight.find_compressed(own_S[part.own], keys, sample)[0]
            scores_QE.masked_fill_(~seen_QE, -torch.inf)
            places_RC[rows] = find_largest(scores_QE, top_k).to(torch.int32)
        return places_RC

    def mark_largest(self, indexed: IndexedHeads, seen_BE: Tensor) -> Tensor:
        """Return which of the compressed keys so far one token of each sample sees, bool [B, E].

        Args:
            indexed: Of these tokens, with the keys.
            seen_BE: Which of the keys there are.
        """
        if not self.description.chooses(seen_BE.shape[1]):
            return seen_BE
        scores = [
            compute_scores(indexed, slice(sample, sample + 1), keys_ED)[-1]
            for sample, keys_ED in enumerate(indexed.keys_BTD)
        ]
        scores_BE = torch.cat(scores).masked_fill_(~seen_BE, -torch.inf)
        places_BC = find_largest(scores_BE, self.description.top_k)
        return torch.zeros_like(seen_BE).scatter_(1, places_BC, True) & seen_BE
