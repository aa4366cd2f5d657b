"""megaframe: pretrains GPT-style transformers; layout never changes the answer."""
