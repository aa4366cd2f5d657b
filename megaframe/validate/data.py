"""Checks of the data: sources and splits."""

from __future__ import annotations

from collections.abc import Iterator

from megaframe.config.data import DataConfig
from megaframe.config.keys import format_value
from megaframe.config.model import ModelConfig
from megaframe.config.schema import TrainConfig
from megaframe.config.url import find_url_mistake, is_url

NO_SOURCES = (
    "data.sources is empty; name token files, which tools/preprocess_data.py makes of text: "
    "data.sources=[PATH]"
)

NO_END_TOKEN = (
    "data.document_ends=tokens needs a data.tokenizer, whose end of a document it means; name it, "
    "or give the id of the token: data.document_ends=ID"
)


def find_source_mistakes(model: ModelConfig, data: DataConfig) -> Iterator[str]:
    """Yield a message if there are no data sources, and for each that no run can read."""
    vocab = model.vocab
    if not data.sources:
        yield NO_SOURCES
    for number, source in enumerate(data.sources):
        mistake = find_url_mistake(source.path) if is_url(source.path) else None
        if mistake:
            yield f"data.sources[{number}]: {mistake}"
        for key in ("prefix", "suffix", "middle") if source.fim and vocab else ():
            token = getattr(source.fim, key)
            if isinstance(token, int) and vocab and token >= vocab:
                yield (
                    f"data.sources[{number}].fim.{key}={token} is no token of model.vocab={vocab}; "
                    f"use an id of 0 to {vocab - 1}"
                )
    if data.document_ends == "tokens" and data.tokenizer is None:
        yield NO_END_TOKEN
    if data.packing != "none" and not data.reset_attention:
        yield (
            f"data.packing={data.packing} puts documents into samples that are not to see each "
            "other; use data.reset_attention=true, or data.packing=none"
        )
    if isinstance(data.document_ends, int) and vocab and data.document_ends >= vocab:
        yield (
            f"data.document_ends={data.document_ends} is no token of model.vocab={vocab}; use an "
            f"id of 0 to {vocab - 1}"
        )


def find_split_mistakes(train: TrainConfig, data: DataConfig) -> Iterator[str]:
    """Yield a message for each split that does not sum to 1 or lacks a part that the run reads."""
    splits = {"data.split": data.split}
    for number, source in enumerate(data.sources):
        if source.split is not None:
            splits[f"data.sources[{number}].split"] = source.split
    if len(splits) > len(data.sources) > 0:
        del splits["data.split"]  # unused, because every source has its own split
    totals = {key: sum(split) for key, split in splits.items()}
    wrong = {key: total for key, total in totals.items() if abs(total - 1) > 1e-6}
    for key, total in wrong.items():
        parts = [round(part / total, 6) for part in splits[key]] if total else [1, 0, 0]
        yield (
            f"{key}={format_value(splits[key])} sums to {total:g}, not 1; use {format_value(parts)}"
        )
    text = ", ".join(f"{key}={format_value(split)}" for key, split in splits.items())
    if not wrong and not any(split[0] for split in splits.values()):
        yield f"{text} leaves nothing to train on; use a split such as [0.98, 0.02, 0]"
    if train.eval_every and not any(split[1] for split in splits.values()):
        yield (
            f"train.eval_every={train.eval_every} needs a validation split, and {text} has "
            "none; use train.eval_every=0 or a split such as [0.98, 0.02, 0]"
        )
