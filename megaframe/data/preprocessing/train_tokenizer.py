"""Trains a tokenizer on a corpus, lossless and reproducible: a SentencePiece model with byte
fallback, or a byte-level BPE of Hugging Face's tokenizers, which may have control tokens for chats.

Text is not normalised and whitespace is kept, so that decoding restores every document, including
code. If a corpus is larger than the training sample, documents are taken from its files in turn.
This gives a fixed sample from all files without reading all of them.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from megaframe.data.indexed_dataset_writer import write_failure
from megaframe.data.preprocessing.corpus_files import CorpusFile, InputError, list_names
from megaframe.data.preprocessing.documents import read_documents
from megaframe.data.preprocessing.input_shards import split_file
from megaframe.data.tokenizer import import_library
from megaframe.errors import UserError
from megaframe.io.regular_file import write_file

Kind = Literal["bpe", "unigram", "byte-bpe"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""Two of SentencePiece, and one of Hugging Face's tokenizers."""
_SHARD_BYTES = 1 << 21
_LONGEST_SENTENCE = 16384


def train_sentencepiece(
    inputs: Sequence[CorpusFile],
    output: str,
    vocab: int,
    kind: Literal["bpe", "unigram"],
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


@dataclass(frozen=True)
class ControlTokens:
    """Tokens that no text contains.

    Attributes:
        end: Ends documents.
        others: Such as those at which a message of a chat begins and ends.
        answer_end: That of these which ends an answer of a chat; empty if none does.
        template: Source of the chat template; empty for none.
    """

    end: str = "<|endoftext|>"
    others: Sequence[str] = ()
    answer_end: str = ""
    template: str = ""

    def check(self) -> None:
        """Raise `UserError` for a token that is empty or named twice, or for an end of answers that
        is none of them."""
        names = [self.end, *self.others]
        twice = sorted({name for name in names if names.count(name) > 1 or not name})
        if twice:
            raise UserError(f"control tokens {names}: {twice} is empty or named twice")
        if self.answer_end and self.answer_end not in names:
            raise UserError(
                f"--answer-end {self.answer_end} is no control token; use one of {names}"
            )


def train_byte_bpe(
    inputs: Sequence[CorpusFile],
    folder: str,
    vocab: int,
    megabytes: float,
    control: ControlTokens = ControlTokens(),
) -> int:
    """Train a byte-level BPE on a sample of text. Writes a folder with its `tokenizer.json` and,
    beside it, what programs that chat need: `tokenizer_config.json`, `generation_config.json` and
    `chat_template.jinja`.

    Args:
        inputs: Files of the corpus; text is taken from them in turn.
        folder: Where to write.
        vocab: Size of the vocabulary, with bytes and control tokens.
        megabytes: About how much text to train on, in MB (1e6 bytes).
        control: Its control tokens.

    Returns:
        The number of characters used.

    Raises:
        UserError: If the text cannot be read, or is too little for the vocabulary size.
    """
    control.check()
    library, names = import_library("tokenizers", "hf"), [control.end, *control.others]
    least = len(library.pre_tokenizers.ByteLevel.alphabet()) + len(names)
    if vocab < least:
        raise UserError(
            f"--vocab {vocab} is too few: bytes and control tokens alone are {least}; use {least} "
            "or more"
        )
    model = library.Tokenizer(library.models.BPE())
    model.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=names,
        initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    sample = _TrainingSample(inputs, int(megabytes * 1e6), keeps_lines=True)
    try:
        model.train_from_iterator(iter(sample), trainer)
    except UserError:
        raise sample.error or InputError("the corpus cannot be read") from None
    if not sample.num_characters:
        raise InputError(f"the corpus is empty: no text in {list_names(inputs)}")
    if model.get_vocab_size() < vocab:
        raise UserError(
            f"--vocab {vocab} with {sample.num_characters} characters: there are only "
            f"{model.get_vocab_size()} different tokens; use that, or more text"
        )
    answer_end = control.answer_end or control.end
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": control.end}
    ends = sorted({model.token_to_id(control.end), model.token_to_id(answer_end)})
    _write(f"{folder}/tokenizer_config.json", json.dumps(settings, indent=2).encode())
    _write(f"{folder}/generation_config.json", json.dumps({"eos_token_id": ends}).encode())
    if control.template:
        _write(f"{folder}/chat_template.jinja", control.template.encode())
    _write(f"{folder}/tokenizer.json", model.to_str().encode())
    return sample.num_characters


class _TrainingSample:
    """Yields lines of documents, taken from the files in turn, until there are `limit` characters.

    Args:
        inputs: The files.
        limit: Characters.
        keeps_lines: Whether lines keep their ends.
    """

    def __init__(
        self, inputs: Sequence[CorpusFile], limit: int, *, keeps_lines: bool = False
    ) -> None:
        self._inputs = [file.resolve_format() for file in inputs]
        self._limit, self._keeps_lines = limit, keeps_lines
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
            for line in text.splitlines(keepends=True) if self._keeps_lines else text.split("\n"):
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
