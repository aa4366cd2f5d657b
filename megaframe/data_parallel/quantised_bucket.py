"""QuantisedBucket: frozen matrices that are kept as codes, whose values are made when a unit needs
them and dropped when ZeRO 3 drops values.

There are no master weights. Whoever loads or saves weights opens them: they are then decoded in
host memory, and coded again when they are published. At ZeRO 3 ranks gather codes, elsewhere each
has all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megaframe.architecture.spec import Box
from megaframe.data_parallel.bucket import Bucket, BucketSharding
from megaframe.data_parallel.buffers import BufferPool
from megaframe.distributed.collectives import all_gather_
from megaframe.ops.block_codec import BlockCodec
from megaframe.ops.kernel_dispatch import Kernels
from megaframe.parameters.parameter import Parameter, Precision


class QuantisedBucket(Bucket):
    """Frozen parameters as codes. `weights` is empty unless they are open."""

    _codes: Tensor

    def __init__(
        self,
        parameters: Sequence[Parameter],
        boxes: Sequence[Box],
        precision: Precision,
        sharding: BucketSharding,
        buffers: BufferPool,
        codec: BlockCodec,
        kernels: Kernels,
        *,
        replica: bool = False,
    ) -> None:
        """Allocate the codes.

        Args:
            parameters: As in `Bucket`, and so are the next four.
            boxes: What this rank has of each.
            precision: Types of values, and of weights that are open.
            sharding: The ranks that share the bucket; they divide it at stage 3 alone.
            buffers: Lends all memory on the device.
            codec: Of the weights.
            kernels: Make values on the device.
            replica: As in `Bucket`.
        """
        self._codec, self._kernels = codec, kernels
        self._gathered: Tensor | None = None
        # Nothing is updated: below stage 3 all codes are where all values would be.
        sharding = replace(sharding, stage=sharding.stage if sharding.stage == 3 else 0)
        of_bucket = parameters, boxes, precision, sharding, buffers
        super().__init__(*of_bucket, trained=False, alignment=codec.unit, replica=replica)
        self.gathers = True

    @property
    def stored(self) -> Tensor:
        """The codes of this rank's weights."""
        return self._codes

    def _allocate_weights(self, allocate_host: Callable[[int, torch.dtype], Tensor] | None) -> None:
        self.keeps_values, self.offloaded = False, False
        self._values = self.rounded = None
        span = self.master_span
        size = self._codec.count_bytes(span.stop - span.start)
        self._codes = self._buffers.borrow(size, torch.uint8)
        self.close_weights()

    # Weights.

    def initialize_weights(self, seed: int) -> None:
        """Set the initial weights, one bucket at a time."""
        self.open_weights()
        super().initialize_weights(seed)
        self.publish_weights()

    def open_weights(self) -> None:
        """Decode the weights into host memory."""
        if not self.weights.numel():
            span = self.master_span
            dtype = self._precision.master
            host = self.device if self.device.type == "meta" else torch.device("cpu")
            self.weights = torch.empty(span.stop - span.start, dtype=dtype, device=host)
            self._codec.decode(self._codes.to(host), self.weights)

    def close_weights(self) -> None:
        """Forget the weights that are open."""
        self.weights = torch.empty(0, dtype=self._precision.master)

    def publish_weights(self) -> None:
        """Code the weights, if they are open, and drop the values."""
        if self.weights.numel():
            self._codec.encode(self.weights, self._codes)
            self.close_weights()
        self.release()

    # Values.

    def prefetch(self) -> None:
        """Start gathering the codes, if neither they nor the values are on this rank."""
        if self._values is not None or self._gathered is not None or self.sharding.stage < 3:
            return
        shard = self.sharding.shard
        self._gathered = self._buffers.borrow(len(self._codes) * shard.size, torch.uint8)
        self._gathered.view(shard.size, -1)[shard.index].copy_(self._codes)
        self._gathering = all_gather_(self._gathered, shard)

    def wait_for_values(self) -> None:
        """Return when the values are on this rank."""
        if self._values is not None:
            return
        self.prefetch()
        self.wait_for_gather()
        self._values = self._buffers.borrow(self.length, self._precision.compute)
        codes = self._codes if self._gathered is None else self._gathered
        parts = 1 if self._gathered is None else self.sharding.shard.size
        for part, values in zip(codes.view(parts, -1), self._values.view(parts, -1), strict=True):
            self._codec.decode(part, values, self._kernels)
        self._drop_gathered()
        self._bind_values(self._values)

    def release(self) -> None:
        """Drop the values and what is gathered of the codes."""
        self.wait_for_gather()
        self._drop_gathered()
        super().release()

    def _drop_gathered(self) -> None:
        if self._gathered is not None:
            self._buffers.give_back(self._gathered)
            self._gathered = None
