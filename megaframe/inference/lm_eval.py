"""Evaluates a model on tasks of EleutherAI's lm-evaluation-harness, from local files.

Only this module imports `lm_eval`. The three methods that the harness calls are built on existing
parts of the package: scoring of windows (`evaluation.py`) and sampling (`generation.py`).
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager

from megaframe.data.tokenizer import Tokenizer
from megaframe.errors import UserError
from megaframe.inference.chat import ChatFormat
from megaframe.inference.evaluation import Score, TokenSequence, score
from megaframe.inference.generation import SampledIds, SampleRequest, SamplingOptions, sample_batch
from megaframe.io.progress import Progress
from megaframe.pipeline_parallel.stage import Stage

_MOST_GENERATED = 256
"""Tokens to generate if a task gives no number."""


@dataclass(frozen=True)
class TaskOptions:
    """The tasks to evaluate.

    Attributes:
        names: Names of tasks or groups.
        folder: Folder of YAML files that define tasks; None for the tasks included in the harness.
        shots: Examples before each question; None for the number that the task gives.
        limit: Questions of each task; None for all.
    """

    names: Sequence[str]
    folder: str | None = None
    shots: int | None = None
    limit: int | None = None


class TaskModel(Protocol):
    """What tasks ask of a model."""

    def score(self, passages: Sequence[TokenSequence]) -> list[Score]:
        """Return the score of each passage. Context that does not fit into a window is cut off at
        its beginning."""

    def sample(self, requests: Sequence[SampleRequest]) -> Iterator[SampledIds]:
        """Yield samples as each gets a new id."""


@dataclass(frozen=True)
class LocalModel:
    """The whole model on one rank.

    Attributes:
        stage: The model, as one stage.
        context: Tokens of a window.
        batch: Windows that are scored, and texts that are generated, at once.
    """

    stage: Stage
    context: int
    batch: int

    def score(self, passages: Sequence[TokenSequence]) -> list[Score]:
        """Return the score of each passage; see `TaskModel`."""
        with Progress("tasks") as progress:
            return score(
                self.stage,
                passages,
                context=self.context,
                stride=self.context,
                batch=self.batch,
                report=progress.report,
            )

    def sample(self, requests: Sequence[SampleRequest]) -> Iterator[SampledIds]:
        """Yield samples as each gets a new id."""
        return sample_batch(self.stage, requests, context=self.context, batch=self.batch)


class HarnessModel(TemplateLM):
    """A model with the interface of the harness.

    A text without a prefix is predicted from an end-of-document token, as in training.

    Args:
        model: The model.
        tokenizer: The tokenizer of its data.
        chat: How questions become messages of a user, if they do.
    """

    def __init__(
        self, model: TaskModel, tokenizer: Tokenizer, chat: ChatFormat | None = None
    ) -> None:
        super().__init__()
        self._model, self._tokenizer, self._chat = model, tokenizer, chat

    @property
    def eot_token_id(self) -> int:
        """The id that ends a document."""
        return self._tokenizer.eod

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer's fingerprint, by which the harness caches requests."""
        return self._tokenizer.fingerprint

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Return the token ids of a text, whatever the arguments without special tokens but those
        of the chat template."""
        if self._chat is not None:
            return self._chat.tokenizer.encode_with_control_tokens(string)[0]
        return self._tokenizer.encode(string)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the source of the chat template, by which the harness names its results."""
        return None if self._chat is None else self._chat.template

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return what stands for the text of a chat until all texts are made together, because the
        template runs in a process of its own."""
        return json.dumps([chat_history, {"add_generation_prompt": add_generation_prompt}])

    def _render(self, requests: list[Instance]) -> list[Instance]:
        """Return requests with the texts of their chats.

        Raises:
            UserError: What is asked or a choice has the name of a control token.
        """
        if self._chat is None:
            return requests
        for request in requests:
            self._chat.check_messages([{"choice": request.args[1]}])
        chats = {text: json.loads(text) for text in (request.args[0] for request in requests)}
        for asked, _ in chats.values():
            self._chat.check_messages(asked)
        messages, variables = ([chat[n] for chat in chats.values()] for n in (0, 1))
        made = self._chat.render(messages, variables)
        texts = dict(zip(chats, made, strict=True))
        return [
            replace(request, arguments=(texts[request.args[0]], *request.args[1:]))
            for request in requests
        ]

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Return, for each request of (context, text), the log-probability of the text and whether
        each of its tokens is the most likely one."""
        results: list[tuple[float, bool]] = super().loglikelihood(
            self._render(requests), disable_tqdm
        )
        return results

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        """Return, for each request of (texts, context ids, counted ids), the log-probability of the
        counted ids and whether each of them is the most likely one. Context that does not fit into
        a window is cut off at its beginning."""
        passages = [
            TokenSequence(np.array(before + ids), len(before)) for _, before, ids in requests
        ]
        scores = self._model.score(passages)
        return [(-result.nats, result.greedy) for result in scores]

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-probability of each whole text."""
        texts = [request.args[0] for request in requests]
        encoded = [self._tokenizer.encode(text) for text in texts]
        return [
            -result.nats
            for result in self._model.score(
                [TokenSequence(np.array([self.eot_token_id, *ids])) for ids in encoded]
            )
        ]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continue each text up to the first stop string of the task or the end of document."""
        requests = self._render(requests)
        asked = [self._make_request(*request.args) for request in requests]
        texts = [""] * len(asked)
        for step in self._model.sample(asked):
            if step.is_last:
                (_, options), start = requests[step.number].args, asked[step.number].start
                texts[step.number] = self._cut(step.ids, start, options)
        return texts

    def _make_request(self, prompt: str, options: Mapping[str, Any]) -> SampleRequest:
        """Return what a task asks for: to continue a text up to the first stop string."""
        start = self.tok_encode(prompt) or [self.eot_token_id]
        ends = {self.eot_token_id} if self._chat is None else self._chat.ends
        chance = options.get("do_sample", True) and float(options.get("temperature") or 0.0)
        top_k, top_p = int(options.get("top_k") or 0), float(options.get("top_p") or 1.0)
        tokens = int(options.get("max_gen_toks", _MOST_GENERATED))
        sampling = SamplingOptions(chance or 0.0, top_k, top_p)

        def is_complete(ids: Sequence[int]) -> bool:
            text = self._decode_new(ids, start)
            return ids[-1] in ends or any(end in text for end in _list_ends(options))

        return SampleRequest(start, tokens, sampling, 0, is_complete)

    def _cut(self, ids: Sequence[int], start: Sequence[int], options: Mapping[str, Any]) -> str:
        """Return what is new in a sample, up to the first stop string."""
        text = self._decode_new(ids, start)
        return text[
            : min((text.index(end) for end in _list_ends(options) if end in text), default=None)
        ]

    def _decode_new(self, ids: Sequence[int], start: Sequence[int]) -> str:
        return self._tokenizer.decode(ids)[len(self._tokenizer.decode(start)) :]


