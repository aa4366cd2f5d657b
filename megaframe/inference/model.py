"""A model on one rank, for use without training: logits, losses, text, and its tensors by name.

`library.py` loads and builds them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from os import PathLike, fspath

import torch
from torch import Tensor

from megaframe.data.microbatch import Microbatch
from megaframe.data.preprocessing.corpus_files import CorpusFile, CorpusFormat
from megaframe.data.token_file_record import TokenizerRecord
from megaframe.data.tokenizer import Tokenizer
from megaframe.errors import UserError
from megaframe.inference.chat import ChatFormat, Message, find_chat_format
from megaframe.inference.evaluation import (
    Score,
    check_ids,
    compute_log_probabilities,
    read_sequence,
    score,
)
from megaframe.inference.generation import (
    SampledIds,
    SampleRequest,
    SamplingOptions,
    StreamedText,
    encode_prompt,
    load_run_tokenizer,
    sample_batch,
    stream_texts,
)
from megaframe.pipeline_parallel.stage import Stage


class Model:
    """A whole model on one device, without gradients and dropout, from `load_model` or
    `build_model`.

    Args:
        stage: What computes it, with its parameters filled.
        recorded: The tokenizer that it was trained with, if that is known.
        tokenizer: KIND:PATH of its tokenizer; default: `data.tokenizer` of the run.

    Attributes:
        config: The run that it belongs to.
        stage: What computes it. Not part of what `import megaframe` promises.
    """

    def __init__(
        self, stage: Stage, recorded: TokenizerRecord | None = None, tokenizer: str | None = None
    ) -> None:
        self.config, self.stage = stage.config, stage
        self._recorded, self._tokenizer_name = recorded, tokenizer

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """Its parameters by the names of checkpoints, such as `blocks.0.mlp.up.weight`, each whole.
        They are the model's own memory: changing a value changes the model."""
        return {parameter.spec.name: parameter.value for parameter in self.stage.parameters()}

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of its text.

        Raises:
            UserError: None is known, or it is not the one that the model was trained with.
        """
        return load_run_tokenizer(
            self.config.data, self.config.model, self._tokenizer_name, self._recorded
        )

    def logits(self, tokens: Tensor | Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        """Return the scores of the token after each position, in at least fp32.

        Args:
            tokens: Ids of one sequence [S] or several of one length [B, S].

        Returns:
            [S, V] or [B, S, V], on the model's device.

        Raises:
            UserError: An id is outside of the vocabulary, or S is above the learned positions.
        """
        tokens_BS, is_single = self._check(tokens, least=1)
        hidden = self.stage.compute_hidden(self._make_microbatch(tokens_BS, tokens_BS))
        logits_BSV = self.stage.compute_logits(hidden).view(*tokens_BS.shape, -1)
        return logits_BSV[0] if is_single else logits_BSV

    def loss(self, tokens: Tensor | Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        """Return the mean loss, in nats per token, of predicting each token but the first of its
        sequence from those before it, without `train.z_loss` and `train.label_smoothing`.

        Args:
            tokens: Ids of one sequence [S] or several of one length [B, S]; S is at least 2.

        Returns:
            A scalar in fp64.

        Raises:
            UserError: As for `logits`.
        """
        tokens_BS, _ = self._check(tokens, least=2)
        microbatch = self._make_microbatch(tokens_BS[:, :-1], tokens_BS[:, 1:])
        return -compute_log_probabilities(self.stage, microbatch)[0].double().mean()

    def evaluate(
        self,
        path: str | PathLike[str],
        *,
        key: str = "text",
        context: int | None = None,
        stride: int | None = None,
        batch: int = 8,
    ) -> Score:
        """Return the score of a text or a token file (PREFIX.bin).

        Args:
            path: jsonl, CSV, TSV or plain text, also `.gz` and `.zst`, Parquet, a folder of these,
                or a token file.
            key: The key or column of the text.
            context: Tokens of a window; default: `train.seq` of the run.
            stride: New tokens that each window scores; default: `context`.
            batch: Windows at a time.

        Returns:
            `loss` (nats per token), `perplexity`, `bits_per_byte` and the number of `tokens`.

        Raises:
            UserError: The file cannot be read, or another tokenizer made it.
        """
        context = context or self.config.train.seq
        named = self._tokenizer_name or self.config.data.tokenizer
        sequence = read_sequence(
            CorpusFile(fspath(path), CorpusFormat(key)),
            self.tokenizer if named else None,
            self.config.data,
            self._recorded,
        )
        (text_score,) = score(
            self.stage,
            [sequence],
            context=context,
            stride=stride or context,
            batch=batch,
            data=self.config.data,
        )
        return text_score

    def generate(
        self,
        prompt: str | None = None,
        *,
        tokens: int = 100,
        temperature: float = 0.8,
        top_k: int = 50,
        top_p: float = 1.0,
        seed: int = 0,
        report: Callable[[int, int], None] | None = None,
    ) -> Iterator[str]:
        """Yield a text in pieces of whole characters, the prompt first; `"".join` makes it one.

        Args:
            prompt: Text to continue; None begins a new document.
            tokens: New tokens, at most; the text also ends with its document.
            temperature: Divides the scores; 0 takes the most likely token.
            top_k: Sample among this many most likely tokens; 0: all.
            top_p: Sample among the most likely tokens that have this probability together.
            seed: The same seed gives the same text.
            report: Called after each new token with their number so far, and `tokens`.

        Raises:
            UserError: A number is out of range, or the prompt has too many tokens.
        """
        pieces = self.generate_batch(
            [prompt],
            tokens=tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seeds=[seed],
            report=report,
        )
        return (piece.text for piece in pieces)

    def generate_batch(
        self,
        prompts: Sequence[str | None],
        *,
        tokens: int = 100,
        temperature: float = 0.8,
        top_k: int = 50,
        top_p: float = 1.0,
        seeds: Sequence[int] | None = None,
        batch: int = 16,
        report: Callable[[int, int], None] | None = None,
    ) -> Iterator[StreamedText]:
        """Yield texts in pieces of whole characters, each with the number of its prompt. A text is
        the same as alone, up to the rounding of sums.

        Args:
            prompts: Texts to continue; None begins a new document.
            tokens: New tokens of a text, at most; other arguments are those of `generate`.
            temperature: Divides the scores; 0 takes the most likely token.
            top_k: Sample among this many most likely tokens; 0: all.
            top_p: Sample among the most likely tokens that have this probability together.
            seeds: Of each prompt; default: 0 for each.
            batch: Texts at a time, at most; when one ends, the next one begins.
            report: Called after each new token with their number so far, and the most there can be.

        Raises:
            UserError: A number is out of range, or a prompt has too many tokens.
        """
        how, tokenizer = SamplingOptions(temperature, top_k, top_p), self.tokenizer
        context, several = self.config.train.seq, len(prompts) > 1
        names = [f"prompt {n}" if several else "prompt" for n in range(1, len(prompts) + 1)]
        starts = [
            encode_prompt(tokenizer, prompt, context, name)
            for prompt, name in zip(prompts, names, strict=True)
        ]
        requests = self._make_requests(starts, tokens, how, seeds, (tokenizer.eod,))
        samples = sample_batch(self.stage, requests, context=context, batch=batch)
        most = tokens * len(prompts)
        return stream_texts(_report_each(samples, most, report), tokenizer)

    @cached_property
    def chat_format(self) -> ChatFormat:
        """How its tokenizer's folder says that it chats.

        Raises:
            UserError: There is no chat template.
        """
        return find_chat_format(self._tokenizer_name or self.config.data.tokenizer, self.tokenizer)

    def chat(
        self,
        messages: Sequence[Message],
        *,
        tokens: int = 100,
        temperature: float = 0.8,
        top_k: int = 50,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> Iterator[str]:
        """Yield an answer to messages in pieces of whole characters.

        Args:
            messages: Each with `role` (system, user, assistant) and `content`, the last one of a
                user.
            tokens: New tokens, at most; other arguments are those of `generate`.
            temperature: Divides the scores; 0 takes the most likely token.
            top_k: Sample among this many most likely tokens; 0: all.
            top_p: Sample among the most likely tokens that have this probability together.
            seed: The same seed gives the same answer.

        Raises:
            UserError: There is no chat template, it fails, or the messages have too many tokens.
        """
        pieces = self.chat_batch(
            [messages],
            tokens=tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seeds=[seed],
        )
        return (piece.text for piece in pieces)

    def chat_batch(
        self,
        chats: Sequence[Sequence[Message]],
        *,
        tokens: int = 100,
        temperature: float = 0.8,
        top_k: int = 50,
        top_p: float = 1.0,
        seeds: Sequence[int] | None = None,
        batch: int = 16,
        report: Callable[[int, int], None] | None = None,
    ) -> Iterator[StreamedText]:
        """Yield answers to several chats in pieces of whole characters, each with the number of its
        chat.

        Args:
            chats: The messages of each, as `chat` takes them.
            tokens: New tokens of an answer, at most; other arguments are those of
                `generate_batch`.
            temperature: Divides the scores; 0 takes the most likely token.
            top_k: Sample among this many most likely tokens; 0: all.
            top_p: Sample among the most likely tokens that have this probability together.
            seeds: Of each chat; default: 0 for each.
            batch: Answers at a time, at most.
            report: Called after each new token with their number so far, and the most there can be.

        Raises:
            UserError: As for `chat`.
        """
        how, context = SamplingOptions(temperature, top_k, top_p), self.config.train.seq
        ends, starts = self.chat_format.ends, self.chat_format.encode(chats)
        for start in starts:
            if not 0 < len(start) < context:
                raise UserError(
                    f"the chat has {len(start)} tokens, and the model sees {context} (train.seq); "
                    "begin a new one"
                )
        requests = self._make_requests(starts, tokens, how, seeds, ends)
        samples = sample_batch(self.stage, requests, context=context, batch=batch)
        answers = (_cut_answer(each, starts[each.number], ends) for each in samples)
        most = tokens * len(chats)
        return stream_texts(_report_each(answers, most, report), self.tokenizer)

    @staticmethod
    def _make_requests(
        starts: Sequence[Sequence[int]],
        tokens: int,
        how: SamplingOptions,
        seeds: Sequence[int] | None,
        ends: Collection[int],
    ) -> list[SampleRequest]:
        """Return a request for each start. Any of the ids `ends` ends its sample."""
        seeds = [0] * len(starts) if seeds is None else seeds
        if len(seeds) != len(starts):
            raise UserError(f"seeds are {len(seeds)} for {len(starts)} texts; give one for each")
        return [
            SampleRequest(start, tokens, how, seed, lambda ids: ids[-1] in ends)
            for start, seed in zip(starts, seeds, strict=True)
        ]

    def _check(
        self, tokens: Tensor | Sequence[int] | Sequence[Sequence[int]], least: int
    ) -> tuple[Tensor, bool]:
        """Return ids as [B, S] on the model's device, and whether they were one sequence."""
        device = self.stage.parameters()[0].value.device
        given = torch.as_tensor(tokens, device=device)
        if given.dim() not in (1, 2) or given.shape[-1] < least or not given.numel():
            raise UserError(
                f"tokens have shape {tuple(given.shape)}; give [S] or [B, S] with S of {least} or "
                "more"
            )
        if given.dtype.is_floating_point or given.dtype.is_complex or given.dtype == torch.bool:
            raise UserError(f"tokens are {given.dtype}; token ids are whole numbers")
        tokens_BS = given.view(-1, given.shape[-1]).long()
        check_ids(self.config.model, self.config.train, tokens_BS.cpu().numpy(), tokens_BS.shape[1])
        return tokens_BS, given.dim() == 1

    @staticmethod
    def _make_microbatch(tokens_BS: Tensor, labels_BS: Tensor) -> Microbatch:
        samples = torch.arange(len(tokens_BS), device=tokens_BS.device)
        return Microbatch(tokens_BS.contiguous(), labels_BS.contiguous(), samples)


def _cut_answer(sampled: SampledIds, start: Sequence[int], ends: Collection[int]) -> SampledIds:
    """Return the ids of an answer, without what it answers and without the id that ends it."""
    answer = sampled.ids[len(start) :]
    has_end = sampled.is_last and answer[-1] in ends
    return sampled._replace(ids=answer[:-1] if has_end else answer)


def _report_each(
    samples: Iterator[SampledIds], most: int, report: Callable[[int, int], None] | None
) -> Iterator[SampledIds]:
    """Yield samples as each gets a new id, and report the number of ids."""
    for number, sampled in enumerate(samples, 1):
        yield sampled
        if report is not None:
            report(number, most)
