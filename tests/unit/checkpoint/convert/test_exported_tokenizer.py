"""Exports: the tokenizer gives the ids of the run's own, and the folder says what was trained."""

import base64
import json
import os
import random
from functools import cache

import numpy as np
import pytest
import sentencepiece
import tokenizers
import torch
from safetensors.torch import load_file
from slow_cases import slow
from small_model_folders import write_small_folder

from megaframe.checkpoint import open_checkpoint
from megaframe.checkpoint.convert.huggingface import model_folder as folders
from megaframe.checkpoint.convert.huggingface.tokenizer import export_tokenizer
from megaframe.checkpoint.manifest import decode_manifest, encode_manifest
from megaframe.data.preprocessing.corpus_files import CorpusFile
from megaframe.data.preprocessing.train_tokenizer import train_sentencepiece
from megaframe.data.sentencepiece_model import PieceType, parse_model
from megaframe.data.token_file_record import check_same_tokenizer, record_tokenizer
from megaframe.data.tokenizer import load_tokenizer
from megaframe.errors import UserError

CODE = "import os\n\ndef area(width: int) -> str:\n\treturn f'<{width / 0x41}>'  # naïve ☃\n\n  x"
LITERALS = ("<s>", "</s>", "<unk>", "<0x41>", "<0x0A>", "<|endoftext|>", "▁", "[x]")
BLANKS = (" ", "  ", "\t", "\n", "\r\n", "\u00a0", "\u3000")
CORPUS = [
    *(f"{CODE} {n} ABCDEF the quick brown {'fox' * (n % 3)} <unk></s>" for n in range(160)),
    *(" " * n + "pass  # a run of spaces, and of letters: " + "a" * n for n in range(40)),
]
PLAIN = {
    "byte_fallback": True,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "add_dummy_prefix": False,
    "allow_whitespace_only_pieces": True,
}
SETTINGS = {
    "plain": {},
    "prefix": {"add_dummy_prefix": True},
    "squeezed": {"remove_extra_whitespaces": True},
    "prefix squeezed": {"add_dummy_prefix": True, "remove_extra_whitespaces": True},
    "unknown": {"byte_fallback": False, "add_dummy_prefix": True},
    "symbols": {"user_defined_symbols": ["[x]", "ret"]},
}


def train(path, kind, **settings):
    """Train a small SentencePiece model, and return its name as a tokenizer."""
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_prefix=str(path),
        model_type=kind,
        vocab_size=420,
        hard_vocab_limit=False,
        minloglevel=2,
        **{**PLAIN, **settings},
    )
    return f"sentencepiece:{path}.model"


@cache
def draw_texts(count=3_000, seed=0):
    """Return texts of code, words, runs of blanks, control characters, and any Unicode."""
    draw = random.Random(seed)
    text = "\n".join(CORPUS)

    def any_letter():
        while 0xD800 <= (code := draw.randrange(0x110000)) < 0xE000:
            pass
        return chr(code)

    def part():
        start = draw.randrange(len(text))
        return draw.choice(
            [
                text[start : start + draw.randrange(1, 40)],
                draw.choice(BLANKS) * draw.randrange(1, 9),
                "".join(chr(draw.randrange(32)) for _ in range(3)),
                "".join(chr(draw.randrange(32, 0x250)) for _ in range(6)),
                "".join(any_letter() for _ in range(draw.randrange(1, 5))),
                draw.choice(("ﬁ", "①", "é", "한국어", "👩‍👩‍👧", "עברית", "日本")),
                draw.choice(LITERALS),
                draw.choice("ab0 -=") * draw.randrange(1, 20),
                "e\u0301o\u0323\u0302",
            ]
        )

    return ["".join(part() for _ in range(draw.randrange(6))) for _ in range(count)]


def export_and_load(name, folder):
    """Export a tokenizer, load its tokenizer.json, and return it with the notes."""
    export = export_tokenizer(name, 1 << 20, 64)
    folder.mkdir()
    for file, content in export.files.items():
        (folder / file).write_bytes(content)
    loaded = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    loaded.encode_special_tokens = True  # as a run's tokenizer does: text is never a control token
    words = json.loads(export.files["tokenizer_config.json"])
    assert loaded.token_to_id(words["eos_token"]) == export.eod
    return loaded, export.notes


