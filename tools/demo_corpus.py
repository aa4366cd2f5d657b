"""Make a corpus from the sources of Python's standard library, which every machine has.

Each file is a document, in the order of paths. Tests are left out, because much of them is data and
some systems do not ship them. The same Python installation always gives the same corpus.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from megaframe.errors import UserError, explain_failed_write, report_errors
from megaframe.io.closed_output import allow_closed_output
from megaframe.io.regular_file import replace_file

_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", required=True, metavar="FILE.jsonl")
    parser.add_argument("--megabytes", type=float, default=8.0, help="at most (default: 8)")
    options = parser.parse_args()
    library = Path(sysconfig.get_path("stdlib"))
    documents, size = write(library, Path(options.output), int(options.megabytes * 1e6))
    print(
        f"{options.output}: {documents} files of {library}, {size / 1e6:.1f} MB, one document each"
    )


def write(library: Path, output: Path, limit: int) -> tuple[int, int]:
    """Write the corpus, completely or not at all, and return the number of documents and of bytes.

    Args:
        library: Folder of the sources.
        output: The file.
        limit: Bytes at most.

    Raises:
        UserError: If no source is below the limit, or the file cannot be written.
    """
    documents = size = 0
    with explain_failed_write(output):
        output.parent.mkdir(parents=True, exist_ok=True)
        with replace_file(output) as file:
            for name, text in _read_sources(library):
                size += len(text.encode())
                if size > limit:
                    size -= len(text.encode())
                    break
                file.write(f"{json.dumps({'path': name, 'text': text})}\n".encode())
                documents += 1
            if not documents:
                raise UserError(f"no Python source under {limit} bytes in {library}")
    return documents, size


def _read_sources(library: Path) -> Iterator[tuple[str, str]]:
    """Yield the name and text of each source that is UTF-8 and not empty."""
    for path in sorted(library.rglob("*.py")):
        name = path.relative_to(library)
        if _LEFT_OUT & set(name.parts):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        if text.strip():
            yield name.as_posix(), text


if __name__ == "__main__":
    with allow_closed_output(), report_errors():
        main()
