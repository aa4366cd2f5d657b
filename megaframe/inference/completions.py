"""Requests to a model and its answers in the form of OpenAI's API, which clients of model servers
speak: completions of a prompt or of a chat, whole or as server-sent events.

It knows nothing of HTTP or of who serves: a request is a path and a body, an answer is an object or
a stream of bytes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megaframe.errors import UserError
from megaframe.inference.chat import Message
from megaframe.inference.generation import SamplingOptions, encode_prompt
from megaframe.inference.model import Model
from megaframe.io.http import MOST_BODY

PROMPTS, CHATS = "/v1/completions", "/v1/chat/completions"
EVENT_STREAM = "text/event-stream"
_DONE = b"data: [DONE]\n\n"


class ChatMessage(BaseModel):
    """What one side has said."""

    model_config = ConfigDict(extra="forbid")
    role: str = Field(pattern="^(system|user|assistant)$")
    content: str


class CompletionRequest(BaseModel):
    """A request. Keys that change nothing here, such as `model` and `user`, are accepted; others of
    OpenAI's API are refused.

    Attributes:
        prompt: To continue; None begins a new document.
        messages: Of a chat, in place of a prompt.
        max_tokens: New tokens, at most; 0, the default, takes as many as the server allows.
        stream: Whether the answer comes as events.
    """

    model_config = ConfigDict(extra="forbid")
    model: str | None = None
    user: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] = Field(default=[], max_length=1000)
    max_tokens: int = Field(default=0, ge=0)
    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    seed: int = Field(default=0, ge=0, lt=1 << 62)
    stream: bool = False


def read_request(path: str, body: bytes, most_tokens: int) -> CompletionRequest:
    """Return the request of a body.

    Args:
        path: `PROMPTS` or `CHATS`.
        body: JSON.
        most_tokens: That one may ask for.

    Raises:
        UserError: It is not a request, or asks for more.
    """
    if len(body) > MOST_BODY:
        raise UserError(f"the request has {len(body):,} bytes, and the most are {MOST_BODY:,}")
    try:
        request = CompletionRequest.model_validate_json(body)
    except ValidationError as error:
        mistake = error.errors()[0]
        key = ".".join(map(str, mistake["loc"])) or "the request"
        raise UserError(f"{key}: {mistake['msg']}") from None
    if (path == CHATS) != bool(request.messages):
        needed = "messages" if path == CHATS else "a prompt and no messages"
        raise UserError(f"{path} takes {needed}")
    if request.max_tokens > most_tokens:
        raise UserError(f"max_tokens {request.max_tokens:,} is above {most_tokens:,}")
    SamplingOptions(request.temperature, request.top_k, request.top_p)
    return request.model_copy(update={"max_tokens": request.max_tokens or most_tokens})


class Completion:
    """The answer to a request, which is made while it is read.

    Args:
        model: Answers.
        request: What was asked.
        name: Of the model, for clients.

    Raises:
        UserError: The model cannot answer: too many tokens, or it has no chat template.
    """

    def __init__(self, model: Model, request: CompletionRequest, name: str) -> None:
        self._request, self._name, self._made = request, name, 0
        self._pieces = self._generate(model)
        # The first token is waited for, so that what is wrong with a request is its status.
        self._first = next(self._pieces, "")

    def _generate(self, model: Model) -> Iterator[str]:
        asked = self._request
        options: dict[str, Any] = {
            "tokens": asked.max_tokens,
            "temperature": asked.temperature,
            "top_k": asked.top_k,
            "top_p": asked.top_p,
            "seeds": [asked.seed],
            "report": self._count,
        }
        if asked.messages:
            messages: list[Message] = [message.model_dump() for message in asked.messages]
            texts = model.chat_batch([messages], **options)
        else:
            start = encode_prompt(model.tokenizer, asked.prompt, model.config.train.seq)
            texts = model.generate_batch([asked.prompt], **options)
            return _skip((text.text for text in texts), len(model.tokenizer.decode(start)))
        return (text.text for text in texts)

    def _count(self, made: int, _: int) -> None:
        self._made = made

    def __iter__(self) -> Iterator[str]:
        """Yield the pieces of the text."""
        yield self._first
        yield from self._pieces

    def read(self) -> dict[str, Any]:
        """Return the whole answer."""
        text = "".join(self)
        return {
            **self._describe(text, self._find_reason()),
            "usage": {"completion_tokens": self._made},
        }

    def stream(self) -> Iterator[bytes]:
        """Yield the answer as server-sent events, the last of which is `[DONE]`. What goes wrong
        after the first token is an event with an `error`."""
        try:
            for piece in self:
                yield _to_event(self._describe(piece, None))
            yield _to_event(self._describe("", self._find_reason()))
            yield _DONE
        except UserError as error:
            yield _to_event(describe_error(str(error)))

    def _find_reason(self) -> str:
        return "length" if self._made >= self._request.max_tokens else "stop"

    def _describe(self, text: str, reason: str | None) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "finish_reason": reason}
        if not self._request.messages:
            choice["text"], kind = text, "text_completion"
        elif self._request.stream:
            choice["delta"], kind = {"content": text}, "chat.completion.chunk"
        else:
            choice["message"] = {"role": "assistant", "content": text}
            kind = "chat.completion"
        known = {"object": kind, "created": int(time.time()), "model": self._name}
        return {**known, "choices": [choice]}


def _skip(pieces: Iterator[str], characters: int) -> Iterator[str]:
    """Yield what comes after so many characters."""
    for piece in pieces:
        if rest := piece[characters:]:
            yield rest
        characters = max(0, characters - len(piece))


def describe_error(message: str) -> dict[str, Any]:
    """Return an error as clients expect it."""
    return {"error": {"message": message, "type": "invalid_request_error"}}


def _to_event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"
