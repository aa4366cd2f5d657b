"""A model of random weights with a tokenizer of bytes and a chat template."""

from chat_folders import name_tokenizer, write_byte_tokenizer
from transformers_models import make_random_checkpoint

from megaframe.inference.library import load_model

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    "<|im_start|>"
)


def make_chat_model(folder):
    """Write the tokenizer and the checkpoint below a folder; return the model."""
    folder.joinpath("tokenizer").mkdir()
    tokenizer = write_byte_tokenizer(folder / "tokenizer", TEMPLATE)
    sizes = {"layers": 1, "hidden": 16, "heads": 2, "vocab": 259}
    path = make_random_checkpoint(folder / "own", **sizes)
    return load_model(path, tokenizer=name_tokenizer(tokenizer))
