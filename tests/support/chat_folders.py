"""The folder of a byte-level tokenizer with a chat template."""

import json

import tokenizers

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def write_byte_tokenizer(folder, template):
    """Write a tokenizer whose tokens are bytes and `SPECIAL`; return the folder."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: number for number, letter in enumerate(letters)}
    model = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    model.add_special_tokens(SPECIAL)
    model.save(str(folder / "tokenizer.json"))
    write_settings(folder, template)
    return folder


def write_settings(folder, template, **keys):
    settings = {"bos_token": SPECIAL[0], "eos_token": SPECIAL[2], "chat_template": template, **keys}
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def name_tokenizer(folder):
    """Return the name of the folder's tokenizer for options and keys."""
    return f"hf:{folder}/tokenizer.json?eod={SPECIAL[0]}"
