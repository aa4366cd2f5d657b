"""Both ends of a model: the embedding, with tables that are looked up by number and perhaps a norm,
and the head."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megaframe.architecture.layer import (
    BatchedProduct,
    HasParameters,
    LayerDescription,
    SavedActivations,
)
from megaframe.architecture.layer_embedding import InputProjectionSpec
from megaframe.architecture.limits import Limit
from megaframe.architecture.linear import LinearSpec, TensorTraffic
from megaframe.architecture.model_blocks import describe_norm
from megaframe.architecture.norm import NormDescription, RMSNormDescription
from megaframe.architecture.spec import Constant, Normal, ParamSpec
from megaframe.architecture.streams import (
    StreamProjectionsDescription,
    StreamSumDescription,
    describe_first_streams,
    describe_last_streams,
)
from megaframe.config.model import ModelConfig
from megaframe.config.parallel import ParallelConfig


@dataclass(frozen=True)
class TableDescription:
    """A table of rows.

    Attributes:
        rows: Number of rows.
        width: Width of a row.
        std: Standard deviation of the initial values.
        split: Whether tensor ranks divide the rows; otherwise each has the whole table.
        key: That of the number of rows.
    """

    rows: int
    width: int
    std: float
    split: bool
    key: str = "model.vocab"

    @property
    def limits(self) -> tuple[Limit, ...]:
        """The rows, if tensor ranks divide them."""
        limit = Limit("tensor", self.rows, f"{self.key}={self.rows}", even=False)
        return (limit,) if self.split else ()

    def declare_parameters(self, name: str) -> Iterator[ParamSpec]:
        """Yield the spec of the table."""
        axes = {0: "tensor"} if self.split else {}
        shape, init = (self.rows, self.width), Normal(self.std)
        yield ParamSpec(f"{name}.weight", shape, init, role="embedding", decay=True, axes=axes)

    def count_saved(self, parallel: ParallelConfig) -> SavedActivations:
        """Return what a look-up of token numbers keeps: on each tensor rank with a part of the rows
        the numbers within it, and which are outside."""
        divided = self.split and parallel.tensor > 1
        return SavedActivations(other_bytes=9 * parallel.tensor * divided)

    @property
    def tensor_traffic(self) -> TensorTraffic:
        """The rows of a divided table are scattered, and their gradients gathered."""
        moved = self.width * self.split
        return TensorTraffic(moved, moved, 0)


@dataclass(frozen=True)
class LayerEmbeddingsDescription:
    """What makes the inputs that layers have besides the stream.

    Attributes:
        layers: Number of layers.
        tokens: A table that has those of all layers in a row.
        projection: From the stream to those of all layers.
        norm: Of each that is projected.
        is_short: Whether the table has fewer rows than there are tokens. Those without a row have
            that of token 0.
    """

    layers: int
    tokens: TableDescription
    projection: LinearSpec
    norm: NormDescription
    is_short: bool = False

    @property
    def width(self) -> int:
        """Of one input."""
        return self.norm.width

    @property
    def parts(self) -> Mapping[str, HasParameters]:
        """The table, the projection and the norm."""
        return {
            "layer_tokens": self.tokens,
            "layer_projection": self.projection,
            "layer_norm": self.norm,
        }

    def count_saved(self, parallel: ParallelConfig) -> SavedActivations:
        """Return what the look-up keeps, and what is normalised with a statistic for each layer."""
        projected = SavedActivations(self.projection.results)
        statistics = (self.norm.saved_statistics for _ in range(self.layers))
        return sum(statistics, self.tokens.count_saved(parallel) + projected)


@dataclass(frozen=True, kw_only=True)
class EmbeddingDescription(LayerDescription):
    """What makes the stream from token numbers.

    Attributes:
        tokens: The table of tokens.
        positions: That of learned positions; None without any.
        norm: Of what is looked up; None without one.
        layer_embeddings: What makes further inputs of layers; None without any.
        streams: What makes several streams of one; None if they are copies, or a single one.
    """

    tokens: TableDescription
    positions: TableDescription | None
    norm: NormDescription | None
    layer_embeddings: LayerEmbeddingsDescription | None = None
    streams: StreamProjectionsDescription | None = None

    name = "embedding"

    @property
    def parts(self) -> Mapping[str, HasParameters]:
        """The tables, the norm if there is one, and what makes several streams and further inputs
        of layers."""
        parts: dict[str, HasParameters] = {"tokens": self.tokens}
        more = {"positions": self.positions, "norm": self.norm, "streams": self.streams}
        parts |= {name: part for name, part in more.items() if part is not None}
        return parts if self.layer_embeddings is None else {**parts, **self.layer_embeddings.parts}

    def count_saved(self, parallel: ParallelConfig, recompute: str) -> SavedActivations:
        """Return the numbers of rows that are not those of the microbatch itself: positions are
        counted, on each tensor rank for all tokens. With a norm its input and statistics are kept,
        too."""
        positions = 0 if self.positions is None else 8 * parallel.tensor
        saved = self.tokens.count_saved(parallel) + SavedActivations(other_bytes=positions)
        saved = saved if self.norm is None else saved + self.norm.saved
        saved = saved if self.streams is None else saved + self.streams.saved
        layer_embeddings = self.layer_embeddings
        return saved if layer_embeddings is None else saved + layer_embeddings.count_saved(parallel)

    def list_batched_products(self, seq: int) -> tuple[BatchedProduct, ...]:
        """Return the products of several streams."""
        return () if self.streams is None else self.streams.list_batched_products(seq)

    @property
    def tensor_traffic(self) -> TensorTraffic:
        """What the tables of tokens move; that of positions is whole."""
        moved = self.tokens.tensor_traffic
        layer_embeddings = self.layer_embeddings
        return moved if layer_embeddings is None else moved + layer_embeddings.tokens.tensor_traffic


@dataclass(frozen=True, kw_only=True)
class HeadDescription(LayerDescription):
    """The last norm and the projection to the vocabulary, once for the next token and once for each
    token further ahead, with a norm of its own. Gradients are computed with the loss, in the
    forward pass.

    Attributes:
        norm: Before the projection.
        weight: The projection; None if it is the table of tokens.
        bias: That of the logits; None without one.
        projection: Its product.
        depths: Tokens predicted beyond the next one.
        streams: What makes its input of several streams; None for a single one.
    """

    norm: NormDescription
    weight: ParamSpec | None
    bias: ParamSpec | None
    projection: LinearSpec
    depths: int
    streams: StreamSumDescription | StreamProjectionsDescription | None = None

    name = "head"

    @property
    def parts(self) -> Mapping[str, HasParameters]:
        """The norm of the next token, and what makes its input of several streams."""
        return {"norm": self.norm, **({} if self.streams is None else {"streams": self.streams})}

    def declare_parameters(self, name: str) -> Iterator[ParamSpec]:
        """Yield the specs of all norms, of the projection unless it is tied, and of the bias."""
        yield from super().declare_parameters(name)
        for index in range(self.depths):
            yield from self.norm.declare_parameters(f"predictors.{index}.norm")
        yield from (spec for spec in (self.weight, self.bias) if spec is not None)

    @property
    def linears(self) -> list[LinearSpec]:
        """The projection, for one of the losses."""
        return [self.projection]

    def count_saved(self, parallel: ParallelConfig, recompute: str) -> SavedActivations:
        """Return what one of the losses keeps: what its norm does, the gradient of the normalised
        stream, and what is normalised if it is not the stream itself."""
        saved = self.norm.saved_statistics + SavedActivations(values=self.norm.width)
        return saved if self.streams is None else saved + self.streams.saved

    def list_batched_products(self, seq: int) -> tuple[BatchedProduct, ...]:
        """Return the products of several streams."""
        return () if self.streams is None else self.streams.list_batched_products(seq)

    def count_saved_for_weights(self, parallel: ParallelConfig, recompute: str) -> SavedActivations:
        """Return nothing: the gradient of the projection is computed with the loss."""
        return SavedActivations()

    @property
    def tensor_traffic(self) -> TensorTraffic:
        """What one of the losses moves: the stream is gathered and its gradient scattered."""
        return TensorTraffic(2 * self.norm.width, 0, 0)

    @property
    def tensor_sums(self) -> int:
        """Elements per token, in at least fp32, that one of the losses sums over tensor ranks: the
        largest logit, the sum of exponentials, and the logit of the label."""
        return 3


def get_vocab_size(model: ModelConfig) -> int:
    """Return the rows of the token table.

    Raises:
        ValueError: `model.vocab` is not set. The config must be resolved before a model is built.
    """
    if model.vocab is None:
        raise ValueError("model.vocab is not set: resolve the config with its tokenizer first")
    return model.vocab


def describe_token_table(model: ModelConfig) -> TableDescription:
    """Return the table of tokens. Raises as `get_vocab_size` does."""
    return TableDescription(get_vocab_size(model), model.hidden, model.init_std, split=True)


def describe_position_table(model: ModelConfig, seq: int) -> TableDescription | None:
    """Return the table of learned positions, if the model has one.

    Args:
        model: Has the kind of positions and their number.
        seq: Tokens of a sample, the number of positions if the model does not say it.
    """
    if model.position != "learned":
        return None
    return TableDescription(model.positions or seq, model.hidden, model.init_std, split=False)


def describe_embedding(model: ModelConfig, seq: int) -> EmbeddingDescription:
    """Return the embedding. A vocabulary that is not known yet counts as 0.

    Args:
        model: The section `model`.
        seq: As in `describe_position_table`.
    """
    tokens = TableDescription(model.vocab or 0, model.hidden, model.init_std, split=True)
    norm = describe_norm(model) if model.embedding_norm else None
    positions, inputs = describe_position_table(model, seq), describe_layer_embeddings(model)
    return EmbeddingDescription(
        tokens=tokens,
        positions=positions,
        norm=norm,
        layer_embeddings=inputs,
        streams=describe_first_streams(model),
    )


def describe_layer_embeddings(model: ModelConfig) -> LayerEmbeddingsDescription | None:
    """Return what makes the inputs of layers, if the model has any. A vocabulary that is not known
    yet counts as 0."""
    if model.layer_embeddings is None:
        return None
    width, words = model.layers * model.layer_embeddings, get_layer_words(model)
    key = "model.vocab" if model.layer_vocab is None else "model.layer_vocab"
    return LayerEmbeddingsDescription(
        model.layers,
        TableDescription(words, width, model.init_std, split=True, key=key),
        InputProjectionSpec((model.hidden,), (width,), model.init_std),
        RMSNormDescription(model.layer_embeddings, model.norm_eps),
        words < (model.vocab or 0),
    )


def get_layer_words(model: ModelConfig) -> int:
    """Return the rows of the table of inputs of layers. A vocabulary that is not known yet counts
    as 0."""
    return model.layer_vocab or model.vocab or 0


def describe_head(model: ModelConfig, norm: NormDescription) -> HeadDescription:
    """Return the head. A vocabulary that is not known yet counts as 0.

    Args:
        model: The section `model`.
        norm: That of the stream.
    """
    words = model.vocab or 0
    return HeadDescription(
        norm=norm,
        weight=None if model.tie_embeddings or not words else describe_head_weight(model),
        bias=describe_head_bias(model) if words else None,
        projection=LinearSpec((model.hidden,), (words,), model.init_std, split=0),
        depths=model.mtp_depth,
        streams=describe_last_streams(model),
    )


def describe_head_weight(model: ModelConfig) -> ParamSpec:
    """Return the matrix of an output head that is not tied to the token table."""
    shape, init = (get_vocab_size(model), model.hidden), Normal(model.init_std)
    return ParamSpec("head.weight", shape, init, role="head", decay=True, axes={0: "tensor"})


def describe_head_bias(model: ModelConfig) -> ParamSpec | None:
    """Return the bias of the logits, None if the model has none."""
    if not model.head_bias:
        return None
    shape = (get_vocab_size(model),)
    return ParamSpec("head.bias", shape, Constant(0.0), role="bias", axes={0: "tensor"})
