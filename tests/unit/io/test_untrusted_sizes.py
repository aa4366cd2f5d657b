"""What a file says of sizes is bounded before anything is made of it."""

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from megaframe.checkpoint.load import Checkpoint
from megaframe.checkpoint.manifest import Manifest
from megaframe.config.keys import format_value
from megaframe.config.load import load
from megaframe.data.preprocessing import preprocess
from megaframe.data.preprocessing.corpus_files import CorpusFile
from megaframe.data.preprocessing.documents import BrokenRows
from megaframe.data.preprocessing.input_shards import split_file
from megaframe.errors import UserError


def test_shapes_are_compared_before_memory_is_taken(tmp_path):
    tensor = {"shape": (257, 16), "dtype": "F32", "slices": ()}
    manifest = Manifest(step=1, state={}, files={}, tensors={"weight": tensor})
    checkpoint = Checkpoint(tmp_path, manifest, open(__file__, "rb"))  # noqa: SIM115
    with checkpoint:
        checkpoint.require_shapes({"weight": (257, 16)})
        with pytest.raises(UserError, match=r"\(257, 16\) in it, and \(1000000000000, 16\) here"):
            checkpoint.require_shapes({"weight": (10**12, 16)})
        with pytest.raises(UserError, match="is not in it"):
            checkpoint.require_shapes({"other": (1,)})


@pytest.mark.parametrize(
    "override", ["model.moe.experts=1000000000", "model.blocks=[{repeat: 1000000000}]"]
)
def test_what_is_listed_one_by_one_has_a_bound(override):
    with pytest.raises(UserError, match=r"takes .*a whole number from 1 to "):
        load(None, [override])


def test_messages_are_no_lists_of_all_values():
    assert format_value([1] * 200_000).endswith(", ... 200,000 values in all]")
    assert len(str(UserError("x" * 10**6))) < 70_000


def test_empty_documents_of_a_small_file_do_not_grow_a_batch(tmp_path):
    count = 300_000
    column = pyarrow.DictionaryArray.from_arrays(np.zeros(count, "i4"), pyarrow.array([""]))
    path = tmp_path / "empty.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), path, store_schema=False)
    assert path.stat().st_size < 10_000
    shards = tuple(split_file(CorpusFile(str(path)), 1 << 22))
    batches = preprocess._batch_documents(shards, BrokenRows())
    sizes = [len(batch) for batch in batches]
    assert sum(sizes) == count and max(sizes) <= preprocess._BATCH // 64
