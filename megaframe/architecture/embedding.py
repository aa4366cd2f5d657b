"""Tables that are looked up by number, tokens and learned positions, and the weight of the head."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megaframe.architecture.limits import Limit
from megaframe.architecture.spec import Normal, ParamSpec
from megaframe.config.model import ModelConfig


@dataclass(frozen=True)
class TableDescription:
    """A table of rows.

    Attributes:
        rows: Number of rows.
        width: Width of a row.
        std: Standard deviation of the initial values.
        split: Whether tensor ranks divide the rows; otherwise each has the whole table.
    """

    rows: int
    width: int
    std: float
    split: bool

    @property
    def limits(self) -> tuple[Limit, ...]:
        """The rows, if tensor ranks divide them."""
        limit = Limit("tensor", self.rows, f"model.vocab={self.rows}", even=False)
        return (limit,) if self.split else ()

    def declare_parameters(self, name: str) -> Iterator[ParamSpec]:
        """Yield the spec of the table."""
        axes = {0: "tensor"} if self.split else {}
        shape, init = (self.rows, self.width), Normal(self.std)
        yield ParamSpec(f"{name}.weight", shape, init, role="embedding", decay=True, axes=axes)


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


def describe_head_weight(model: ModelConfig) -> ParamSpec:
    """Return the matrix of an output head that is not tied to the token table."""
    shape, init = (get_vocab_size(model), model.hidden), Normal(model.init_std)
    return ParamSpec("head.weight", shape, init, role="head", decay=True, axes={0: "tensor"})
