"""What the layers of a stage need besides their input: what a run fixes once (`LayerSetup`, given
to layers when they are built), and what a microbatch brings (`MicrobatchInputs`, given to every
call). Both are immutable; what changes during a pass is in `model/pass_state.py`.

Rotary tables, attention masks and the keys of dropout masks depend on the microbatch and not on the
block, so they are made once and passed to every block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megaframe.architecture.layer import MixerDescription
from megaframe.architecture.model_blocks import list_mixers
from megaframe.architecture.rotary import RotaryDescription
from megaframe.architecture.window import Chunk, Window
from megaframe.config import ModelConfig, MoEConfig, ParallelConfig, TrainConfig
from megaframe.config.blocks import QueryScaleConfig
from megaframe.context_parallel.axis import ContextParallel
from megaframe.context_parallel.ring_mask import RingMask, find_document_ends
from megaframe.data.microbatch import IGNORE, Microbatch, divide_zigzag
from megaframe.distributed.collectives import ALONE, Group
from megaframe.distributed.device import copy_to_device
from megaframe.distributed.mesh import read_local_world_size
from megaframe.expert_parallel.dispatch import ExpertParallel
from megaframe.model.dropout import AdapterDropout, Dropout, DropoutKeys
from megaframe.model.moe.top_k import choose_experts
from megaframe.model.query_scale import compute_query_scales
from megaframe.model.rotary import Rotary
from megaframe.ops.attention_local import attend_locally
from megaframe.ops.attention_mask import AttentionMask, SequenceMask, number_chunks
from megaframe.ops.fp8 import Fp8Matmul
from megaframe.ops.kernel_dispatch import NO_KERNELS, Kernels
from megaframe.ops.matmul import get_row_multiple
from megaframe.tensor_parallel import symmetric_memory
from megaframe.tensor_parallel.axis import RowPartition, TensorParallel

_PADDING = 2**31 - 1
"""Document number of padding tokens."""


@dataclass(frozen=True)
class LayerRoutines:
    """Plain code of layers that depends on their numbers or on the processor.

    Attributes:
        attend_locally: Computes attention among tokens that are all on this rank.
        choose_experts: Chooses the experts of rows by their scores.
        get_row_multiple: Returns of which number the rows of an expert should be a multiple.
    """

    attend_locally: Callable[..., Tensor] = attend_locally
    choose_experts: Callable[[MoEConfig, Tensor], Tensor] = choose_experts
    get_row_multiple: Callable[[Tensor], int] = get_row_multiple


PLAIN_ROUTINES = LayerRoutines()


@dataclass(frozen=True)
class LayerSetup:
    """What a run fixes for the layers of its model. The default is one rank without kernels.

    Attributes:
        tensor: The ranks that divide matrices and rows, and how products are computed.
        context: The ranks that divide samples.
        experts: The ranks that hold experts.
        routines: Plain code of which a measurement of layers replaces parts.
    """

    tensor: TensorParallel = field(default_factory=TensorParallel)
    context: ContextParallel = field(default_factory=ContextParallel)
    experts: ExpertParallel = field(default_factory=ExpertParallel)
    routines: LayerRoutines = PLAIN_ROUTINES

    @property
    def kernels(self) -> Kernels:
        """Fast kernels that replace plain code."""
        return self.tensor.kernels

    @property
    def recompute(self) -> bool:
        """Whether norms and activations are recomputed in the backward pass instead of kept."""
        return self.tensor.recompute


def make_layer_setup(
    parallel: ParallelConfig,
    train: TrainConfig,
    tensor: Group = ALONE,
    context: ContextParallel | None = None,
    experts: ExpertParallel | None = None,
    kernels: Kernels = NO_KERNELS,
    routines: LayerRoutines = PLAIN_ROUTINES,
) -> LayerSetup:
    """Return what a config fixes for layers on a rank with these groups; by default, on a single
    rank.

    Args:
        parallel: The section `parallel`.
        train: The section `train`.
        tensor: The ranks that divide matrices and rows.
        context: The ranks that divide samples; None for one rank.
        experts: The ranks that hold experts; None for one rank.
        kernels: Fast kernels that replace plain code.
        routines: What plain code is made of.
    """
    fp8 = None if train.fp8 == "none" else Fp8Matmul(train.fp8, kernels)
    node_size = parallel.node_size or read_local_world_size()
    # Torch's fused products do not multiply in 8 bits.
    symmetric = parallel.symmetric_memory == "auto" and fp8 is None
    return LayerSetup(
        TensorParallel(
            tensor,
            chunks=parallel.tensor_chunks,
            symmetric=symmetric and symmetric_memory.is_available(tensor, node_size),
            recompute=train.recompute == "selective",
            kernels=kernels,
            fp8=fp8,
        ),
        context or ContextParallel(),
        experts or ExpertParallel(),
        routines,
    )


@dataclass(frozen=True)
class MicrobatchInputs:
    """What a microbatch brings to the layers of a stage.

    Attributes:
        batch: Samples of the microbatch, B.
        length: Tokens of a sample on this context rank, S.
        rows: Which of the B * S tokens are this tensor rank's rows of the residual stream.
        labels_T: Labels of all tokens, int64 [B * S].
        tokens_T: Their numbers in the vocabulary, int64 [B * S].
        masks: For each window of the model's attention, what tokens attend to: in whole samples, or
            around a ring.
        context: The ranks that divide samples.
        whole: Tokens of a whole sample, if several ranks divide it.
        given_positions_BS: As the microbatch brings them; see `positions_BS`.
        documents_BS: Document numbers of whole samples; None without documents.
        rotary: Rotate queries and keys, for each kind of rotation in the model.
        query_scales: The factors of queries, for each kind in the model.
        dropout: Dropout masks of this rank's rows; None if nothing is random in this pass.
        adapter_dropout: Those of the inputs of adapters; None if nothing of them is dropped.
        gradient_scale: Factor of the gradients of losses, fp64 scalar; None in evaluation.
        label_weights_T: Weights of the labels; None for 1.
    """

    batch: int
    length: int
    rows: RowPartition
    labels_T: Tensor
    tokens_T: Tensor
    masks: Mapping[Window, SequenceMask | RingMask]
    context: ContextParallel = field(default_factory=ContextParallel)
    whole: int | None = None
    given_positions_BS: Tensor | None = None
    documents_BS: Tensor | None = None
    rotary: Mapping[RotaryDescription, Rotary] = field(default_factory=dict)
    query_scales: Mapping[QueryScaleConfig, Tensor] = field(default_factory=dict)
    dropout: Dropout | None = None
    adapter_dropout: AdapterDropout | None = None
    gradient_scale: Tensor | None = None
    label_weights_T: Tensor | None = None

    def find_query_scale(self, scale: QueryScaleConfig | None) -> Tensor | None:
        """Return the factors of a layer's queries; None if it has none."""
        return None if scale is None else self.query_scales[scale]

    # What follows is made when a layer asks for it, so that no pass keeps it for its backward pass.

    @property
    def positions_BS(self) -> Tensor:
        """Position of each token in its sample, or with `data.reset_positions` in its document,
        int64 [B, S] or a shape that broadcasts to it."""
        if self.given_positions_BS is not None:
            return self.given_positions_BS
        return torch.arange(self.length, device=self.labels_T.device)

    @property
    def begins_BS(self) -> Tensor:
        """Whether each token is the first of a sample, or of a document if tokens see only their
        own (`data.reset_attention`), bool [B, S]. So a state starts anew there. The token before
        it may be on another context rank."""
        return ~self.follows_BS(1)

    def follows_BS(self, distance: int) -> Tensor:
        """Return whether the token `distance` before each token is of the same sample, and the same
        document if tokens see only their own, bool [B, S]."""
        context, documents_BS = self.context, self.documents_BS
        if documents_BS is None:
            positions = context.compute_positions(self.length, self.labels_T.device)
            return (positions >= distance).expand(self.batch, self.length)
        # Documents cover whole samples, so that the tokens before a piece are known.
        same_BS = documents_BS[:, distance:] == documents_BS[:, :-distance]
        missing = documents_BS.shape[1] - same_BS.shape[1]
        same_BS = F.pad(same_BS, (missing, 0), value=False)
        return divide_zigzag(same_BS, context.index, context.size, False)

    @property
    def tokens_R(self) -> Tensor:
        """Numbers in the vocabulary of this rank's rows, int64 [rows]; 0 for padding."""
        return self.rows.select(self.tokens_T, 0)

    @property
    def label_weights_R(self) -> Tensor:
        """How much each of this rank's rows counts in the loss, [rows]: 0 without a label, and bool
        if all labels have the weight 1."""
        has_label_R = self.rows.select(self.labels_T, IGNORE) != IGNORE
        if self.label_weights_T is None:
            return has_label_R
        return has_label_R * self.rows.select(self.label_weights_T, 0)

    @property
    def is_token_R(self) -> Tensor:
        """Which of this rank's rows are tokens of samples, bool [rows]. The others are padding that
        makes the parts of tensor or context ranks equal, and nothing reads them."""
        position_S = self.context.compute_positions(self.length, self.labels_T.device)
        is_token_S = position_S < (self.whole or self.length)
        return self.rows.select(is_token_S.repeat(self.batch), False)

    @property
    def sample_R(self) -> Tensor:
        """Index in the microbatch of the sample of each of this rank's rows, int64 [rows]; `batch`
        for padding."""
        token_T = torch.arange(self.rows.tokens, device=self.labels_T.device)
        return self.rows.select(token_T // self.length, self.batch)


def make_microbatch_inputs(
    model: ModelConfig,
    setup: LayerSetup,
    microbatch: Microbatch,
    dtype: torch.dtype,
    dropout_keys: DropoutKeys | None = None,
    gradient_scale: Tensor | None = None,
    mixers: Sequence[MixerDescription] | None = None,
) -> MicrobatchInputs:
    """Return what `microbatch` brings to layers.

    Args:
        model: The model's config.
        setup: What the run fixes.
        microbatch: This context rank's part of the samples.
        dtype: Type of the activations.
        dropout_keys: Keys of the dropout masks; None in evaluation and if nothing is random.
        gradient_scale: As in `MicrobatchInputs`.
        mixers: The layers that it is made for; None for all of the model.
    """
    batch, length = microbatch.tokens_BS.shape
    rows = RowPartition(batch * length, setup.tensor.group.size, setup.tensor.group.index)
    dropout = adapter_dropout = None
    mixers = list_mixers(model) if mixers is None else mixers
    positions_BS, sample_length = get_token_positions(microbatch), microbatch.whole or length
    rotary = {
        kind: Rotary(kind, positions_BS, dtype, setup.kernels, sample_length)
        for kind in {mixer.rotary for mixer in mixers}
        if kind is not None
    }
    query_scales = {
        scale: compute_query_scales(scale, positions_BS, dtype)
        for scale in {mixer.query_scale for mixer in mixers}
        if scale is not None
    }
    if dropout_keys is not None:
        positions = setup.context.compute_positions(length, microbatch.tokens_BS.device)
        # The number of each token in the run, whatever the layout: dropout masks are a function of
        # it.
        token_T = (microbatch.samples_B[:, None] * sample_length + positions).flatten()
        dropout = Dropout(model.dropout, dropout_keys, rows.select(token_T))
        if model.adapters is not None and model.adapters.dropout:
            adapter_dropout = AdapterDropout(model.adapters.dropout, dropout_keys, rows, token_T)
    return MicrobatchInputs(
        batch,
        length,
        rows,
        microbatch.labels_BS.flatten(),
        microbatch.tokens_BS.flatten(),
        _make_masks(mixers, microbatch, setup),
        setup.context,
        microbatch.whole,
        microbatch.positions_BS,
        microbatch.documents_BS,
        rotary,
        query_scales,
        dropout,
        adapter_dropout,
        gradient_scale,
        None if microbatch.weights_BS is None else microbatch.weights_BS.flatten(),
    )


def get_token_positions(microbatch: Microbatch) -> Tensor:
    """Return the position of each token, int64 [B, S] or a shape that broadcasts to it: [S] when
    the microbatch has no positions of its own."""
    # Parts of samples, as context ranks have them, bring positions of their own.
    if microbatch.positions_BS is not None:
        return microbatch.positions_BS
    tokens = microbatch.tokens_BS
    return torch.arange(tokens.shape[1], device=tokens.device)


def _make_masks(
    mixers: Sequence[MixerDescription], microbatch: Microbatch, setup: LayerSetup
) -> Mapping[Window, SequenceMask | RingMask]:
    """Return what tokens attend to through each window of the mixers."""
    (batch, length), device = microbatch.tokens_BS.shape, microbatch.tokens_BS.device
    context = setup.context
    sample_length, documents = length * context.size, microbatch.documents_BS
    if documents is not None:
        # Padding after the end of samples is a document of its own, with a number above all others.
        documents = F.pad(documents, (0, sample_length - documents.shape[1]), value=_PADDING)

    def make_mask(window: Window) -> AttentionMask:
        size = window.size if isinstance(window, Chunk) else window
        # A window as long as the sample hides nothing, and no window is the faster case.
        if size is None or size >= sample_length:
            return AttentionMask(None, documents)
        if isinstance(window, Chunk):  # to attention chunks are documents
            chunks = number_chunks(size, documents, batch, sample_length, device)
            return AttentionMask(size, chunks)
        return AttentionMask(size, documents)

    windows = {mixer.window for mixer in mixers if mixer.has_scores}
    masks = {window: make_mask(window) for window in windows}
    if context.ring.size == 1:
        return {
            window: SequenceMask(mask, batch, sample_length, device)
            for window, mask in masks.items()
        }
    # After the exchange of heads a rank has the tokens of all its neighbours.
    per_rank = length * context.heads.size
    # Once for all windows, because the host waits for the device here; chunks have ends of their
    # own.
    ends = find_document_ends(documents, per_rank)
    return {
        window: RingMask(
            context.ring,
            per_rank,
            mask,
            ends
            if mask.documents_BS is documents
            else find_document_ends(mask.documents_BS, per_rank),
            setup.kernels,
        )
        for window, mask in masks.items()
    }


def move_to_device(microbatch: Microbatch, device: torch.device) -> Microbatch:
    """Return the microbatch with its tensors on a device."""
    tensors: dict[str, Any] = {
        name: copy_to_device(value, device)
        for name, value in vars(microbatch).items()
        if isinstance(value, Tensor)
    }
    return replace(microbatch, **tensors)
