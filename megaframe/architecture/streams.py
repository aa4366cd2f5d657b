"""Several residual streams: how each half of a block reads its input from them and writes what it
adds to them, and how the head reads its own.

Between blocks, and between pipeline stages, a row has all streams of a token, one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from megaframe.architecture.layer import BatchedProduct, HasParameters, SavedActivations
from megaframe.architecture.linear import LinearSpec
from megaframe.architecture.norm import RMSNormDescription
from megaframe.architecture.spec import Constant, Normal, ParamSpec
from megaframe.config.model import HyperConnectionsConfig, ModelConfig


@dataclass(frozen=True)
class ScaleDescription:
    """Learned factors.

    Attributes:
        shape: Of the factors.
    """

    shape: tuple[int, ...]

    def declare_parameters(self, name: str) -> Iterator[ParamSpec]:
        """Yield the spec of the factors, which are 1 at first."""
        yield ParamSpec(f"{name}.gain", self.shape, Constant(1.0), role="gain")


@dataclass(frozen=True)
class SmallMatrixDescription:
    """A matrix that is used again after the gradients of other matrices are complete: in the head,
    whose own are computed in the forward pass, or on both sides of a block. So it counts as a
    gain.

    Attributes:
        shape: Outputs and inputs.
        std: Standard deviation of the initial values.
    """

    shape: tuple[int, ...]
    std: float

    def declare_parameters(self, name: str) -> Iterator[ParamSpec]:
        """Yield the spec of the matrix."""
        yield ParamSpec(f"{name}.gain", self.shape, Normal(self.std), role="gain", decay=True)


@dataclass(frozen=True)
class HyperConnectionDescription:
    """Manifold-constrained hyper-connections of a half (Xie et al. 2025; DeepSeek-V4): it reads
    z = sum of a_i x_i, and stream i becomes the sum of M_ji x_j, plus c_i y where y is what the
    half adds. All a, c and M are computed from the normalised row of all streams, and Sinkhorn's
    iterations make M doubly stochastic.

    Attributes:
        hidden: Width of a stream.
        number: Of streams, n.
        iterations: Of Sinkhorn's algorithm.
        eps: Added to a, and to what it divides by.
        norm_eps: Added to the mean square of a row.
        init_std: Standard deviation of the matrix.
    """

    hidden: int
    number: int
    iterations: int
    eps: float
    norm_eps: float
    init_std: float

    of_block: ClassVar[bool] = False
    """Whether blocks read and write streams, not their halves."""

    @property
    def width(self) -> int:
        """Elements of a row of all streams."""
        return self.number * self.hidden

    @property
    def linears(self) -> list[LinearSpec]:
        """The product."""
        return [self.matrix]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Numbers of a row for reading, for writing, and for mixing."""
        return self.number, self.number, self.number**2

    @property
    def matrix(self) -> LinearSpec:
        """From all streams of a token to its a, c and M; every tensor rank has its own rows."""
        sizes = self.sizes
        fused = {0: sizes}
        return LinearSpec((self.width,), (sum(sizes),), self.init_std, bias=True, fused=fused)

    @property
    def parts(self) -> Mapping[str, HasParameters]:
        """The matrix with what is added to its results, and their factors."""
        return {"weights": self.matrix, "scale": ScaleDescription((len(self.sizes),))}

    def declare_parameters(self, name: str) -> Iterator[ParamSpec]:
        """Yield the specs of all parameters."""
        for part_name, part in self.parts.items():
            yield from part.declare_parameters(f"{name}.{part_name}")

    @property
    def saved(self) -> SavedActivations:
        """What a half keeps beside the streams: its a, c and M, what it read and what it adds."""
        return SavedActivations(values=2 * self.hidden, statistics=sum(self.sizes))

    def list_batched_products(self, seq: int) -> tuple[BatchedProduct, ...]:
        """Return the products of a token's streams with its a, and with its M."""
        return (
            BatchedProduct(seq, 1, self.hidden, self.number),
            BatchedProduct(seq, self.number, self.hidden, self.number),
        )

    @property
    def widest(self) -> int:
        """Half of the elements per token that a backward pass has besides what is kept."""
        return 2 * self.width

    @property
    def moved_elements(self) -> int:
        """Elements per token that a half's elementwise kernels read and write: the streams three
        times, for the weights, to read and to mix, and once as they become; z and y."""
        return 4 * self.width + 2 * self.hidden


