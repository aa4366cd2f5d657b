"""What lies beside a tokenizer in a model's folder, and programs that serve a model need: special
tokens, the chat template, and settings of generation.

Such a folder may come from elsewhere. So no link in it is followed, sizes are bounded, what names
code is left out, and of the settings of generation only numbers with known names are taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megaframe.errors import UserError
from megaframe.io.untrusted import make_printable, parse_json, read_file

TOKENIZER_CONFIG, GENERATION_CONFIG = "tokenizer_config.json", "generation_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
_SPECIAL_TOKENS = "special_tokens_map.json"
_MAX_JSON, MAX_TEMPLATE = 16 << 20, 1 << 20
"""Bytes. Published files have up to 2 MB, and templates up to 20 KB."""
_GENERATION: dict[str, tuple[type, ...]] = {
    "do_sample": (bool,),
    **dict.fromkeys(("temperature", "top_p", "min_p", "typical_p"), (int, float)),
    "repetition_penalty": (int, float),
    **dict.fromkeys(("top_k", "max_new_tokens"), (int,)),
}
"""Settings of generation that are taken over, with their types."""


@dataclass(frozen=True)
class TokenizerSettings:
    """The files beside a tokenizer.

    Attributes:
        config: `tokenizer_config.json` without what names code; empty if there is none.
        template: `chat_template.jinja`, or None.
        generation: The settings of generation that are taken over.
        ends: Ids that end a text by `generation_config.json`.
        notes: A line for each file that is left out.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    template: str | None = None
    generation: Mapping[str, Any] = field(default_factory=dict)
    ends: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()

    def name_token(self, key: str) -> str | None:
        """Return the text of a special token such as `eos_token`, or None."""
        token = self.config.get(key)
        token = token.get("content") if isinstance(token, dict) else token  # as AddedToken
        return token if isinstance(token, str) and token else None


def read_tokenizer_settings(folder: Path) -> TokenizerSettings:
    """Return what lies in a tokenizer's folder.

    Raises:
        UserError: If a file is too large, cannot be read, or is not of its format.
    """
    notes: list[str] = []
    config = _read_object(folder / TOKENIZER_CONFIG, notes)
    tokens = _read_object(folder / _SPECIAL_TOKENS, notes) if config else {}
    if config.pop("auto_map", None) is not None:  # names code of the folder
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    template = _read_text(folder / CHAT_TEMPLATE, MAX_TEMPLATE, notes)
    generation = _read_object(folder / GENERATION_CONFIG, notes)
    ends = generation.get("eos_token_id")
    return TokenizerSettings(
        {**{key: tokens[key] for key in tokens if key.endswith("_token")}, **config},
        template,
        {key: value for key, value in generation.items() if _is_setting(key, value)},
        tuple(end for end in (ends if isinstance(ends, list) else [ends]) if type(end) is int),
        tuple(notes),
    )


def _is_setting(key: str, value: object) -> bool:
    kinds = _GENERATION.get(key)
    return kinds is not None and type(value) in kinds  # a flag is no number


def _read_object(path: Path, notes: list[str]) -> dict[str, Any]:
    """Return the JSON object in a file; empty if there is none, or a link."""
    text = _read_text(path, _MAX_JSON, notes)
    try:
        content = {} if text is None else parse_json(text.encode())
    except ValueError as error:
        raise UserError(f"{make_printable(path)} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{make_printable(path)} is not a JSON object")
    return content


def _read_text(path: Path, limit: int, notes: list[str]) -> str | None:
    """Return the text of a file; None if there is none, or a link, which is noted."""
    if path.is_symlink():
        notes.append(f"{path.name}: not exported, because it is a link; copy the file itself there")
        return None
    try:
        return read_file(path, limit, inside=path.parent).decode()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"cannot read {make_printable(path)}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{make_printable(path)} is not UTF-8: {error.reason}") from None
