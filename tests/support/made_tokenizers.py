"""Small tokenizers of every kind, made from one text."""

import base64
import json

import tokenizers

CORPUS = "".join(
    f"def area_{n}(width, height):\n    return width * height + {n}  # naïve ☃\n" for n in range(90)
)
RANKS = {bytes([byte]): byte for byte in range(256)} | {b"th": 256, b"the": 257, b"  ": 300}


def rank_lines(ranks):
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items())


def train_tokenizer(path, style):
    """Train a tokenizer.json that encodes blanks as bytes, or as `▁` with byte fallback."""
    if style == "ByteLevel":
        model = tokenizers.Tokenizer(tokenizers.models.BPE())
        model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        model.decoder = tokenizers.decoders.ByteLevel()
        alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
        special = ["<|endoftext|>", "<|pad|>"]
    else:
        model = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True, unk_token="<unk>"))
        model.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="never")
        steps = tokenizers.decoders
        model.decoder = steps.Sequence(
            [steps.ByteFallback(), steps.Metaspace(prepend_scheme="never"), steps.Fuse()]
        )
        alphabet = []
        special = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    model.train_from_iterator([CORPUS], trainer)
    description = json.loads(model.to_str())
    for token in description["added_tokens"]:
        token["special"] = not token["content"].startswith("<0x")
    if style == "Metaspace":
        special_tokens = [t for t in description["added_tokens"] if t["special"]]
        description["added_tokens"] = special_tokens
    description["truncation"] = {
        "direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0
    }  # fmt: skip
    path.write_text(json.dumps(description), encoding="utf-8")
