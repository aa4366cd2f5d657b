"""Exports tokenizers: writes `tokenizer.json`, which gives the same ids as the run's tokenizer, and
what programs that serve the model need beside it.

A `tokenizer.json` describes a tokenizer completely, so programs do not have to guess, as they do
from a SentencePiece model alone. Where it cannot describe all that SentencePiece computes, a line
says for which texts ids may differ; `tokenizer.model`, the original, is then exact.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megaframe.checkpoint import StorePath
from megaframe.checkpoint.convert.huggingface.tokenizer_settings import (
    CHAT_TEMPLATE,
    TOKENIZER_CONFIG,
    TokenizerSettings,
    read_tokenizer_settings,
)
from megaframe.data.sentencepiece_model import (
    PieceType,
    SentencePieceModel,
    TextPiece,
    parse_model,
)
from megaframe.data.token_file_record import (
    TokenizerRecord,
    check_same_tokenizer,
    record_tokenizer,
)
from megaframe.data.tokenizer import (
    HuggingFaceTokenizer,
    Tokenizer,
    load_tokenizer,
    read_file,
    split_name,
)
from megaframe.errors import UserError
from megaframe.io.untrusted import make_printable

TOKENIZER_FILES = {"hf": "tokenizer.json", "sentencepiece": "tokenizer.model"}
"""The file of each kind of tokenizer in a folder of Hugging Face."""
NO_TOKENIZER = "none"
_SPACE = "▁"
_END = "<|endoftext|>"
Description = dict[str, Any]
_IDS = {"bos_token_id": "bos_token", "eos_token_id": "eos_token", "pad_token_id": "pad_token"}
"""Special tokens, by the keys of their ids."""


@dataclass(frozen=True)
class ExportedTokenizer:
    """A tokenizer as it is exported.

    Attributes:
        files: Contents by name.
        eod: The id that ends documents, if there is a tokenizer.
        ids: Those of special tokens, as a `config.json` names them; None for tokens there are not.
        generation: Content of `generation_config.json`.
        notes: A line for each thing that is not exported, or not exactly.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    eod: int | None = None
    ids: dict[str, int | None] = field(default_factory=lambda: dict.fromkeys(_IDS))
    generation: Description = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def check_tokenizer_path(recorded: str | None, checkpoint: StorePath) -> str | None:
    """Return the tokenizer that a checkpoint records, if its file lies with the checkpoint.

    A checkpoint can name any file of this machine, and its export is meant to be passed on.

    Raises:
        UserError: For a file that lies neither in the folder of the checkpoint, nor in the folder
            of checkpoints, nor in the run folder around it.
    """
    path = split_name(recorded or "")[1]
    if not path:
        return recorded
    if isinstance(checkpoint, Path):
        home = checkpoint.resolve().parent
        home = home.parent if home.name == "checkpoints" else home
        try:
            inside = Path(path).resolve(strict=True).is_relative_to(home)
        except (OSError, ValueError, RuntimeError):
            inside = False
        if inside:
            return recorded
    raise UserError(
        f"{checkpoint} names data.tokenizer={make_printable(recorded)}, which is not a file in its "
        f"run folder; confirm one with --tokenizer KIND:PATH, or use --tokenizer {NO_TOKENIZER}"
    )


def export_tokenizer(
    name: str | None, vocab: int, positions: int, recorded: TokenizerRecord | None = None
) -> ExportedTokenizer:
    """Return the files of a tokenizer.

    Args:
        name: KIND:PATH or `bytes`; `none` or None for no tokenizer.
        vocab: Rows of the model's embedding.
        positions: Longest text of the model in tokens.
        recorded: What the model was trained with, if that is known.

    Raises:
        UserError: If the name or its file is not a tokenizer, or not one of this model.
    """
    if name is None or name == NO_TOKENIZER:
        reason = "the run has none" if name is None else "left out"
        line = f"tokenizer: {reason}, so bos_token_id and eos_token_id are null"
        return ExportedTokenizer(notes=[line])
    tokenizer = load_tokenizer(name)
    if tokenizer.vocab_size > vocab:
        raise UserError(
            f"tokenizer {name} has {tokenizer.vocab_size} ids and the model {vocab}; use the one "
            f"that it was trained with"
        )
    check_same_tokenizer(
        [("the run", recorded), ("the export", record_tokenizer(name, tokenizer))],
        "name the one that the run was trained with (--tokenizer)",
    )
    files, eod_text, notes = _convert(name, tokenizer)
    path = Path(split_name(name)[1])
    is_in_model = path.name in TOKENIZER_FILES.values()
    settings = read_tokenizer_settings(path.parent) if is_in_model else TokenizerSettings()
    ids = _find_ids(tokenizer, settings)
    words = {"bos_token": eod_text, "eos_token": eod_text} if not settings.config else {}
    if "tokenizer.json" in files:
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **words,
            **settings.config,
            "model_max_length": positions,
        }
        if ids["eos_token_id"] == tokenizer.eod:
            config["eos_token"] = eod_text
        files[TOKENIZER_CONFIG] = _encode_json(config)
        if settings.template is not None:
            files[CHAT_TEMPLATE] = settings.template.encode()
    ends = [
        *dict.fromkeys(
            (
                ids["eos_token_id"],
                *(end for end in settings.ends if 0 <= end < vocab),
                tokenizer.eod,
            )
        )
    ]
    generation = {
        **settings.generation,
        **{key: token for key, token in ids.items() if token is not None},
        "eos_token_id": ends if len(ends) > 1 else ends[0],
    }
    return ExportedTokenizer(files, tokenizer.eod, ids, generation, [*notes, *settings.notes])


