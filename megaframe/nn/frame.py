"""Frame: what all blocks of a stage share for one microbatch.

Rotary tables, the attention mask and the key of the dropout masks depend on the microbatch, not on
the block, so they are made once and handed to every block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megaframe.comm import Group, Pending
from megaframe.config import Model
from megaframe.kernels import NO_KERNELS, Kernels
from megaframe.microbatch import IGNORE, Microbatch
from megaframe.nn.among import Among
from megaframe.nn.context import Context
from megaframe.nn.dropout import Dropout, Keys
from megaframe.nn.eight_bits import EightBits
from megaframe.nn.moe.dispatch import Places
from megaframe.nn.ring import Circle, document_ends
from megaframe.nn.rotary import Rotary
from megaframe.nn.scratch import Scratch
from megaframe.nn.seam import Seam
from megaframe.nn.tally import Tally
from megaframe.nn.tiles import Sight
from megaframe.nn.turns import Turn
from megaframe.parameter import Parameter
from megaframe.plan.windows import windows
from megaframe.product import product

_FILLING = 2**31 - 1
"""The number of the document that filling is."""


class Left(NamedTuple):
    """Work that is left for later. fetch: starts bringing what it needs of other ranks, which it is
    given then."""

    work: Callable[..., None]
    fetch: Callable[[], Pending[Tensor]] | None


class Later:
    """Work of a backward pass that nothing waits for: the gradients of weights. It is done at once,
    or with `hold` kept until somebody takes it."""

    def __init__(self) -> None:
        self.hold = False
        self._held: list[Left] = []

    def do(
        self, work: Callable[..., None], fetch: Callable[[], Pending[Tensor]] | None = None
    ) -> None:
        """Do `work` now, or keep it. fetch: as in `Left`."""
        self._held.append(Left(work, fetch))
        if not self.hold:
            for _ in do_all(self.take()):
                pass

    def take(self) -> list[Left]:
        """What is kept, in order; the next work starts a new list."""
        held, self._held = self._held, []
        return held


def do_all(left: Iterable[Left]) -> Iterator[None]:
    """Do work that was left, one after the other; what the next one needs is on its way by then."""
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
    """The residual stream is [rows, hidden]: the tokens of all samples one after the other, dealt
    to the tensor ranks in equal parts, the last ones filled up with rows that nothing reads.

    batch, length: samples and tokens of a sample that this context rank has, B and S. tensor: the
    ranks that split matrices and rows. context: those that divide samples. rotary: turns queries
    and keys, None without rotary positions. seen: by the window of a layer what tokens see of each
    other, among whole samples or where keys go round a ring. dropout: the masks of this step's
    rows, None when nothing is dropped. selective: norms and activations are not kept but computed
    again in backward. chunks: parts in which rows travel between tensor ranks; symmetric: they do
    so within the products of forward (`comm/symmetric.py`). labels_T: of all tokens. experts: where
    they lie. scale: that of the gradients of losses, an fp64 scalar; None in evaluation. tally:
    what is counted on the way. later: where the backward of this microbatch puts its weight
    gradients. turn: what layers call before they wait for a transfer. seam: what blocks tell
    between their parts. scratch: for what ends with a layer. kernels: what computes what has a fast
    form. eight: how the blocks' linears multiply in 8 bits, None where they do not."""

    batch: int
    length: int
    tensor: Group
    context: Context
    rotary: Rotary | None
    seen: Mapping[int | None, Among | Circle]
    dropout: Dropout | None
    selective: bool
    chunks: int
    symmetric: bool
    labels_T: Tensor
    experts: Places
    scale: Tensor | None
    tally: Tally
    later: Later = field(default_factory=Later)
    turn: Turn = field(default_factory=Turn)
    seam: Seam = field(default_factory=Seam)
    scratch: Scratch = field(default_factory=Scratch)
    kernels: Kernels = NO_KERNELS
    eight: EightBits | None = None

    @property
    def tokens(self) -> int:
        """Tokens of the microbatch."""
        return self.batch * self.length

    @property
    def filled(self) -> int:
        """Rows of all tensor ranks together."""
        return rows_of(self.tokens, self.tensor.size) * self.tensor.size

    @property
    def counted(self) -> Tensor:
        """Which of this rank's rows have a loss, bool [rows]."""
        return self.mine(self.labels_T, IGNORE) != IGNORE

    @property
    def samples(self) -> Tensor:
        """Which sample of the microbatch each of this rank's rows is of, int64 [rows]; `batch` for
        filling."""
        rows = torch.arange(self.tokens, device=self.labels_T.device)
        return self.mine(rows // self.length, self.batch)

    def forward_product(self, x_TI: Tensor, matrix_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        """x W^T plus a bias, [T, O]."""
        if self.eight is None or not self.eight.takes(*matrix_OI.shape):
            return product(x_TI, matrix_OI.t(), bias_O)
        y_TO = self.eight.product(x_TI, matrix_OI, gradient=False, matrix=True)
        return y_TO if bias_O is None else y_TO.add_(bias_O)

    def input_gradient(self, dy_TO: Tensor, matrix_OI: Tensor) -> Tensor:
        """dy W, [T, I]."""
        if self.eight is None or not self.eight.takes(*matrix_OI.shape):
            return product(dy_TO, matrix_OI)
        return self.eight.product(dy_TO, matrix_OI.t(), gradient=True, matrix=True)

    def add_weight_gradient(
        self, weight: Parameter, dy_TO: Tensor, x_TI: Tensor, of: int | None = None
    ) -> None:
        """Add dy^T x to the gradient of a weight, or of matrix `of` of it."""
        if self.eight is None or not self.eight.takes(dy_TO.shape[1], x_TI.shape[1]):
            weight.add_product(dy_TO, x_TI, of=of)
        elif not weight.frozen:
            shape = weight.box.shape if of is None else weight.box.shape[1:]
            weight.add(self.eight.weight_gradient(dy_TO, x_TI).view(shape), of)

    def fill(self, x_T: Tensor, value: float = 0) -> Tensor:
        """[tokens, ...] to [filled, ...]."""
        missing = self.filled - self.tokens
        if not missing:
            return x_T
        return F.pad(x_T, (0, 0) * (x_T.dim() - 1) + (0, missing), value=value)

    def mine(self, x_T: Tensor, value: float = 0) -> Tensor:
        """This rank's rows of something that each token has, [tokens, ...] to [rows, ...]."""
        return self.fill(x_T, value).chunk(self.tensor.size)[self.tensor.index]


def rows_of(tokens: int, ranks: int) -> int:
    """Rows that each of `ranks` tensor ranks holds of so many tokens."""
    return -(-tokens // ranks)


def make_frame(
    model: Model,
    microbatch: Microbatch,
    dtype: torch.dtype,
    keys: Keys | None,
    *,
    tensor: Group,
    context: Context,
    selective: bool,
    chunks: int,
    symmetric: bool,
    experts: Places,
    scale: Tensor | None,
    tally: Tally,
    seam: Seam,
    scratch: Scratch,
    kernels: Kernels = NO_KERNELS,
    eight: EightBits | None = None,
) -> Frame:
    """The frame of `microbatch`. keys: of masks; None in evaluation and when nothing is random."""
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
    """Position of each token, int64 [B, S], or [S] when all samples count alike."""
    if microbatch.positions_BS is not None:
        return microbatch.positions_BS
    tokens = microbatch.tokens_BS
    return torch.arange(tokens.shape[1], device=tokens.device)


def _seen(
    model: Model, microbatch: Microbatch, context: Context, kernels: Kernels
) -> Mapping[int | None, Among | Circle]:
    """What is seen through each window of the model, the filling behind samples a document of its
    own, numbered after all others."""
    batch, length = microbatch.tokens_BS.shape
    whole, documents = length * context.size, microbatch.documents_BS
    if documents is not None:
        documents = F.pad(documents, (0, whole - documents.shape[1]), value=_FILLING)
    sights = {
        window: Sight(None if window is None or window >= whole else window, documents)
        for window in windows(model)
    }
    if context.ring.size == 1:
        device = microbatch.tokens_BS.device
        return {window: Among(sight, batch, whole, device) for window, sight in sights.items()}
    own = length * context.heads.size
    ends = document_ends(documents, own)
    return {
        window: Circle(context.ring, own, sight, ends, kernels) for window, sight in sights.items()
    }
