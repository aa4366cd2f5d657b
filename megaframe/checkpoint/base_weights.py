"""What a checkpoint of adapters says of the weights that they belong to."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from megaframe.checkpoint.manifest import Checksum


class BaseWeights(BaseModel):
    """The weights that adapters belong to.

    Attributes:
        path: The checkpoint, as it was found.
        fingerprint: Digest of its tensors.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: Annotated[str, Field(max_length=4096, pattern=r"^[^\x00-\x1f\x7f]+$")]
    fingerprint: Checksum
