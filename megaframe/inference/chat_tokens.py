"""Chats as tokens to train on, with a weight for each: what an assistant says counts, what it reads
does not.

A row is an object of JSON. With `messages`, and `tools` if there are any, a chat template makes its
text. The template's own `{% generation %}` says what is the assistant's; without it, that is what a
message adds to the text that asks for it, so that a model sees in training what it is asked with
later. With `text` and `spans`, the row says itself which characters count.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megaframe.data.tokenizer import HuggingFaceTokenizer
from megaframe.errors import UserError
from megaframe.inference.chat import ChatFormat, Message
from megaframe.inference.generation import check_text


class Span(NamedTuple):
    """Characters of a text, first and end, and how much their tokens count."""

    first: int
    end: int
    weight: float = 1.0


class WeightedTokens(NamedTuple):
    """A document.

    Attributes:
        ids: int32 [tokens].
        weights: How much each counts as a label, float32 [tokens].
    """

    ids: NDArray[np.int32]
    weights: NDArray[np.float32]


@dataclass(frozen=True)
class ChatRow:
    """A row with `messages`.

    Attributes:
        messages: In their order, at least one of an assistant.
        tools: What the template is given as `tools`.
    """

    messages: Sequence[Message]
    tools: Any = None

    @property
    def answers(self) -> list[int]:
        """Indices of the assistant's messages."""
        return [n for n, each in enumerate(self.messages) if each.get("role") == "assistant"]

    @property
    def weights(self) -> list[float]:
        """The `weight` of each of the assistant's messages, by default 1."""
        return [float(self.messages[number].get("weight", 1)) for number in self.answers]


def parse_chat_row(row: Any) -> ChatRow:
    """Return a row with `messages`.

    Raises:
        UserError: It is none, or no message is an assistant's.
    """
    messages = row.get("messages") if isinstance(row, dict) else None
    if not isinstance(messages, list) or not messages:
        raise UserError('the row has no "messages", a list of objects with "role" and "content"')
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise UserError(f'messages[{number}] is no object with "role" and "content"')
        if not _is_weight(message.get("weight", 1)):
            raise UserError(f"messages[{number}].weight is no finite number of 0 or more")
    chat = ChatRow(messages, row.get("tools"))
    if not chat.answers:
        roles = ", ".join(sorted({message["role"] for message in messages}))
        raise UserError(f"no message has the role assistant; the roles are {roles}")
    return chat


def _is_weight(value: object) -> bool:
    return type(value) in (int, float) and 0 <= value < math.inf  # type: ignore[operator]


def encode_chats(form: ChatFormat, chats: Sequence[ChatRow]) -> list[WeightedTokens]:
    """Return chats as tokens.

    Raises:
        UserError: The template fails, a message has a control token, or nothing tells what of a
            text is the assistant's.
    """
    for chat in chats:
        form.check_messages(chat.messages)
    find_spans = _find_marked_spans if "endgeneration" in form.template else _find_added_spans
    documents = []
    for text, spans in find_spans(form, chats):
        ids, places = form.tokenizer.encode_with_control_tokens(text)
        documents.append(_weigh(ids, places, spans))
    return documents


def _find_marked_spans(
    form: ChatFormat, chats: Sequence[ChatRow]
) -> Iterator[tuple[str, list[Span]]]:
    """Yield the text of each chat and what its template marks."""
    mark = secrets.token_hex(16)  # which no message can have
    variables = [{"add_generation_prompt": False, "tools": chat.tools} for chat in chats]
    for chat, text in zip(
        chats, form.render([chat.messages for chat in chats], variables, mark), strict=True
    ):
        pieces, weights = text.split(mark), chat.weights
        ends = np.cumsum([len(piece) for piece in pieces]).tolist()
        marked = [pair for number, pair in enumerate(pairwise(ends)) if number % 2 == 0]
        if len(marked) != len(weights):
            if len(set(weights)) > 1:
                raise UserError(
                    f"the template marks {len(marked)} texts as an assistant's, and "
                    f"{len(weights)} messages have weights"
                )
            weights = weights[:1] * len(marked)
        spans = [Span(*pair, weight) for pair, weight in zip(marked, weights, strict=True)]
        yield "".join(pieces), spans


def _find_added_spans(
    form: ChatFormat, chats: Sequence[ChatRow]
) -> Iterator[tuple[str, list[Span]]]:
    """Yield the text of each chat and what its answers add to the text that asks for them."""
    # For each answer the text that asks for it and the text with it, then that of the whole chat.
    given, variables = [], []
    for chat in chats:
        for number in chat.answers:
            given += [chat.messages[:number], chat.messages[: number + 1]]
            variables += [
                {"add_generation_prompt": asks, "tools": chat.tools} for asks in (True, False)
            ]
        given.append(chat.messages)
        variables.append({"add_generation_prompt": False, "tools": chat.tools})
    texts = iter(form.render(given, variables))
    for chat in chats:
        pairs = [(next(texts), next(texts)) for _ in chat.answers]
        whole = next(texts)
        for number, (before, after) in zip(chat.answers, pairs, strict=True):
            if not (after.startswith(before) and whole.startswith(after)):
                raise UserError(
                    f"the template of {form.folder} writes what is before messages[{number}] in "
                    "another way once it is answered, so what the answer adds is not known; mark "
                    "it in the template by {% generation %} and {% endgeneration %}"
                )
        yield (
            whole,
            [
                Span(len(before), len(after), weight)
                for (before, after), weight in zip(pairs, chat.weights, strict=True)
            ],
        )


def encode_spans(tokenizer: HuggingFaceTokenizer, row: Any) -> WeightedTokens:
    """Return a row with `text` and `spans`, each [first, end] or [first, end, weight] in
    characters, as tokens. The end of the document is appended, and counts as much as the last token
    before it.

    Raises:
        UserError: It is none.
    """
    text = row.get("text") if isinstance(row, dict) else None
    spans = row.get("spans") if isinstance(row, dict) else None
    if not isinstance(text, str) or not isinstance(spans, list):
        raise UserError('the row has no "text" and "spans", a list of [first, end] in characters')
    check_text(text, "text")
    parsed = [_parse_span(number, span, len(text)) for number, span in enumerate(spans)]
    ids, weights = _weigh(*tokenizer.encode_with_places(text), parsed)
    last = weights[-1:] if weights.size else np.zeros(1, np.float32)
    end = np.array([tokenizer.eod], np.int32)
    return WeightedTokens(np.concatenate((ids, end)), np.concatenate((weights, last)))


def _parse_span(number: int, span: Any, length: int) -> Span:
    match span:
        case [int(first), int(end), *weight] if 0 <= first < end <= length and len(weight) < 2:
            if all(map(_is_weight, weight)):
                return Span(first, end, *weight)
            raise UserError(f"the weight of spans[{number}] is no finite number of 0 or more")
    raise UserError(
        f"spans[{number}] is no [first, end] with 0 <= first < end <= {length}, the characters of "
        "the text"
    )


def _weigh(
    ids: Sequence[int], places: Sequence[tuple[int, int]], spans: Sequence[Span]
) -> WeightedTokens:
    """Return tokens with the weight of the last span that has one of their characters; 0 without
    one."""
    first_end_T2 = np.array(places, np.int64).reshape(-1, 2)
    weights = np.zeros(len(ids), np.float32)
    for span in spans:
        overlaps = (first_end_T2[:, 0] < span.end) & (first_end_T2[:, 1] > span.first)
        weights[overlaps] = span.weight
    return WeightedTokens(np.array(ids, np.int32), weights)
