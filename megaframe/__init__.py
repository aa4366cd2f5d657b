"""megaframe: pretrains GPT-style transformers; layout never changes the answer."""

__version__ = "0.1.0"
"""Defined only here: pyproject.toml reads it, and CHANGELOG.md lists what each version changes."""