def _list_ends(options: Mapping[str, Any]) -> list[str]:
    """Return the stop strings of a task."""
    ends = options.get("until") or []
    return [end for end in ([ends] if isinstance(ends, str) else ends) if end]


@contextmanager
def _as_single_process() -> Iterator[None]:
    """Let the harness run in a process of many. It returns results only where `LOCAL_RANK` is 0,
    and seeds the generators of random numbers, whose states are restored."""
    states = random.getstate(), np.random.get_state()
    local_rank = os.environ.pop("LOCAL_RANK", None)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        if local_rank is not None:
            os.environ["LOCAL_RANK"] = local_rank


def find_tasks(tasks: TaskOptions) -> TaskManager:
    """Return the harness's list of tasks, which has those that are asked for.

    Args:
        tasks: Which they are.

    Raises:
        UserError: The harness does not know one of them.
    """
    manager = TaskManager(include_path=tasks.folder, include_defaults=tasks.folder is None)
    known_tasks = set(manager.all_tasks)
    unknown_tasks = [name for name in tasks.names if name not in known_tasks]
    if unknown_tasks:
        available = ", ".join(sorted(known_tasks)[:20]) or "none"
        raise UserError(f"tasks {','.join(unknown_tasks)}: no such task; there are: {available}")
    return manager


def evaluate_tasks(
    model: TaskModel, tokenizer: Tokenizer, tasks: TaskOptions, chat: ChatFormat | None = None
) -> dict[str, dict[str, Any]]:
    """Return the metrics of each task, with the harness's names.

    Args:
        model: The model.
        tokenizer: The tokenizer of its data.
        tasks: Which tasks, and how many questions.
        chat: Ask as a user of a chat, in this format.

    Raises:
        UserError: For tasks that the harness does not know and for tasks whose data is not on this
            machine.
    """
    manager = find_tasks(tasks)
    try:
        with _as_single_process():
            results = simple_evaluate(
                HarnessModel(model, tokenizer, chat),
                tasks=list(tasks.names),
                num_fewshot=tasks.shots,
                limit=tasks.limit,
                task_manager=manager,
                log_samples=False,
                apply_chat_template=chat is not None,
            )
    except (OSError, ConnectionError, ValueError) as error:
        raise UserError(f"tasks {','.join(tasks.names)}: {error}") from error
    return {} if results is None else results["results"]