def encode_texts(loaded, texts):
    return [encoding.ids for encoding in loaded.encode_batch_fast(texts, add_special_tokens=False)]


@pytest.mark.parametrize("kind", ["bytes", "hf"])
def test_ids_are_those_of_the_run_for_bytes_and_tokenizer_files(kind, tmp_path):
    name = kind
    if kind == "hf":
        model = tokenizers.Tokenizer(tokenizers.models.BPE())
        model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=600,
            special_tokens=["<|endoftext|>"],
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        model.train_from_iterator(CORPUS, trainer)
        model.save(str(tmp_path / "theirs.json"))
        name = f"hf:{tmp_path / 'theirs.json'}"
    native = load_tokenizer(name)
    loaded, notes = export_and_load(name, tmp_path / "out")
    assert notes == []
    texts = draw_texts()
    native_ids = [ids.tolist() for ids in native.encode_batch(texts)]
    assert encode_texts(loaded, texts) == native_ids
    if kind == "bytes":
        assert [loaded.decode(ids) for ids in native_ids] == texts
        assert native_ids[1:9] == [list(text.encode()) for text in texts[1:9]]


@pytest.mark.parametrize(
    ("kind", "setting"),
    [
        *(("bpe", setting) for setting in SETTINGS),
        *(("unigram", "plain"), ("unigram", "prefix"), slow("unigram", "squeezed")),
        *(slow("unigram", setting) for setting in ("prefix squeezed", "unknown", "symbols")),
    ],
)
def test_ids_are_those_of_sentencepiece(kind, setting, tmp_path):
    """A unigram model sums scores in fp32, where divisions of equal score can come out either way:
    other ids are allowed only if their scores are the same up to that rounding."""
    name = train(tmp_path / "m", kind, **SETTINGS[setting])
    native = load_tokenizer(name)
    loaded, notes = export_and_load(name, tmp_path / "out")
    texts = draw_texts()
    native_ids = [ids.tolist() for ids in native.encode_batch(texts)]
    exported_ids = encode_texts(loaded, texts)
    if kind == "bpe":
        assert notes == []
        assert exported_ids == native_ids
    else:
        assert notes == [
            "tokenizer.json: ids can differ from tokenizer.model for texts with divisions of equal "
            "score (summed in fp64, not fp32)"
        ]
        pieces = parse_model("m", (tmp_path / "m.model").read_bytes()).pieces
        different = [
            pair for pair in zip(native_ids, exported_ids, strict=True) if pair[0] != pair[1]
        ]
        for first, other in different:
            scores = [sum(pieces[token].score for token in ids) for ids in (first, other)]
            assert abs(scores[0] - scores[1]) < 1e-6 * max(map(abs, scores)) * len(first)
        assert len(different) < len(texts) / 10
    if SETTINGS[setting].get("byte_fallback", True):
        ids = [ids for ids, text in zip(native_ids, texts, strict=True) if "▁" not in text]
        decoded = [loaded.decode(ids_of_text, skip_special_tokens=False) for ids_of_text in ids]
        assert decoded == [native.decode(ids_of_text) for ids_of_text in ids]


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_a_tokenizer_of_the_tool_keeps_its_ids(kind, tmp_path):
    (tmp_path / "corpus.txt").write_text("\n".join(CORPUS), encoding="utf-8")
    train_sentencepiece(
        [CorpusFile(str(tmp_path / "corpus.txt"))], str(tmp_path / "m"), 320, kind, 1
    )
    native = load_tokenizer(f"sentencepiece:{tmp_path}/m.model")
    loaded, _ = export_and_load(f"sentencepiece:{tmp_path}/m.model", tmp_path / "out")
    for text in ("import os", "  x", "a b", "\n\n\tif", "</s>"):
        assert loaded.encode(text).ids == native.encode(text)
    # So token files of the one may be trained on with the other.
    (tmp_path / "out/tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    exported = load_tokenizer(f"hf:{tmp_path}/out/tokenizer.json")
    records = [record_tokenizer("any", tokenizer) for tokenizer in (native, exported)]
    assert records[0].fingerprint != records[1].fingerprint and records[0].is_same(records[1])
    assert check_same_tokenizer([("a", records[0]), ("b", records[1])], "") == records[0]


def test_the_normalisers_rules_are_exported(tmp_path):
    """Rules that replace characters are applied to clusters of a letter and its marks; of those
    with several marks the note warns."""
    name = train(
        tmp_path / "m",
        "bpe",
        normalization_rule_name="nmt_nfkc",
        add_dummy_prefix=True,
        remove_extra_whitespaces=True,
    )
    loaded, notes = export_and_load(name, tmp_path / "out")
    assert notes == [
        "tokenizer.json: ids can differ from tokenizer.model for characters with several combining "
        "marks (the normaliser's rules)"
    ]
    texts = [*CORPUS, "ﬁ ①  Ⅳ\u3000x", " \tab\u00a0 c\r\n", "e\u0301"]
    native_ids = [ids.tolist() for ids in load_tokenizer(name).encode_batch(texts)]
    assert encode_texts(loaded, texts) == native_ids


def test_models_are_read_as_the_library_reads_them(tmp_path):
    train(tmp_path / "m", "unigram", **SETTINGS["symbols"])
    library = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "m.model"))
    model = parse_model("m", (tmp_path / "m.model").read_bytes())
    assert model.kind == "unigram" and model.byte_fallback and not model.dummy_prefix
    for token, piece in enumerate(model.pieces):
        assert piece.text == library.id_to_piece(token)
        assert np.float32(piece.score) == np.float32(library.get_score(token))
        assert (piece.type == PieceType.CONTROL) == library.is_control(token)
        assert (piece.type == PieceType.BYTE) == library.is_byte(token)
    assert len(model.pieces) == library.get_piece_size()
    assert [piece.text for _, piece in model.select_pieces(PieceType.USER_DEFINED)] == [
        "[x]",
        "ret",
    ]


