"""What a run says of its sources when it starts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megaframe.config.data import DataConfig
from megaframe.data.blended_dataset import BlendedDataset
from megaframe.data.packed_dataset import PackedDataset
from megaframe.data.source_limits import divide_samples
from megaframe.data.streaming.streamed_dataset import StreamedDataset
from megaframe.errors import UserError

_MOST_NAMED = 8


def describe_passes(
    dataset: BlendedDataset, consumed: Sequence[int], samples: int
) -> Iterator[str]:
    """Yield lines that say how often the sources will have been seen whose size is known, and
    how much padding they have.

    Args:
        dataset: The sources.
        consumed: Samples that each source has given.
        samples: How many more the run takes.

    Raises:
        UserError: `epochs` and `max_tokens` of the sources leave fewer.
    """
    limits = dataset.find_limits(consumed, 0)
    left = [
        max(0, limit - given)
        for limit, given in zip(limits, consumed, strict=True)
        if limit is not None
    ]
    if len(left) == len(limits) and sum(left) < samples:
        raise UserError(
            f"train.steps takes {samples:,} more samples, and epochs and max_tokens of "
            f"data.sources leave {sum(left):,}; use fewer steps, or raise a limit"
        )
    given = divide_samples(dataset.weights, limits, consumed, samples)
    named = [
        f"{name} {float(count / int(size)):.3g}"
        for name, count, size in zip(dataset.names, given, dataset.sizes, strict=True)
        if size
    ]
    more = [f"{len(named) - _MOST_NAMED} more"] if len(named) > _MOST_NAMED else []
    if named:
        yield f"epochs of each source by the end: {', '.join([*named[:_MOST_NAMED], *more])}"
    for name, source in dataset.list_token_files():
        if isinstance(source, PackedDataset):
            yield (
                f"{name} is packed into {source.windows:,} samples, of whose tokens "
                f"{source.measure_padding():.2%} are padding"
            )


def describe_documents(dataset: BlendedDataset, data: DataConfig, eod: int | None) -> Iterator[str]:
    """Yield a line for each source whose index has a single document, or fewer than there are
    ends of documents inside them, if keys of the run act on documents.

    Args:
        dataset: The sources.
        data: The section of the run.
        eod: The token that ends documents, where the file's record does not say; None if
            nothing says.
    """
    keys = [key for key in ("reset_positions", "reset_attention", "mask_eod") if getattr(data, key)]
    keys += ["packing"] if data.packing != "none" else []
    if not keys or data.document_ends != "index":
        return
    for source, record in zip(dataset.sources, dataset.records, strict=True):
        if isinstance(source, StreamedDataset):
            continue
        end = record.eod if record else eod
        documents = source.count_documents()
        inside = 0 if end is None else source.count_inner_ends(end)
        if documents == 1 or inside > documents:
            ends = f", and {inside} ends of documents (token {end}) inside" if inside else ""
            yield (
                f"the index of {source.path} has {documents} "
                f"document{'s' * (documents > 1)}{ends}: data.{', data.'.join(keys)} act where "
                "the index begins one; data.document_ends=tokens, or the id of the token that "
                "ends documents, makes them act on tokens"
            )
