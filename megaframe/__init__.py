"""megaframe: pretrains GPT-style transformers; layout never changes the answer."""

__version__ = "0.1.0"
"""The one place where it stands; setup.py reads it, CHANGELOG.md tells what is new in it."""
