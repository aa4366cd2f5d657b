"""Checks of URLs in a config.

A config is printed, and written into the run folder and every checkpoint. A URL that contains a
secret is therefore refused, with a message that does not repeat it; secrets belong in the
environment.
"""

from __future__ import annotations

import re

_REMOTE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://", re.ASCII)


def is_url(text: str) -> bool:
    """Return whether the name of a file or folder is a URL; anything else is a path."""
    return "://" in text


def url_mistake(text: str) -> str | None:
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
    if ":" in text.partition("://")[2].partition("/")[0].rpartition("@")[0]:
        return (
            f"{scheme}://... has a password in it; leave it out, and give it in the environment "
            "or the store's own configuration"
        )
    if "::" in text:
        return f"{scheme}://... is a chain of URLs; use one"
    if any(part in (".", "..") for part in text.partition("://")[2].split("/")):
        return f"{scheme}://... has . or .. in it; write the full path"
    return None
