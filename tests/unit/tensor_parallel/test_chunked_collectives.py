"""Rows that travel in parts, on a rank that has nobody to send them to."""

import torch

from megaframe.distributed.collectives import ALONE
from megaframe.tensor_parallel.chunked_collectives import gather_chunks, scatter_chunks


def test_rows_of_one_rank_stay_together():
    x = torch.arange(24.0).view(8, 3)
    (part,) = gather_chunks(x, ALONE, chunks=4)
    assert part.data_ptr() == x.data_ptr()
    (scattered,) = scatter_chunks(x, lambda rows: rows, ALONE, chunks=4)
    assert torch.equal(scattered.wait(), x)