def _find_ids(tokenizer: Tokenizer, settings: TokenizerSettings) -> dict[str, int | None]:
    """Return the ids of special tokens. Without settings a text begins and ends as documents do."""
    if not settings.config:
        return {**dict.fromkeys(_IDS, tokenizer.eod), "pad_token_id": None}
    names = {key: settings.name_token(word) for key, word in _IDS.items()}
    ids = {key: None if name is None else tokenizer.find_id(name) for key, name in names.items()}
    end = ids["eos_token_id"]
    return {**ids, "eos_token_id": tokenizer.eod if end is None else end}


def _convert(name: str, tokenizer: Tokenizer) -> tuple[dict[str, bytes], str, list[str]]:
    """Return the files of a tokenizer, the token that ends its documents, and notes."""
    kind, path, _ = split_name(name)
    if kind == "bytes":
        return {"tokenizer.json": _encode_json(_make_byte_level_tokenizer(tokenizer.eod))}, _END, []
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return {"tokenizer.json": read_file(path)}, tokenizer.eod_name, []
    if kind != "sentencepiece":
        return {}, "", [f"tokenizer: {name} is not exported; only its end of document is, as an id"]
    content = read_file(path)
    model = parse_model(path, content)
    files = {"tokenizer.model": content}
    if reasons := _find_unsupported(model):
        notes = [f"tokenizer.json: not written, because it cannot describe {', '.join(reasons)}"]
    else:
        files["tokenizer.json"] = _encode_json(_convert_sentencepiece(model))
        differing = "; ".join(_find_differences(model))
        notes = [f"tokenizer.json: ids can differ from tokenizer.model for {differing}"]
        notes = notes if differing else []
    return files, model.pieces[tokenizer.eod].text, notes


def _encode_json(content: Description) -> bytes:
    return (json.dumps(content, ensure_ascii=False) + "\n").encode()


def _describe_tokenizer(**parts: Any) -> Description:
    return {
        **{"version": "1.0", "truncation": None, "padding": None, "added_tokens": []},
        **{"normalizer": None, "pre_tokenizer": None, "post_processor": None, "decoder": None},
        **parts,
    }


def _make_added_token(token: int, text: str, *, special: bool) -> Description:
    off = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token, "content": text, **off, "special": special}


def _make_bpe_model(
    vocab: dict[str, int], merges: list[tuple[str, str]], **keys: Any
) -> Description:
    unused = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")
    off = dict.fromkeys(("fuse_unk", "byte_fallback", "ignore_merges"), False)
    tables = {"vocab": vocab, "merges": merges}
    return {"type": "BPE", **dict.fromkeys(unused), **off, **keys, **tables}


def _make_byte_level_tokenizer(eod: int) -> Description:
    """Describe the bytes of UTF-8 as ids, with GPT-2's character for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable}
    letters |= {byte: chr(256 + number) for number, byte in enumerate(unprintable)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    return _describe_tokenizer(
        added_tokens=[_make_added_token(eod, _END, special=True)],
        pre_tokenizer={**level, "use_regex": False},
        decoder={**level, "use_regex": False},
        model=_make_bpe_model({letters[byte]: byte for byte in range(256)} | {_END: eod}, []),
    )


def _convert_sentencepiece(model: SentencePieceModel) -> Description:
    added = [
        _make_added_token(token, piece.text, special=piece.type != PieceType.USER_DEFINED)
        for token, piece in enumerate(model.pieces)
        if piece.type in (PieceType.UNKNOWN, PieceType.CONTROL)
        or (piece.type == PieceType.USER_DEFINED and model.kind == "bpe")
    ]
    return _describe_tokenizer(
        added_tokens=added,
        normalizer={"type": "Sequence", "normalizers": list(_list_normalizers(model))},
        decoder={"type": "Sequence", "decoders": list(_list_decoders(model))},
        model=_make_bpe_from_pieces(model)
        if model.kind == "bpe"
        else _make_unigram_from_pieces(model),
    )


def _list_normalizers(model: SentencePieceModel) -> Iterator[Description]:
    """Yield the steps of SentencePiece's `Normalizer::Normalize`, in its order."""
    if model.charsmap:
        rules = base64.b64encode(model.charsmap).decode()
        yield {"type": "Precompiled", "precompiled_charsmap": rules}
    if model.remove_extra_whitespaces:
        yield _replace({"Regex": r"\A +"}, "")
        yield _replace({"Regex": " {2,}"}, " ")
    if model.dummy_prefix:
        yield {"type": "Prepend", "prepend": _SPACE}
    yield _replace({"String": " "}, _SPACE)
    if model.remove_extra_whitespaces:
        yield _replace({"Regex": rf"{_SPACE}+\z"}, "")


