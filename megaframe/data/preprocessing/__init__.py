"""From a corpus to a token file and a tokenizer."""
