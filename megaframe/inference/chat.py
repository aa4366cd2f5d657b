"""Chats: messages as text by the template that lies beside a tokenizer, and its control tokens."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaframe.checkpoint.convert.huggingface.tokenizer import TOKENIZER_FILES
from megaframe.checkpoint.convert.huggingface.tokenizer_settings import (
    CHAT_TEMPLATE,
    MAX_TEMPLATE,
    TOKENIZER_CONFIG,
    TokenizerSettings,
    read_tokenizer_settings,
)
from megaframe.data.tokenizer import HuggingFaceTokenizer, Tokenizer, split_name
from megaframe.errors import UserError
from megaframe.inference.generation import check_text
from megaframe.io.untrusted import make_printable

Message = Mapping[str, Any]
"""`role` (system, user, assistant, tool) and `content`, and what else a template reads."""
_RENDERER = Path(__file__).with_name("render_chat.py")
"""Run as a program, which imports jinja2 and nothing of this package."""
_SECONDS, _PER_SECOND, _WAIT = 2, 100, 30
"""Processor time of a template, which takes milliseconds; the chats for which it gets a second
more; and how many times as long its process is waited for on a busy machine."""
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")


@dataclass(frozen=True)
class ChatFormat:
    """How a model was trained to chat.

    Attributes:
        tokenizer: Encodes control tokens.
        template: Source of the template.
        settings: What lies beside the tokenizer.
        folder: The tokenizer's.
    """

    tokenizer: HuggingFaceTokenizer
    template: str
    settings: TokenizerSettings
    folder: Path

    @property
    def ends(self) -> frozenset[int]:
        """The ids that end an answer."""
        name = self.settings.name_token("eos_token")
        named = None if name is None else self.tokenizer.find_id(name)
        own = () if named is None else (named,)
        return frozenset((self.tokenizer.eod, *own, *self.settings.ends))

    def encode(self, chats: Sequence[Sequence[Message]]) -> list[list[int]]:
        """Return the ids of the messages of each chat, and of the beginning of an answer.

        Raises:
            UserError: If a message has the name of a control token, which would become one, or the
                template fails, or takes too long.
        """
        for chat in chats:
            self.check_messages(chat)
        texts = self.render(chats)
        return [self.tokenizer.encode_with_control_tokens(text)[0] for text in texts]

    def check_messages(self, messages: Sequence[Message]) -> None:
        """Raise `UserError` if a message has the name of a control token, or is not valid text."""
        names = self.tokenizer.list_control_tokens()
        for text in _iterate_texts(messages):
            check_text(text, "the message")
            for name in names:
                if name in text:
                    raise UserError(
                        f"the message has {make_printable(name)}, the name of a control token; "
                        "write it in another way"
                    )

    def render(
        self,
        chats: Sequence[Sequence[Message]],
        variables: Sequence[Mapping[str, Any]] = (),
        mark: str = "",
    ) -> list[str]:
        """Return the text of each chat; what is refused is that of `encode`.

        Args:
            chats: The messages of each.
            variables: What else the template sees of each chat, such as its tools; by default, that
                an answer is to follow.
            mark: Stands before and after what the template marks as an assistant's.
        """
        tokens = {key: self.settings.name_token(key) for key in _SPECIAL}
        shared = {
            **{key: token for key, token in tokens.items() if token is not None},
            **{"tools": None, "documents": None, "add_generation_prompt": True},
        }
        own = variables or [{}] * len(chats)
        all_variables = [
            {**shared, **mine, "messages": [dict(m) for m in chat]}
            for chat, mine in zip(chats, own, strict=True)
        ]
        seconds = _SECONDS + len(chats) // _PER_SECOND
        request = {"template": self.template, "variables": all_variables, "mark": mark}
        answer = _run({**request, "seconds": seconds})
        if "error" in answer:
            problem = make_printable(answer["error"])
            raise UserError(f"the chat template of {self.folder} fails: {problem}")
        texts: list[str] = answer["texts"]
        return texts


def _iterate_texts(value: Any) -> Iterator[str]:
    """Yield all texts in a JSON value, which is not deeply nested."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _iterate_texts(key)
            yield from _iterate_texts(inner)
    elif isinstance(value, Sequence):
        for inner in value:
            yield from _iterate_texts(inner)


def find_chat_format(
    name: str | None, tokenizer: Tokenizer, template: str | None = None
) -> ChatFormat:
    """Return how to chat by a tokenizer.

    Args:
        name: KIND:PATH of the tokenizer.
        tokenizer: The tokenizer.
        template: Source of a template to use in place of that beside the tokenizer.

    Raises:
        UserError: If there is no template beside it, or it cannot encode control tokens.
    """
    path = Path(split_name(name or "")[1])
    if not isinstance(tokenizer, HuggingFaceTokenizer) or path.name != TOKENIZER_FILES["hf"]:
        raise UserError(
            f"a chat needs a tokenizer.json with a chat template beside it, and the tokenizer is "
            f"{name}; name one with --tokenizer hf:FOLDER/tokenizer.json"
        )
    settings = read_tokenizer_settings(path.parent)
    template = template or settings.template or _choose(settings.config.get("chat_template"))
    if template is None:
        raise UserError(
            f"{path.parent} has no chat template: neither {CHAT_TEMPLATE} nor chat_template in "
            f"{TOKENIZER_CONFIG}; put the one that the model was trained with there"
        )
    if len(template) > MAX_TEMPLATE:
        raise UserError(
            f"the chat template of {path.parent} has {len(template):,} characters, and the most "
            f"are {MAX_TEMPLATE:,}"
        )
    return ChatFormat(tokenizer, template, settings, path.parent)


def _choose(templates: Any) -> str | None:
    """Return the template of a `tokenizer_config.json`; of several that named `default`."""
    if isinstance(templates, list):
        named = {t.get("name"): t.get("template") for t in templates if isinstance(t, dict)}
        templates = named.get("default")
    return templates if isinstance(templates, str) and templates else None


def _run(request: dict[str, Any]) -> dict[str, Any]:
    """Return what the process that renders answers."""
    too_long = {"error": f"it takes more than {request['seconds']} s"}
    try:
        done = subprocess.run(
            [sys.executable, "-I", str(_RENDERER)],
            input=json.dumps(request).encode(),
            capture_output=True,
            timeout=_WAIT * request["seconds"],
        )
    except subprocess.TimeoutExpired:
        return too_long
    if done.returncode < 0:
        return too_long
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        reason = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        return {"error": reason[0][:500] if reason else f"status {done.returncode}"}
    return answer
