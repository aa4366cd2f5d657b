"""Bits per byte divide by the bytes of the user's text, whatever a tokenizer puts before it."""

import io
import json
from itertools import chain

import numpy as np
import pytest
import sentencepiece
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from loader_runs import make_config
from token_files import write_token_file
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from megaframe.data.loader import Loader
from megaframe.data.preprocessing.corpus_files import CorpusFile
from megaframe.data.text_bytes import TextBytes
from megaframe.data.tokenizer import load_tokenizer
from megaframe.inference.evaluation import read_sequence

WORDS = ["some", "ranks", "share", "each", "layer", "of", "a", "model", "and", "its", "data"]
CORPUS = [" ".join(np.random.default_rng(n).choice(WORDS, 8)) for n in range(300)]


def train_pieces(folder, kind, **options):
    """Train a SentencePiece model with the library's defaults: a space before each text, a normal
    form, and no runs of spaces."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=model,
        vocab_size=320,
        model_type=kind,
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    path = folder / f"{kind}{len(options)}.model"
    path.write_bytes(model.getvalue())
    return f"sentencepiece:{path}"


def train_json(folder, name, **parts):
    """Train a tokenizer.json with these parts."""
    model = tokenizers.Tokenizer(models.BPE(byte_fallback=name != "level", unk_token="<unk>"))
    for part, value in parts.items():
        setattr(model, part, value)
    special = ["<unk>", "</s>"]
    level = pre_tokenizers.ByteLevel.alphabet() if name == "level" else []
    byte_names = [] if level else [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=620, special_tokens=[*special, *byte_names], initial_alphabet=level,
        show_progress=False,
    )  # fmt: skip
    model.train_from_iterator(CORPUS, trainer)
    description = json.loads(model.to_str())
    added = [token for token in description["added_tokens"] if token["content"] in special]
    (folder / f"{name}.json").write_text(json.dumps({**description, "added_tokens": added}))
    return f"hf:{folder / name}.json"


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    folder = tmp_path_factory.mktemp("spaces")
    blanks = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    kept = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    return {
        "bpe": train_pieces(folder, "bpe", **kept),
        "unigram": train_pieces(folder, "unigram", **kept),
        "no prefix": train_pieces(folder, "bpe", add_dummy_prefix=False, **kept),
        "normal form": train_pieces(folder, "bpe"),
        "metaspace": train_json(
            folder, "metaspace", pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="always")
        ),
        "prepended": train_json(folder, "prepended", normalizer=blanks),
        "level": train_json(
            folder,
            "level",
            pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True),
            decoder=decoders.ByteLevel(),
        ),
        "bytes": "bytes",
    }


KINDS = ["bpe", "unigram", "no prefix", "normal form", "metaspace", "prepended", "level", "bytes"]
# Texts that no normal form changes, without a space at either end: a space there is taken for the
# tokenizer's own, and tokens alone do not tell which it was.
PLAIN = st.lists(st.sampled_from([*WORDS, "x", "(q)", "9"]), min_size=1, max_size=6).map(" ".join)
ANY = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20)
@given(texts=st.lists(PLAIN, min_size=1, max_size=5))
def test_tokens_of_documents_count_the_bytes_of_their_texts(names, kind, texts):
    tokenizer = load_tokenizer(names[kind])
    ids = [part for text in texts for part in (tokenizer.encode(text), [tokenizer.eod])]
    counts = TextBytes(tokenizer).count_sequence(np.concatenate(ids).astype(np.int64))
    ends = np.cumsum([len(part) for part in ids])
    sums = np.add.reduceat(counts, np.append(0, ends[1:-1:2]))
    assert sums.tolist() == [len(text.encode()) for text in texts]
    assert (counts >= 0).all()


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15)
@given(texts=st.lists(PLAIN | ANY, min_size=1, max_size=5))
def test_text_files_count_every_byte_of_every_text(names, kind, texts, tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "c.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in [*texts, "model"]))
    tokenizer = load_tokenizer(names[kind])
    sequence = read_sequence(CorpusFile(str(path)), tokenizer)
    encoded = [text for text in [*texts, "model"] if tokenizer.encode(text)]
    assert int(sequence.text_bytes[1:].sum()) == sum(len(text.encode()) for text in encoded)
    ends = np.flatnonzero(sequence.tokens == tokenizer.eod)
    sums = np.add.reduceat(sequence.text_bytes, ends[:-1] + 1)
    assert sums.tolist() == [len(text.encode()) for text in encoded]


@pytest.mark.parametrize("one_document", [True, False])
@pytest.mark.parametrize("mask_eod", [True, False])
def test_evaluations_of_a_run_count_the_bytes_of_texts(names, tmp_path, one_document, mask_eod):
    """For any ranks, with one document in the index or many, and without masked first tokens."""
    tokenizer = load_tokenizer(names["bpe"])
    texts = [CORPUS[n][: 5 + n % 30].strip() for n in range(40)]
    documents = [[*tokenizer.encode(text), tokenizer.eod] for text in texts]
    documents += [[5] * (-sum(map(len, documents)) % 8 + 1)]  # for whole windows of 8
    whole = [[*chain(*documents)]] if one_document else documents
    path = write_token_file(tmp_path / "tokens", [[document] for document in whole])
    config = make_config(
        [path],
        split=(0.0, 1.0, 0.0),
        tokenizer=names["bpe"],
        mask_eod=mask_eod,
        document_ends="tokens",
    )
    counts = []
    for ranks in (1, 2):
        loaders = [Loader(config, rank, ranks, split="validation") for rank in range(ranks)]
        batches = [batch for loader in loaders for batch in loader.iterate_validation(10_000)]
        counts.append(sum(batch.text_bytes for batch in batches))
    assert counts[0] == counts[1]
    table, first = tokenizer.count_token_bytes(), tokenizer.count_first_bytes()
    padding = table[5] * (len(documents[-1]) - 1) + first[5]
    masked = sum(first[document[0]] for document in documents[1:]) if mask_eod else 0
    expected = sum(len(text.encode()) for text in texts) + padding - first[documents[0][0]] - masked
    assert counts[0] == expected
