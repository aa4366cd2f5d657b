"""A page to talk with a model: a server on this machine's loopback that streams answers to those
who have its token."""

from __future__ import annotations

import json
import threading
from collections.abc import Generator
from http import HTTPStatus
from importlib.resources import files
from typing import Any

from megaframe.errors import UserError, explain_failed_listen
from megaframe.inference.chat import Message
from megaframe.inference.generation import SamplingOptions
from megaframe.inference.model import Model
from megaframe.io.http import LOOPBACK, Query, TokenServer

_PAGE = "chat_page.html"
_ROLES = ("system", "user", "assistant")
_MOST_MESSAGES = 1000


class ChatServer(TokenServer):
    """Serves the page, and answers messages one conversation after the other.

    Args:
        model: Answers; it must have a chat template.
        tokens: New tokens of an answer, at most.
        sampling: How each token is chosen.
        host: Where it listens.
        port: Where it listens; 0 takes any free port.

    Raises:
        UserError: It cannot listen there.
    """

    def __init__(
        self,
        model: Model,
        *,
        tokens: int,
        sampling: SamplingOptions,
        host: str = LOOPBACK,
        port: int = 0,
    ) -> None:
        self._model, self._tokens, self._sampling = model, tokens, sampling
        self._turn = threading.Lock()
        with explain_failed_listen(host, port):
            super().__init__(host, port, self._answer_page, self._answer_messages)

    def _answer_page(self, path: str, query: Query) -> tuple[HTTPStatus, str, bytes]:
        if path != "/":
            return HTTPStatus.NOT_FOUND, "text/plain", b"There is no such page.\n"
        page = files("megaframe.inference").joinpath(_PAGE).read_bytes()
        return HTTPStatus.OK, "text/html", page

    def _answer_messages(self, path: str, body: bytes) -> tuple[HTTPStatus, str, Generator[bytes]]:
        """Return the lines of an answer: objects with a `text`, the last one with an `end` or an
        `error`."""
        try:
            messages, seed = _read_messages(body)
        except UserError as error:
            return HTTPStatus.BAD_REQUEST, "application/jsonl", _to_lines([{"error": str(error)}])
        return HTTPStatus.OK, "application/jsonl", self._stream(messages, seed)

    def _stream(self, messages: list[Message], seed: int) -> Generator[bytes]:
        sampling = self._sampling
        with self._turn:
            try:
                pieces = self._model.chat(
                    messages,
                    tokens=self._tokens,
                    temperature=sampling.temperature,
                    top_k=sampling.top_k,
                    top_p=sampling.top_p,
                    seed=seed,
                )
                yield from _to_lines({"text": piece} for piece in pieces)
                yield from _to_lines([{"end": True}])
            except UserError as error:
                yield from _to_lines([{"error": str(error)}])


def _to_lines(values: Any) -> Generator[bytes]:
    return (json.dumps(value).encode() + b"\n" for value in values)


def _read_messages(body: bytes) -> tuple[list[Message], int]:
    """Return the messages of a request, and the seed of the answer.

    Raises:
        UserError: It is not what the page sends.
    """
    try:
        given = json.loads(body)
    except (ValueError, RecursionError):
        given = None
    messages = given.get("messages") if isinstance(given, dict) else None
    seed = given.get("seed", 0) if isinstance(given, dict) else None
    is_message = isinstance(messages, list) and all(
        isinstance(message, dict)
        and message.keys() == {"role", "content"}
        and message["role"] in _ROLES
        and isinstance(message["content"], str)
        for message in messages
    )
    if not is_message or not messages or type(seed) is not int or not 0 <= seed < 1 << 63:
        raise UserError(
            'a request is {"messages": [{"role": "user", "content": TEXT}, ...], "seed": 0}, with '
            f"roles {', '.join(_ROLES)} and a seed from 0 to 2^63 - 1"
        )
    if len(messages) > _MOST_MESSAGES:
        raise UserError(
            f"the chat has {len(messages):,} messages, and the most are {_MOST_MESSAGES:,}"
        )
    return messages, seed
