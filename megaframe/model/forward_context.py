"""Frame: what all blocks of a stage share for one microbatch.

Rotary tables, attention masks and the keys of dropout masks depend on the microbatch and not on the
block, so they are made once and passed to every block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megaframe.architecture.windows import windows
from megaframe.config import ModelConfig
from megaframe.context_parallel.context import ContextParallel
from megaframe.context_parallel.ring import RingMask, document_ends
from megaframe.data.microbatch import IGNORE, Microbatch
from megaframe.distributed.collectives import Group, Pending
from megaframe.distributed.interleaving import Turn
from megaframe.expert_parallel.dispatch import ExpertParallel
from megaframe.model.block_boundary import BlockBoundary
from megaframe.model.dropout import Dropout, DropoutKeys
from megaframe.model.fp8 import Fp8Matmul
from megaframe.model.layer_statistics import LayerStatistics
from megaframe.model.rotary import Rotary
from megaframe.ops.attention_tiles import AttentionMask
from megaframe.ops.kernel_dispatch import NO_KERNELS, Kernels
from megaframe.ops.local_attention import SequenceMask
from megaframe.ops.matmul import product
from megaframe.ops.workspace import Workspace
from megaframe.parameters.parameter import Parameter

_FILLING = 2**31 - 1
"""Document number of padding tokens."""


class DeferredGradient(NamedTuple):
    """Deferred work. fetch: starts the transfer of what the work needs from other ranks; its result
    is passed to `work`."""

    work: Callable[..., None]
    fetch: Callable[[], Pending[Tensor]] | None


class DeferredGradients:
    """Weight gradients of a backward pass, which nothing else in it waits for. They are computed at
    once, or with `hold` kept until `take`."""

    def __init__(self) -> None:
        self.hold = False
        self._held: list[DeferredGradient] = []

    def do(
        self, work: Callable[..., None], fetch: Callable[[], Pending[Tensor]] | None = None
    ) -> None:
        """Do `work` now, or keep it if `hold` is set. fetch: as in `DeferredGradient`."""
        self._held.append(DeferredGradient(work, fetch))
        if not self.hold:
            for _ in do_all(self.take()):
                pass

    def take(self) -> list[DeferredGradient]:
        """Return the kept work, in order, and start a new list."""
        held, self._held = self._held, []
        return held


def do_all(left: Iterable[DeferredGradient]) -> Iterator[None]:
    """Do deferred work, one item per step of the iterator. The transfer for the next item starts
    before the current item runs."""
    ahead = ((one.work, None if one.fetch is None else one.fetch()) for one in left)
    here = next(ahead, None)
    while here is not None:
        (work, coming), here = here, next(ahead, None)
        if coming is None:
            work()
        else:
            work(coming.wait())
        yield


@dataclass(frozen=True)
class Frame:
    """What the blocks of a stage share for one microbatch.

    The residual stream is [rows, hidden]: the tokens of all samples, one sample after the other,
    divided over the tensor ranks in equal parts. The last rows are padding that nothing reads.

    batch:     samples of the microbatch, B.
    length:    tokens of a sample on this context rank, S.
    tensor:    the ranks that divide matrices and rows.
    context:   the ranks that divide samples.
    rotary:    rotates queries and keys; None without rotary positions.
    seen:      for each window of the model, what tokens see: among whole samples, or around a ring.
    dropout:   dropout masks of this rank's rows; None if nothing is random in this pass.
    selective: whether norms and activations are recomputed in the backward pass instead of kept.
    chunks:    number of parts in which rows travel between tensor ranks.
    symmetric: whether the forward pass uses torch's fused products and transfers
               (`tensor_parallel/symmetric_memory.py`).
    labels_T:  labels of all tokens.
    experts:   the ranks that hold experts.
    scale:     factor of the gradients of losses, an fp64 scalar; None in evaluation.
    tally:     collects counts and losses of the layers.
    later:     computes or keeps the weight gradients of this microbatch's backward pass.
    turn:      layers call it before they wait for a transfer.
    seam:      is crossed between the two parts of a block.
    scratch:   memory for tensors that end with a layer.
    kernels:   fast kernels that replace plain code.
    eight:     multiplies in 8 bits in the linears and experts of blocks; None if nothing does.
    """

    batch: int
    length: int
    tensor: Group
    context: ContextParallel
    rotary: Rotary | None
    seen: Mapping[int | None, SequenceMask | RingMask]
    dropout: Dropout | None
    selective: bool
    chunks: int
    symmetric: bool
    labels_T: Tensor
    experts: ExpertParallel
    scale: Tensor | None
    tally: LayerStatistics
    later: DeferredGradients = field(default_factory=DeferredGradients)
    turn: Turn = field(default_factory=Turn)
    seam: BlockBoundary = field(default_factory=BlockBoundary)
    scratch: Workspace = field(default_factory=Workspace)
    kernels: Kernels = NO_KERNELS
    eight: Fp8Matmul | None = None

    @property
    def tokens(self) -> int:
        """Tokens of the microbatch on this context rank."""
        return self.batch * self.length

    @property
    def filled(self) -> int:
        """Rows of all tensor ranks together, including padding."""
        return rows_of(self.tokens, self.tensor.size) * self.tensor.size

    @property
    def counted(self) -> Tensor:
        """Which of this rank's rows have a loss, bool [rows]."""
        return self.mine(self.labels_T, IGNORE) != IGNORE

    @property
    def samples(self) -> Tensor:
        """Index in the microbatch of the sample of each of this rank's rows, int64 [rows]; `batch`
        for padding."""
        rows = torch.arange(self.tokens, device=self.labels_T.device)
        return self.mine(rows // self.length, self.batch)

    def forward_product(self, x_TI: Tensor, matrix_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        """Return x W^T plus the bias, [T, O]."""
        if self.eight is None or not self.eight.takes(*matrix_OI.shape):
            return product(x_TI, matrix_OI.t(), bias_O)
        y_TO = self.eight.product(x_TI, matrix_OI, gradient=False, matrix=True)
        return y_TO if bias_O is None else y_TO.add_(bias_O)

    def input_gradient(self, dy_TO: Tensor, matrix_OI: Tensor) -> Tensor:
        """Return dy W, [T, I]."""
        if self.eight is None or not self.eight.takes(*matrix_OI.shape):
            return product(dy_TO, matrix_OI)
        return self.eight.product(dy_TO, matrix_OI.t(), gradient=True, matrix=True)

    def add_weight_gradient(
        self, weight: Parameter, dy_TO: Tensor, x_TI: Tensor, of: int | None = None
    ) -> None:
        """Add dy^T x to the gradient of a weight, or of its matrix `of` along dim 0."""
        if self.eight is None or not self.eight.takes(dy_TO.shape[1], x_TI.shape[1]):
            weight.add_product(dy_TO, x_TI, of=of)
        elif not weight.frozen:
            shape = weight.box.shape if of is None else weight.box.shape[1:]
            weight.add(self.eight.weight_gradient(dy_TO, x_TI).view(shape), of)

    def fill(self, x_T: Tensor, value: float = 0) -> Tensor:
        """Pad [tokens, ...] with `value` to [filled, ...]."""
        missing = self.filled - self.tokens
        if not missing:
            return x_T
        return F.pad(x_T, (0, 0) * (x_T.dim() - 1) + (0, missing), value=value)

    def without_padding(self, x_T: Tensor) -> Tensor:
        """Return the rows [tokens, ...] of [filled, ...]. Without padding it is the tensor itself:
        the gradient of a slice would be copied into zeros of the whole size."""
        return x_T if len(x_T) == self.tokens else x_T[: self.tokens]

    def mine(self, x_T: Tensor, value: float = 0) -> Tensor:
        """Return this rank's rows [rows, ...] of a tensor [tokens, ...] over all tokens."""
        return self.fill(x_T, value).chunk(self.tensor.size)[self.tensor.index]


def rows_of(tokens: int, ranks: int) -> int:
    """Return how many rows each of `ranks` tensor ranks has of `tokens` tokens."""
    return -(-tokens // ranks)


def make_frame(
    model: ModelConfig,
    microbatch: Microbatch,
    dtype: torch.dtype,
    keys: DropoutKeys | None,
    *,
    tensor: Group,
    context: ContextParallel,
    selective: bool,
    chunks: int,
    symmetric: bool,
    experts: ExpertParallel,
    scale: Tensor | None,
    tally: LayerStatistics,
    seam: BlockBoundary,
    scratch: Workspace,
    kernels: Kernels = NO_KERNELS,
    eight: Fp8Matmul | None = None,
) -> Frame:
    """Make the frame of `microbatch`. keys: of the dropout masks; None in evaluation and if nothing
    is random."""
    batch, length = microbatch.tokens_BS.shape
    rotary = None
    if model.position == "rotary":
        rotary = Rotary(model, positions_of(microbatch), dtype, kernels)
    frame = Frame(
        batch,
        length,
        tensor,
        context,
        rotary,
        _seen(model, microbatch, context, kernels),
        None,
        selective,
        chunks,
        symmetric,
        microbatch.labels_BS.flatten(),
        experts,
        scale,
        tally,
        seam=seam,
        scratch=scratch,
        kernels=kernels,
        eight=eight,
    )
    if keys is None:
        return frame
    places = context.places(length, microbatch.tokens_BS.device)
    token_T = (microbatch.samples_B[:, None] * (microbatch.whole or length) + places).flatten()
    return replace(frame, dropout=Dropout(model.dropout, keys, frame.mine(token_T)))


def positions_of(microbatch: Microbatch) -> Tensor:
    """Return the position of each token, int64 [B, S] or a shape that broadcasts to it: [S] when
    the microbatch has no positions of its own."""
    if microbatch.positions_BS is not None:
        return microbatch.positions_BS
    tokens = microbatch.tokens_BS
    return torch.arange(tokens.shape[1], device=tokens.device)


def _seen(
    model: ModelConfig, microbatch: Microbatch, context: ContextParallel, kernels: Kernels
) -> Mapping[int | None, SequenceMask | RingMask]:
    """Return what is visible through each window of the model. Padding after the end of samples is
    a document of its own, with a number above all others."""
    batch, length = microbatch.tokens_BS.shape
    whole, documents = length * context.size, microbatch.documents_BS
    if documents is not None:
        documents = F.pad(documents, (0, whole - documents.shape[1]), value=_FILLING)
    sights = {
        window: AttentionMask(None if window is None or window >= whole else window, documents)
        for window in windows(model)
    }
    if context.ring.size == 1:
        device = microbatch.tokens_BS.device
        return {
            window: SequenceMask(sight, batch, whole, device) for window, sight in sights.items()
        }
    own = length * context.heads.size
    ends = document_ends(documents, own)
    return {
        window: RingMask(context.ring, own, sight, ends, kernels)
        for window, sight in sights.items()
    }