@dataclass(frozen=True)
class AltUpDescription:
    """Alternating updates of a block (AltUp, Baykal et al. 2023; Gemma 3n): each stream is
    predicted as p_i = x_i + sum of P_ij x_j, the block computes y from p_0, and stream i becomes
    p_i + (1 + c_i)(y - p_0). P is computed from x_0, and c from y.

    Attributes:
        hidden: Width of a stream.
        number: Of streams, n.
        norm_eps: Added to the mean square of a row.
        init_std: Standard deviation of the matrices.
        gates: Whether the first stream gates an input of the layer's own.
    """

    hidden: int
    number: int
    norm_eps: float
    init_std: float
    gates: bool

    of_block: ClassVar[bool] = True

    @property
    def width(self) -> int:
        """Elements of a row of all streams."""
        return self.number * self.hidden

    @property
    def parts(self) -> Mapping[str, HasParameters]:
        """The norm and the matrix of what P and c are computed from, their own matrices, and
        factors of the first stream where it gates."""
        n = self.number
        scale = {"scale": ScaleDescription((self.hidden,))} if self.gates else {}
        return {
            "norm": RMSNormDescription(self.hidden, self.norm_eps),
            "router": SmallMatrixDescription((n, self.hidden), self.init_std),
            "predict": SmallMatrixDescription((n, n, n), self.init_std),
            "correct": SmallMatrixDescription((n, n), self.init_std),
            **scale,
        }

    def declare_parameters(self, name: str) -> Iterator[ParamSpec]:
        """Yield the specs of all parameters."""
        for part_name, part in self.parts.items():
            yield from part.declare_parameters(f"{name}.{part_name}")

    @property
    def linears(self) -> list[LinearSpec]:
        """None: its matrices count as gains."""
        return []

    @property
    def saved(self) -> SavedActivations:
        """What a block keeps beside the streams: P, p_0 and y."""
        return SavedActivations(values=2 * self.hidden, statistics=self.number**2)

    def list_batched_products(self, seq: int) -> tuple[BatchedProduct, ...]:
        """Return the products of a token's streams with a row of P, and with all of it, and those
        that P and c are computed by."""
        n = self.number
        return (
            BatchedProduct(2 * seq, 1, n, self.hidden),
            BatchedProduct(seq, 1, n * n, n),
            BatchedProduct(seq, 1, n, n),
            BatchedProduct(seq, 1, self.hidden, n),
            BatchedProduct(seq, n, self.hidden, n),
        )

    @property
    def widest(self) -> int:
        """Half of the elements per token that a backward pass has besides what is kept."""
        return 2 * self.width

    @property
    def moved_elements(self) -> int:
        """Elements per token that a block's elementwise kernels read and write: the streams to
        read, to predict and to correct, and as they become; p_0 and y."""
        return 4 * self.width + 4 * self.hidden


@dataclass(frozen=True)
class StreamProjectionsDescription:
    """What makes n - 1 streams of one, or the head's input of all: projections, each with the size
    of the first stream.

    Attributes:
        hidden: Width of a stream.
        number: Of streams.
        init_std: Standard deviation of the matrices.
    """

    hidden: int
    number: int
    init_std: float

    def declare_parameters(self, name: str) -> Iterator[ParamSpec]:
        """Yield the spec of the matrices."""
        shape = self.number - 1, self.hidden, self.hidden
        yield from SmallMatrixDescription(shape, self.init_std).declare_parameters(name)

    @property
    def saved(self) -> SavedActivations:
        """The single stream."""
        return SavedActivations(values=self.hidden)

    def list_batched_products(self, seq: int) -> tuple[BatchedProduct, ...]:
        """Return the products with the matrices."""
        return (BatchedProduct((self.number - 1) * seq, 1, self.hidden, self.hidden),)


@dataclass(frozen=True)
class StreamSumDescription:
    """What the head reads: sum of a_i x_i, as a half does.

    Attributes:
        hidden: Width of a stream.
        number: Of streams.
        eps: Added to a.
        norm_eps: Added to the mean square of a row.
        init_std: Standard deviation of the matrix.
    """

    hidden: int
    number: int
    eps: float
    norm_eps: float
    init_std: float

    def declare_parameters(self, name: str) -> Iterator[ParamSpec]:
        """Yield the specs of the matrix, of what is added to its results, and of their factor."""
        shape = self.number, self.number * self.hidden
        yield from SmallMatrixDescription(shape, self.init_std).declare_parameters(name)
        yield ParamSpec(f"{name}.bias", (self.number,), Constant(0.0), role="bias")
        yield from ScaleDescription((1,)).declare_parameters(f"{name}.scale")

    @property
    def saved(self) -> SavedActivations:
        """The sum, from which a norm starts."""
        return SavedActivations(values=self.hidden)

    def list_batched_products(self, seq: int) -> tuple[BatchedProduct, ...]:
        """Return the products of a token's streams with the matrix and with its a."""
        n = self.number
        return (
            BatchedProduct(seq, 1, n, n * self.hidden),
            BatchedProduct(seq, 1, self.hidden, n),
        )


StreamsDescription = HyperConnectionDescription | AltUpDescription


def describe_streams(model: ModelConfig) -> StreamsDescription | None:
    """Return how blocks read and write streams; None with a single one."""
    streams = model.streams
    if streams is None:
        return None
    if not isinstance(streams, HyperConnectionsConfig):
        gates = model.layer_embeddings is not None
        sizes = model.hidden, streams.number
        return AltUpDescription(*sizes, model.norm_eps, model.init_std, gates)
    return HyperConnectionDescription(
        model.hidden,
        streams.number,
        streams.iterations,
        streams.eps,
        model.norm_eps,
        model.init_std,
    )


def describe_first_streams(model: ModelConfig) -> StreamProjectionsDescription | None:
    """Return what makes streams of embeddings; None if they are copies, or a single one."""
    streams = model.streams
    if streams is None or isinstance(streams, HyperConnectionsConfig):
        return None
    return StreamProjectionsDescription(model.hidden, streams.number, model.init_std)


def describe_last_streams(
    model: ModelConfig,
) -> StreamSumDescription | StreamProjectionsDescription | None:
    """Return what makes the head's input of streams; None with a single one."""
    streams = model.streams
    if not isinstance(streams, HyperConnectionsConfig):
        return describe_first_streams(model)
    return StreamSumDescription(
        model.hidden, streams.number, streams.eps, model.norm_eps, model.init_std
    )
