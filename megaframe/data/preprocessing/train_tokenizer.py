"""Trains a SentencePiece model on a corpus: lossless, with byte fallback, and reproducible.

Text is not normalised and whitespace is kept, so that decoding restores every document, including
code. If a corpus is larger than the training sample, documents are taken from its files in turn.
This gives a fixed sample from all files without reading all of them.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, get_args

from megaframe.data.indexed_dataset_writer import write_failure
from megaframe.data.preprocessing.corpus_files import CorpusFile, InputError, list_names
from megaframe.data.preprocessing.documents import read_documents
from megaframe.data.preprocessing.input_shards import split_file
from megaframe.data.tokenizer import import_library
from megaframe.errors import UserError
from megaframe.io.regular_file import write_file

Kind = Literal["bpe", "unigram"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_SHARD_BYTES = 1 << 21
_LONGEST_SENTENCE = 16384


def train_sentencepiece(
    inputs: Sequence[CorpusFile],
    output: str,
    vocab: int,
    kind: Kind,
    megabytes: float,
) -> int:
    """Train a SentencePiece model on a sample of text, and write `output`.model.

    Args:
        inputs: Files of the corpus; text is taken from them in turn.
        output: Path of the model, without suffix.
        vocab: Size of the vocabulary, in tokens.
        kind: Algorithm of SentencePiece.
        megabytes: About how much text to train on, in MB (1e6 bytes).

    Returns:
        The number of characters used.

    Raises:
        UserError: If the text cannot be read, or is too little for the vocabulary size.
    """
    sample = _TrainingSample(inputs, int(megabytes * 1e6))
    model = io.BytesIO()
    try:
        import_library("sentencepiece", "").SentencePieceTrainer.train(
            sentence_iterator=iter(sample),
            model_writer=model,
            model_type=kind,
            vocab_size=vocab,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            max_sentence_length=4 * _LONGEST_SENTENCE,
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=-1,
            minloglevel=2,
        )
    except (RuntimeError, OSError, ValueError) as error:
        if sample.error:
            raise sample.error from None
        if not sample.num_characters:
            raise InputError(f"the corpus is empty: no text in {list_names(inputs)}") from None
        reason = str(error).rpartition("] ")[2].partition(" Increase")[0]
        raise UserError(
            f"--vocab {vocab} with {sample.num_characters} characters: {reason}"
        ) from None
    _write(f"{output}.model", model.getvalue())
    return sample.num_characters


class _TrainingSample:
    """Yields lines of documents, taken from the files in turn, until there are `limit`
    characters."""

    def __init__(self, inputs: Sequence[CorpusFile], limit: int) -> None:
        self._inputs = [file.resolve_format() for file in inputs]
        self._limit = limit
        self.num_characters = 0
        self.error: UserError | None = None

    def __iter__(self) -> Iterator[str]:
        try:
            yield from self._read_lines()
        except UserError as error:
            # Kept, because the trainer would replace it with its own error.
            self.error = error
            raise

    def _read_lines(self) -> Iterator[str]:
        documents = interleave([self._read_documents(file) for file in self._inputs])
        for text in documents:
            for line in text.split("\n"):
                for start in range(0, len(line), _LONGEST_SENTENCE):
                    yield line[start : start + _LONGEST_SENTENCE]
            self.num_characters += len(text)
            if self.num_characters >= self._limit:
                return

    def _read_documents(self, file: CorpusFile) -> Iterator[str]:
        for shard in split_file(file, _SHARD_BYTES):
            yield from read_documents(shard)


def interleave(sources: Iterable[Iterator[str]]) -> Iterator[str]:
    """Yield one item of each source in turn, until all are exhausted."""
    waiting = list(sources)
    while waiting:
        remaining = []
        for source in waiting:
            for item in source:
                yield item
                remaining.append(source)
                break
        waiting = remaining


def _write(path: str, content: bytes) -> None:
    try:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        write_file(path, content, sync=True)
    except OSError as error:
        raise UserError(write_failure(path, error)) from None