def _list_decoders(model: SentencePieceModel) -> Iterator[Description]:
    yield _replace({"String": _SPACE}, " ")
    yield {"type": "ByteFallback"}
    yield {"type": "Fuse"}
    if model.dummy_prefix or model.remove_extra_whitespaces:
        yield {"type": "Strip", "content": " ", "start": 1, "stop": 0}


def _replace(pattern: dict[str, str], content: str) -> Description:
    return {"type": "Replace", "pattern": pattern, "content": content}


def _make_bpe_from_pieces(model: SentencePieceModel) -> Description:
    """Describe byte-pair encoding. SentencePiece merges the two neighbours that make the piece of
    the best score, however each of them came about: all divisions of a piece are merges."""
    vocab = {piece.text: token for token, piece in enumerate(model.pieces)}
    normal = {piece.text: token for token, piece in model.select_pieces(PieceType.NORMAL)}
    best_first = sorted(normal, key=lambda text: -model.pieces[normal[text]].score)
    merges = [
        (text[:end], text[end:])
        for text in best_first
        for end in range(1, len(text))
        if text[:end] in normal and text[end:] in normal
    ]
    ((_, unknown),) = model.select_pieces(PieceType.UNKNOWN)
    keys = {"unk_token": unknown.text, "fuse_unk": True, "byte_fallback": model.byte_fallback}
    return _make_bpe_model(vocab, merges, **keys)


def _make_unigram_from_pieces(model: SentencePieceModel) -> Description:
    """Describe a unigram model. Text never matches a control token, an unknown one or a byte's name
    in SentencePiece; here all pieces can match, so these score less than any other division."""
    normal = [piece.score for _, piece in model.select_pieces(PieceType.NORMAL)]
    highest, lowest = max(normal, default=0.0), min(normal, default=0.0)
    longest = max(len(piece.text) for piece in _list_unmatchable_pieces(model))
    unreachable_score = (min(lowest, 0.0) - 1.0) * (longest + 1)

    def score(piece: TextPiece) -> float:
        if piece.type == PieceType.USER_DEFINED:
            return len(piece.text.encode()) * highest - 0.1
        return piece.score if piece.type == PieceType.NORMAL else unreachable_score

    return {
        "type": "Unigram",
        "unk_id": model.select_pieces(PieceType.UNKNOWN)[0][0],
        "vocab": [(piece.text, score(piece)) for piece in model.pieces],
        "byte_fallback": model.byte_fallback,
    }


def _list_unmatchable_pieces(model: SentencePieceModel) -> list[TextPiece]:
    """Return the pieces whose own text SentencePiece never encodes as them."""
    names = (PieceType.UNKNOWN, PieceType.CONTROL, PieceType.BYTE)
    return [piece for _, piece in model.select_pieces(*names)]


def _find_unsupported(model: SentencePieceModel) -> list[str]:
    """Return what a model has that no tokenizer.json can describe."""
    reasons = {
        f"the kind {model.kind}": model.kind not in ("bpe", "unigram"),
        "spaces that are not escaped": not model.escape_whitespaces,
        "a whitespace suffix": model.whitespace_as_suffix,
        "unused pieces": bool(model.select_pieces(PieceType.UNUSED)),
    }
    return [reason for reason, applies in reasons.items() if applies]


def _find_differences(model: SentencePieceModel) -> Iterator[str]:
    """Yield the texts whose ids can differ from those of SentencePiece."""
    normal = [piece for _, piece in model.select_pieces(PieceType.NORMAL)]
    symbols = [piece for _, piece in model.select_pieces(PieceType.USER_DEFINED)]
    texts = {piece.text for piece in (*normal, *symbols)}
    spaces = model.dummy_prefix or model.remove_extra_whitespaces
    if model.charsmap:
        yield "characters with several combining marks (the normaliser's rules)"
    if model.kind == "unigram":
        yield "texts with divisions of equal score (summed in fp64, not fp32)"
        if (
            not _collect_characters(piece.text for piece in _list_unmatchable_pieces(model))
            <= texts
        ):
            yield "names of tokens, such as <s> or <0x41>"
    elif len({piece.score for piece in normal}) < len(normal):
        yield "pieces of equal score"
    if _collect_characters(piece.text for piece in normal) - texts:
        yield "characters that are no pieces but parts of some"
    if symbols and (model.charsmap or (model.kind == "bpe" and spaces)):
        yield "text next to user-defined symbols"


def _collect_characters(texts: Iterable[str]) -> set[str]:
    return {letter for text in texts for letter in text}
