"""Parquet files: how one is opened, and how much of it a reader will hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from megaframe.config.url import is_url
from megaframe.data.preprocessing.corpus_files import InputError, open_input
from megaframe.data.preprocessing.parquet_pages import measure_largest_page
from megaframe.data.tokenizer import import_library

LARGEST_PAGE = 1 << 29
"""Most bytes of a page of Parquet; fastparquet writes the largest, of 500 MiB."""


@contextmanager
def open_parquet(path: str) -> Iterator[Any]:
    """Open a Parquet file so that it is read by pages instead of whole row groups.

    Raises:
        InputError: If it is not a whole Parquet file.
    """
    parquet = import_library("pyarrow.parquet", "data")
    arrow = import_library("pyarrow", "data")
    try:
        with (
            open_input(path, 1 << 20) if is_url(path) else nullcontext(path) as source,
            parquet.ParquetFile(
                source, pre_buffer=False, buffer_size=1 << 20, page_checksum_verification=True
            ) as file,
        ):
            yield file
    except (arrow.ArrowException, OSError) as error:
        raise InputError(f"{path} is not a whole Parquet file: {error}") from None


def measure_pages(path: str, metadata: Any, groups: list[int], key: str) -> int:
    """Return the bytes of the largest page of a column in some row groups, after decompression.

    Args:
        path: Of the Parquet file.
        metadata: Of the same, as pyarrow reads it.
        groups: The row groups.
        key: The column.

    Raises:
        InputError: For a page of more than `LARGEST_PAGE` bytes, and for a damaged file.
    """
    largest = 0
    try:
        with open_input(path) as file:
            for column in list_columns(metadata, groups, key):
                starts = [column.data_page_offset, column.dictionary_page_offset or 0]
                start = min((start for start in starts if start > 0), default=0)
                page = measure_largest_page(
                    file, start, column.total_compressed_size, column.num_values
                )
                largest = max(largest, page)
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is not a whole Parquet file: {error}") from None
    if largest > LARGEST_PAGE:
        raise InputError(
            f"{path}: column {key!r} has a page of {largest} bytes; the most that is held in "
            f"memory is {LARGEST_PAGE}: write it with smaller pages"
        )
    return largest


def list_columns(metadata: Any, groups: Iterable[int], key: str) -> Iterator[Any]:
    """Yield what a Parquet file says of a column, row group by row group."""
    for group in groups:
        columns = metadata.row_group(group)
        named = (columns.column(i) for i in range(columns.num_columns))
        yield from (column for column in named if column.path_in_schema == key)