def test_what_cannot_be_exported_is_said(tmp_path):
    name = train(tmp_path / "word", "word", byte_fallback=False)
    export = export_tokenizer(name, 1 << 20, 64)
    assert [*export.files] == ["tokenizer.model"]
    assert export.notes == ["tokenizer.json: not written, because it cannot describe the kind word"]
    assert export.eod == load_tokenizer(name).eod
    ranks = (base64.b64encode(bytes([byte])) + b" %d\n" % byte for byte in range(256))
    (tmp_path / "r.tiktoken").write_bytes(b"".join(ranks))
    export = export_tokenizer(f"tiktoken:{tmp_path}/r.tiktoken", 300, 64)
    assert (export.files, export.eod) == ({}, 256)
    assert "r.tiktoken is not exported; only its end of document is, as an id" in export.notes[0]
    (note,) = export_tokenizer(None, 300, 64).notes
    assert note == "tokenizer: the run has none, so bos_token_id and eos_token_id are null"
    with pytest.raises(UserError, match="has 257 ids and the model 200"):
        export_tokenizer("bytes", 200, 64)


@pytest.fixture
def imported(tmp_path):
    """Return a function that makes a checkpoint whose run has a tokenizer."""

    def make(tokenizer, **keys):
        folder = write_small_folder(tmp_path / "run/theirs", **keys)
        checkpoint = folders.import_model(folder, tmp_path / "run/checkpoints").checkpoint
        manifest = checkpoint / "manifest.json"
        return record(manifest, tokenizer)

    return make


def record(manifest, tokenizer):
    """Make a checkpoint name a tokenizer, with the right checksum."""
    manifest_record = decode_manifest(manifest.read_bytes(), manifest)
    manifest_record.state["config"]["data"]["tokenizer"] = tokenizer
    manifest.write_bytes(encode_manifest(manifest_record))
    return manifest.parent


def export(checkpoint, to, *arguments):
    with open_checkpoint(checkpoint) as opened:
        return folders.export_model(opened, to, *arguments)


