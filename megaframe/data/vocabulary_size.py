"""The size of the vocabulary, from the config or from its tokenizer."""

from megaframe.config import DataConfig, ModelConfig
from megaframe.data.tokenizer import load_tokenizer
from megaframe.errors import UserError


def find_vocab_size(model: ModelConfig, data: DataConfig) -> int:
    """Return `model.vocab`, or the number of ids of the tokenizer if it was left out.

    Raises:
        UserError: If there is no tokenizer either, or if it has more ids than `model.vocab`.
    """
    name = data.tokenizer
    if name is None:
        if model.vocab is None:
            raise UserError("model.vocab is not set and there is no data.tokenizer to take it from")
        return model.vocab
    size = load_tokenizer(name).vocab_size
    if model.vocab is not None and size > model.vocab:
        raise UserError(
            f"model.vocab={model.vocab} is smaller than the {size} ids of data.tokenizer={name}; "
            f"use {size} or more, or leave model.vocab out"
        )
    return model.vocab or size
