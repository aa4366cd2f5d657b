"""Evaluation: scores how well a model predicts given tokens, in windows over passages.

Every prediction is counted once, in the first window that contains it. With a stride below the
context, windows overlap, so that counted tokens have more context before them. Held-out text and
the choices of a task both need one log-probability for each counted token, so the same code scores
both.

Shape suffixes: W windows, S inputs of a window, V vocabulary, T counted tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megaframe.architecture.output_head import count_rows_per_chunk
from megaframe.config import DataConfig, ModelConfig, TrainConfig
from megaframe.data.blended_dataset import BlendedDataset, find_document_end
from megaframe.data.gpt_dataset import locate_documents, number_documents
from megaframe.data.indexed_dataset import IndexedDataset
from megaframe.data.microbatch import IGNORE, Microbatch
from megaframe.data.preprocessing.corpus_files import CorpusFile, list_corpus_files
from megaframe.data.preprocessing.documents import read_documents
from megaframe.data.preprocessing.input_shards import split_file
from megaframe.data.split_advice import Split
from megaframe.data.text_bytes import TextBytes
from megaframe.data.token_file_record import TokenizerRecord, check_same_tokenizer, read_record
from megaframe.data.tokenizer import Tokenizer
from megaframe.errors import UserError
from megaframe.model.layer_inputs import move_to_device
from megaframe.pipeline_parallel.stage import Stage

_ENCODED_AT_ONCE = 256
_OTHER_TOKENIZER = "evaluate on token files that the tokenizer of the run made, or on text"
_PIECE = 1 << 24


@dataclass(frozen=True)
class TokenSequence:
    """A sequence of consecutive tokens.

    Attributes:
        tokens: Ids, [N].
        first: Index of the first token that counts, at least 1 because it is predicted from the
            tokens before it.
        beginnings: Bool [N], true where a document begins; None if documents do not matter.
        text_bytes: Bytes of text that each token represents, int64 [N]; None if they are not known.
    """

    tokens: NDArray[np.int64]
    first: int = 1
    beginnings: NDArray[np.bool_] | None = None
    text_bytes: NDArray[np.int64] | None = None


@dataclass(frozen=True)
class Score:
    """The score of the counted tokens of one or more passages.

    Attributes:
        nats: Sum of -log(probability) over the counted tokens.
        tokens: Number of counted tokens.
        bytes: Bytes of text that they represent; 0 if no tokenizer gives them.
        greedy: Whether every one was the most likely token at its position.
    """

    nats: float = 0.0
    tokens: int = 0
    bytes: int = 0
    greedy: bool = True

    def __add__(self, other: Score) -> Score:
        return Score(
            self.nats + other.nats,
            self.tokens + other.tokens,
            self.bytes + other.bytes,
            self.greedy and other.greedy,
        )

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        """exp(loss), limited to what fp64 can represent."""
        return math.exp(min(self.loss, 700.0))

    @property
    def bits_per_byte(self) -> float | None:
        """Bits per byte of text; None if the number of bytes is not known."""
        return self.nats / math.log(2) / self.bytes if self.bytes else None


@dataclass(frozen=True)
class Window:
    """Inputs [begin, end) of a passage. Input i predicts token i + 1. Predictions count from input
    `first` on."""

    begin: int
    end: int
    first: int


def split_windows(passage: TokenSequence, context: int, stride: int) -> Iterator[Window]:
    """Yield windows of at most `context` inputs that together count every token from
    `passage.first` on exactly once. Each window but the first counts at most `stride` tokens and
    fills the rest with the context before them. 1 <= stride <= context.

    Args:
        passage: The tokens.
        context: The most inputs of a window.
        stride: The most tokens that a window counts, from 1 to `context`.
    """
    inputs, counted = len(passage.tokens) - 1, passage.first - 1
    reach = max(context, counted + stride)
    while counted < inputs:
        end = min(inputs, reach)
        yield Window(max(0, end - context), end, counted)
        counted, reach = end, end + stride


@torch.no_grad()
def compute_log_probabilities(stage: Stage, microbatch: Microbatch) -> tuple[Tensor, Tensor]:
    """Return, for each position with a label in order, the label's log-probability (fp32 [T]) and
    whether no token is more likely (bool [T]). The negative log-probability is the plain loss of a
    token, without what `train.label_smoothing` and `train.z_loss` add in training."""
    head = stage.head
    assert head is not None, "the whole model has a head"
    x = stage.compute_hidden(microbatch)
    labels = microbatch.labels_BS.flatten()
    places = (labels != IGNORE).nonzero().flatten()
    words = head.weight.value.shape[0]
    return score_rows(head.compute_logits, x[places], labels[places], words)


def score_rows(
    compute_logits: Callable[[Tensor], Tensor], x_TH: Tensor, labels_T: Tensor, words: int
) -> tuple[Tensor, Tensor]:
    """Return the log-probability of the label of each row, in the type of the logits [T], and
    whether no token is more likely, bool [T]. Logits exist for a chunk of rows at a time.

    Args:
        compute_logits: Returns the logits [rows, V] of rows of the stream.
        x_TH: The stream after the last block.
        labels_T: The labels.
        words: V.
    """
    rows = count_rows_per_chunk(words, host=x_TH.device.type == "cpu")
    likelihoods, greedy = [], []
    for piece, labels in zip(x_TH.split(rows), labels_T.split(rows), strict=True):
        logits_TV = compute_logits(piece)
        at_label = logits_TV.gather(1, labels[:, None])[:, 0]
        likelihoods.append(at_label - logits_TV.logsumexp(-1))
        greedy.append(at_label >= logits_TV.amax(-1))
    return torch.cat(likelihoods), torch.cat(greedy)


def score(
    stage: Stage,
    passages: Sequence[TokenSequence],
    *,
    context: int,
    stride: int,
    batch: int = 8,
    data: DataConfig | None = None,
    report: Callable[[int, int], None] | None = None,
) -> list[Score]:
    """Return the score of each passage.

    Args:
        stage: The whole model.
        passages: What to score.
        context: Tokens of a window; see `split_windows`.
        stride: Tokens that a window counts; see `split_windows`.
        batch: Windows that are scored at once; with `train.fp8`, one at a time.
        data: How document boundaries are treated (`reset_positions`, `reset_attention`,
            `mask_eod`), for passages that have `beginnings`; None uses the defaults.
        report: Called after each batch with the tokens done so far, and all.

    Raises:
        UserError: The stride is outside of 1 to `context`, the context is longer than the learned
            positions of the model, or token ids are outside of the vocabulary.
    """
    _check_sequences(stage.config.model, stage.config.train, passages, context, stride)
    device = stage.parameters()[0].value.device
    if stage.config.train.fp8 != "none":
        batch = 1  # a scale of 8 bits may follow from all rows and their padding

    def compute(microbatch: Microbatch) -> tuple[Tensor, Tensor]:
        return compute_log_probabilities(stage, move_to_device(microbatch, device))

    return score_by(
        compute, passages, context=context, stride=stride, batch=batch, data=data, report=report
    )


def score_by(
    compute: Callable[[Microbatch], tuple[Tensor, Tensor]],
    passages: Sequence[TokenSequence],
    *,
    context: int,
    stride: int,
    batch: int,
    data: DataConfig | None = None,
    report: Callable[[int, int], None] | None = None,
) -> list[Score]:
    """Return the score of each passage, as `score` does, by any model.

    Args:
        compute: As `compute_log_probabilities` of the model, for microbatches on the host.
        passages: As for `score`, and the other arguments as well. They are not checked.
        context: See `passages`.
        stride: See `passages`.
        batch: See `passages`.
        data: See `passages`.
        report: See `passages`.
    """
    windows = [
        (number, window)
        for number, passage in enumerate(passages)
        for window in split_windows(passage, context, stride)
    ]
    # Windows of similar length go into the same batch, to keep padding small.
    windows.sort(key=lambda pair: pair[1].begin - pair[1].end)
    scores = [Score()] * len(passages)
    done, total = 0, sum(window.end - window.first for _, window in windows)
    for start in range(0, len(windows), batch):
        batch_windows = windows[start : start + batch]
        microbatch = _make_microbatch([(passages[n], w) for n, w in batch_windows], data)
        labels = microbatch.labels_BS.numpy()
        likelihoods, greedy = compute(microbatch)
        counts = (labels != IGNORE).sum(1).tolist()
        parts = zip(likelihoods.cpu().split(counts), greedy.cpu().split(counts), strict=True)
        for (number, window), row, (nats, best) in zip(batch_windows, labels, parts, strict=True):
            size = _count_text_bytes(passages[number], window, row != IGNORE)
            part = Score(-float(nats.double().sum()), len(nats), size, bool(best.all()))
            scores[number] += part
        done += sum(window.end - window.first for _, window in batch_windows)
        if report is not None:
            report(done, total)
    return scores


def _count_text_bytes(passage: TokenSequence, window: Window, counted_S: NDArray[np.bool_]) -> int:
    """Return the bytes of text of the labels of a window that count, of which input i has token
    i + 1 of the passage."""
    if passage.text_bytes is None:
        return 0
    of_labels = passage.text_bytes[window.begin + 1 : window.end + 1]
    return int(of_labels[counted_S[: of_labels.size]].sum())


def _check_sequences(
    model: ModelConfig,
    train: TrainConfig,
    passages: Sequence[TokenSequence],
    context: int,
    stride: int,
) -> None:
    if not 1 <= stride <= context:
        raise UserError(f"stride {stride}: takes 1 to {context}, the tokens of a window")
    for passage in passages:
        check_ids(model, train, passage.tokens, context)


def check_ids(
    model: ModelConfig, train: TrainConfig, tokens: NDArray[np.int64], context: int
) -> None:
    """Raise `UserError` if a model has no row for a token, or no position for one of a window.

    Args:
        model: Has the positions and words.
        train: Has the length of samples.
        tokens: Ids, in any shape.
        context: Tokens of a window.
    """
    rows = model.positions or train.seq
    if model.position == "learned" and context > rows:
        raise UserError(
            f"a context of {context} tokens: the model has learned {rows} positions; use {rows} "
            "or fewer"
        )
    wrong = (tokens < 0) | (tokens >= (model.vocab or 0))
    if wrong.any():
        place = int(wrong.argmax())
        raise UserError(
            f"token {place} is {tokens.flat[place]}, but the model has ids 0 to "
            f"{(model.vocab or 0) - 1}; use the tokenizer that it was trained with"
        )


def _make_microbatch(
    rows: Sequence[tuple[TokenSequence, Window]], data: DataConfig | None
) -> Microbatch:
    """Stack windows into a microbatch with inputs [W, S]. Padding comes after a window's tokens,
    where none of them attends to it, and has no label."""
    shape = len(rows), max(window.end - window.begin for _, window in rows)
    tokens_WS, labels_WS = np.zeros(shape, np.int64), np.full(shape, IGNORE, np.int64)
    beginnings_WT = np.zeros((shape[0], shape[1] + 1), np.bool_)
    for row, (passage, window) in enumerate(rows):
        length, first = window.end - window.begin, window.first - window.begin
        tokens_WS[row, :length] = passage.tokens[window.begin : window.end]
        labels_WS[row, first:length] = passage.tokens[window.first + 1 : window.end + 1]
        if passage.beginnings is not None:
            beginnings_WT[row, : length + 1] = passage.beginnings[window.begin : window.end + 1]
    options = data or DataConfig()
    if options.masks_document_starts:
        labels_WS[beginnings_WT[:, 1:]] = IGNORE
    numbers = number_documents(beginnings_WT[:, :-1]) if options.reset_attention else None
    places = locate_documents(beginnings_WT[:, :-1]) if options.reset_positions else None
    tokens, labels, samples, restarted, apart = (
        None if array is None else torch.from_numpy(array)
        for array in (tokens_WS, labels_WS, np.arange(shape[0]), places, numbers)
    )
    assert tokens is not None and labels is not None and samples is not None
    return Microbatch(tokens, labels, samples, restarted, apart)


def read_sequence(
    text: CorpusFile,
    tokenizer: Tokenizer | None,
    data: DataConfig | None = None,
    record: TokenizerRecord | None = None,
) -> TokenSequence:
    """Read a text, or a token file, as one passage, with its documents end to end.

    Every document of a text ends with `eod`, as in token files. One more `eod` comes before the
    first document, so that every token of the text counts. A token file (PREFIX.bin) is used as it
    is, so all its tokens but the first count.

    Args:
        text: A file or folder, and how it is read; PREFIX.bin is a token file.
        tokenizer: For text and bytes; None if there is none.
        data: Says where documents of a token file end; None: where the index says.
        record: What made the tokens of the run, if it is known.

    Raises:
        UserError: For a file that cannot be read or has nothing to predict, for a text file without
            a tokenizer, and for a token file that another tokenizer made.
    """
    path = text.path
    if path.endswith((".bin", ".idx")):
        sequence = _read_token_file(path[:-4], tokenizer, data or DataConfig(), record)
    elif tokenizer is None:
        raise UserError(f"{path} is text and the run had no data.tokenizer; name one")
    else:
        sequence = _read_text(text, tokenizer)
    if len(sequence.tokens) < 2:
        raise UserError(f"{path} has nothing to predict; give at least one token of text")
    return sequence


def read_split(
    model: ModelConfig,
    train: TrainConfig,
    data: DataConfig,
    split: Split,
    tokenizer: Tokenizer | None = None,
    record: TokenizerRecord | None = None,
) -> Iterator[tuple[str, TokenSequence]]:
    """Yield the name of each source of a run and its documents of a split, end to end.

    Args:
        model: The section `model`.
        train: The section `train`.
        data: The section `data`.
        split: Which of its splits.
        tokenizer: Says how many bytes of text tokens are; None if there is none.
        record: What made the tokens of the run, if it is known.

    Raises:
        UserError: For sources that cannot be read or that another tokenizer made, and if no source
            has a share of the split.
    """
    reader = BlendedDataset(model, train, data, split, seed=0, is_evaluation=True)
    check_same_tokenizer([("the run", record), *reader.list_tokenizers()], _OTHER_TOKENIZER)
    for name, source in reader.list_token_files():
        starts = source.find_document_starts()
        yield name, _make_sequence(source.tokens.astype(np.int64), starts, tokenizer)


def _read_token_file(
    prefix: str, tokenizer: Tokenizer | None, data: DataConfig, record: TokenizerRecord | None
) -> TokenSequence:
    file = IndexedDataset(prefix)
    if file.dtype.kind not in "iu":
        raise UserError(f"{prefix} holds {file.dtype}; token ids are whole numbers")
    file_record = read_record(prefix, len(file.documents) - 1, file.tokens.size)
    made_with = file_record.tokenizer if file_record else None
    used = [("the run", record), (f"the token file {prefix}", made_with)]
    check_same_tokenizer(used, _OTHER_TOKENIZER)
    first, count = file.locate_tokens(0, len(file))
    tokens = file.tokens[first : first + count]
    ends = np.concatenate(([0], np.cumsum(file.lengths, dtype=np.int64)))
    starts = ends[np.asarray(file.documents[:-1], np.int64)]
    end = find_document_end(data)
    if end is not None:
        starts = np.append(0, 1 + np.flatnonzero(tokens == end))
    return _make_sequence(tokens.astype(np.int64), starts[starts < len(tokens)], tokenizer)


def _make_sequence(
    tokens: NDArray[np.int64], starts: NDArray[np.int64], tokenizer: Tokenizer | None
) -> TokenSequence:
    """Return the sequence of tokens with documents that begin at `starts`."""
    begins = _mark_positions(len(tokens), starts)
    sizes = None if tokenizer is None else TextBytes(tokenizer).count_sequence(tokens, begins)
    return TokenSequence(tokens, 1, begins, sizes)


def _read_text(given: CorpusFile, tokenizer: Tokenizer) -> TokenSequence:
    files, _ = list_corpus_files([given])
    texts = (
        text
        for file in files
        for piece in split_file(file, _PIECE)
        for text in read_documents(piece)
    )
    eod = np.array([tokenizer.eod], np.int64)
    parts, lengths, sizes = [eod], [1], [0]
    for ids, size in _encode(texts, tokenizer):
        parts += [ids, eod]
        lengths.append(len(ids) + 1)
        sizes.append(size)
    starts = np.cumsum(lengths, dtype=np.int64)
    sequence = _make_sequence(np.concatenate(parts), starts[:-1], tokenizer)
    # What a tokenizer leaves out of a text or changes is counted where the document ends.
    assert sequence.text_bytes is not None
    sums = np.add.reduceat(sequence.text_bytes, starts - lengths)
    sequence.text_bytes[starts - 1] += np.array(sizes) - sums
    return sequence


def _encode(texts: Iterable[str], tokenizer: Tokenizer) -> Iterator[tuple[NDArray[np.int64], int]]:
    """Yield the token ids of each text and its bytes, without texts that have no token."""
    remaining = iter(texts)
    while batch := list(islice(remaining, _ENCODED_AT_ONCE)):
        for text, ids in zip(batch, tokenizer.encode_batch(batch), strict=True):
            if len(ids):
                yield ids.astype(np.int64), len(text.encode())


def _mark_positions(length: int, places: NDArray[np.int64]) -> NDArray[np.bool_]:
    marks = np.zeros(length, np.bool_)
    marks[places] = True
    return marks
