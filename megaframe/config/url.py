"""Checks of URLs and other texts in a config.

A config is printed, and written into the run folder and every checkpoint. A secret in it is
therefore refused, with a message that does not repeat it; secrets belong in the environment.
"""

from __future__ import annotations

import re

from megaframe.io.untrusted import mask_secrets

_REMOTE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://", re.ASCII)


def is_url(text: str) -> bool:
    """Return whether the name of a file or folder is a URL; anything else is a path."""
    return "://" in text


def find_text_mistake(text: str) -> str | None:
    """Return why no key takes a text, without repeating it; else None."""
    if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        return (
            "has a character that no file name or text can hold: NUL, or half of a surrogate pair"
        )
    if mask_secrets(text) != text:
        return (
            "has a secret in it: a password, a key, or what follows ? or # in a URL; leave it out, "
            "and give it in the environment or the store's own configuration"
        )
    return None


def find_url_mistake(text: str) -> str | None:
    """Return why a URL is refused, without repeating anything of it but its scheme; else None."""
    if not _REMOTE.match(text):
        return "it is a URL without a scheme, such as s3://"
    scheme = text.partition("://")[0]
    if not text.isprintable() or text != text.strip():
        return f"{scheme}://... has characters that cannot be printed, or spaces around it"
    if "?" in text or "#" in text:
        return (
            f"{scheme}://... has a ? or #, which secrets may follow; leave out the rest from there"
        )
    host = text.partition("://")[2].partition("/")[0]
    if ":" in host.rpartition("@")[0] or mask_secrets(text) != text:
        return (
            f"{scheme}://... has a password in it; leave it out, and give it in the environment "
            "or the store's own configuration"
        )
    if "::" in text:
        return f"{scheme}://... is a chain of URLs; use one"
    if any(part in (".", "..") for part in text.partition("://")[2].split("/")):
        return f"{scheme}://... has . or .. in it; write the full path"
    return None
