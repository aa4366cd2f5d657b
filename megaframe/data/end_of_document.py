"""Which token of a Hugging Face tokenizer ends documents.

A `tokenizer.json` does not say so; the files that lie beside it in a model's folder do. A token is
never taken for its name alone: `</s>` ends documents in some vocabularies and is an HTML tag in
others. Where nothing says which one it is, the user is asked.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from megaframe.errors import UserError
from megaframe.io.untrusted import parse_json, read_file

EOD_OPTION = "?eod="
"""Between the path of a tokenizer.json and the token that ends documents, if a user names it."""
_TOKEN_FILES = ("tokenizer_config.json", "special_tokens_map.json")
_ID_FILES = ("generation_config.json", "config.json")
_NAMES = (
    "<|endoftext|>",
    "</s>",
    "<|end_of_text|>",
    "<eos>",
    "<｜end▁of▁sentence｜>",  # noqa: RUF001 (DeepSeek's spelling)
)
"""Names of special tokens that end documents wherever they are the only such token."""
_LARGEST_FILE = 1 << 26


def find_end_of_document(
    path: str, vocab: Mapping[str, int], special: Collection[str], named: str = ""
) -> str:
    """Return the token that ends documents.

    It is the one that the user names; else the `eos_token` of `tokenizer_config.json` or
    `special_tokens_map.json` beside the file, with which Megatron-LM ends documents, too; else the
    `eos_token_id` of `generation_config.json` or `config.json`, if it is a single one; else the
    only special token with a known name.

    Args:
        path: Of the tokenizer.json. Files beside it belong to it if it has this name.
        vocab: Ids by token, with added tokens.
        special: The added tokens that are special.
        named: The token that the user names.

    Raises:
        UserError: If that gives no token, or one that the vocabulary does not have.
    """
    if named:
        if named not in vocab:
            raise UserError(
                f"{path}{EOD_OPTION}{named}: the vocabulary has no token {named!r}; its special "
                f"tokens are: {_list_tokens(special)}"
            )
        return named
    if os.path.basename(path) == "tokenizer.json":
        for file, token in _read_model_folder(os.path.dirname(path), vocab):
            if token not in vocab:
                # It is not quoted: the file may be a link to any other one.
                raise UserError(
                    f"what {file} names as the end of a text is no token of {path}; "
                    f"{_describe_remedy(path, special)}"
                )
            return token
    known = [name for name in _NAMES if name in special]
    if len(known) == 1:
        return known[0]
    found = f"{len(known)} special tokens with a known name" if known else "no known special token"
    raise UserError(
        f"{path} does not say which token ends documents: it has {found}, and no eos_token in a "
        f"{_TOKEN_FILES[0]} beside it; {_describe_remedy(path, special)}"
    )


def _read_model_folder(folder: str, vocab: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Yield what each file of a model's folder names as the end of a text: file and token."""
    for name in _TOKEN_FILES:
        file = os.path.join(folder, name)
        token = _read_object(file).get("eos_token")
        if isinstance(token, dict):  # as AddedToken is written
            token = token.get("content")
        if isinstance(token, str) and token:
            yield file, token
    names = {token: name for name, token in vocab.items()}
    for name in _ID_FILES:
        file = os.path.join(folder, name)
        ids = _read_object(file).get("eos_token_id")
        ids = ids if isinstance(ids, list) else [ids]
        if len(ids) == 1 and type(ids[0]) is int:
            yield file, names.get(ids[0], f"id {ids[0]}")


def _read_object(file: str) -> Mapping[str, Any]:
    """Return the JSON object in a file, empty if there is no such file."""
    try:
        content = parse_json(read_file(file, _LARGEST_FILE))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{file} is not JSON: {error}") from None
    return content if isinstance(content, dict) else {}


def _describe_remedy(path: str, special: Collection[str]) -> str:
    example = next(iter(sorted(special)), "TOKEN")
    return (
        f"name it after the path, as hf:{path}{EOD_OPTION}{example}; its special tokens are: "
        f"{_list_tokens(special)}"
    )


def _list_tokens(tokens: Collection[str]) -> str:
    omitted = len(tokens) - 20
    listed = ", ".join(token[:60] for token in sorted(tokens)[:20]) or "none"
    return f"{listed} and {omitted} more" if omitted > 0 else listed