def test_an_export_says_what_was_trained(imported, tmp_path):
    checkpoint = imported("bytes")
    assert export(checkpoint, tmp_path / "out") == []
    config = json.loads((tmp_path / "out/config.json").read_text())
    ends = {"bos_token_id": 256, "eos_token_id": 256}
    assert config.items() >= {**ends, "dtype": "float32", "max_position_embeddings": 64}.items()
    assert json.loads((tmp_path / "out/generation_config.json").read_text()) == ends
    words = json.loads((tmp_path / "out/tokenizer_config.json").read_text())
    assert words["eos_token"] == "<|endoftext|>" and words["model_max_length"] == 64
    saved, exported_tensors = (
        load_file(tmp_path / name / "model.safetensors") for name in ("out", "run/theirs")
    )
    assert saved.keys() == exported_tensors.keys()
    assert all(torch.equal(saved[name], exported_tensors[name]) for name in exported_tensors)
    export(checkpoint, tmp_path / "half", "bf16")
    half = load_file(tmp_path / "half/model.safetensors")
    assert {tensor.dtype for tensor in half.values()} == {torch.bfloat16}


@pytest.mark.parametrize(
    "name", ["hf:/etc/passwd", "sentencepiece:{}/secret.model", "hf:{}/run/link.json", "hf:run"]
)
def test_no_file_from_elsewhere_is_copied(name, imported, tmp_path):
    (tmp_path / "secret.model").write_text("secret")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/link.json").symlink_to("/etc/passwd")
    name = name.format(tmp_path)
    checkpoint = imported(name)
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(UserError) as error:
        export(checkpoint, tmp_path / "out")
    assert "is not a file in its run folder; confirm one with --tokenizer" in str(error.value)
    assert name in str(error.value) and "\n" not in str(error.value)
    assert sorted(os.listdir(tmp_path)) == before
    assert export(checkpoint, tmp_path / "out", None, "none") == [
        "tokenizer: left out, so bos_token_id and eos_token_id are null"
    ]
    assert not {"tokenizer.json", "tokenizer.model"} & {*os.listdir(tmp_path / "out")}


def test_the_tool_refuses_in_one_line_and_prints_what_is_left_out(
    imported, tmp_path, run_checkpoint_tool
):
    command = "export-hf", imported("hf:/etc/passwd"), "--to", tmp_path / "out"
    status, refused = run_checkpoint_tool(*command)
    assert status == 2 and refused.startswith("error: ") and refused.count("\n") == 1
    done, written = run_checkpoint_tool(*command, "--tokenizer", "none")
    assert done == 0 and "note: tokenizer: left out, so bos_token_id" in written
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "float32"


def test_only_what_loads_as_a_tokenizer_is_copied(imported, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/tokenizer.json").write_text('{"secret": 1}')
    checkpoint = imported(f"hf:{tmp_path}/run/tokenizer.json")
    for confirmed in (None, "hf:/etc/passwd"):
        with pytest.raises(UserError, match=r"is not a tokenizer\.json"):
            export(checkpoint, tmp_path / "out", None, confirmed)
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_in_the_run_folder_or_confirmed_is_exported(imported, tmp_path):
    (tmp_path / "run").mkdir()
    name = train(tmp_path / "run/m", "bpe")
    content = (tmp_path / "run/m.model").read_bytes()
    checkpoint = imported(name, vocab_size=500)
    export(checkpoint, tmp_path / "recorded")
    (tmp_path / "moved.model").write_bytes(content)
    (tmp_path / "run/m.model").unlink()
    export(checkpoint, tmp_path / "confirmed", None, f"sentencepiece:{tmp_path}/moved.model")
    for folder in ("recorded", "confirmed"):
        assert (tmp_path / folder / "tokenizer.model").read_bytes() == content
        config = json.loads((tmp_path / folder / "config.json").read_text())
        assert config["eos_token_id"] == load_tokenizer(f"sentencepiece:{tmp_path}/moved.model").eod


def test_transformers_gives_the_same_ids(imported, tmp_path):
    (tmp_path / "run").mkdir()
    name = train(tmp_path / "run/m", "bpe")
    export(imported(name, vocab_size=500), tmp_path / "out")
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(tmp_path / "out")
    native = load_tokenizer(name)
    for text in ("import os", "  x\n\ty", CODE):
        assert loaded(text)["input_ids"] == native.encode(text)
    assert loaded.eos_token_id == native.eod


@pytest.mark.parametrize("content", [b"\x80" * 1000, b"\x0a", b"\x08\x01", b"\x0a\x02\x12\x04"])
def test_bytes_that_are_no_message_are_refused(content):
    """Among them an integer that never ends, in time that would grow with its square."""
    with pytest.raises(UserError, match="m: not a SentencePiece model of a known form"):
        parse_model("m", content)
