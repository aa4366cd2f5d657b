"""Adapters of frozen matrices: keys of `model.adapters`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megaframe.config.section import NonNegative, Positive, Section

FROZEN_BASE = "!*.adapters.*"
"""Pattern of the names of all parameters but those of adapters."""


class QuantisationConfig(Section):
    """How the frozen matrices of the base are kept: as numbers of levels, with the largest
    magnitude (absmax) of each block of neighbours in a row. Blocks are those of the whole matrix,
    so no layout changes them."""

    type: Literal["nf4", "int8"] = "nf4"
    """nf4: 4 bits, whose 16 levels are quantiles of the normal distribution (QLoRA, Dettmers et
    al. 2023). int8: 8 bits, 255 equally spaced levels."""
    block: Positive = 64
    """Inputs of a row that share an absmax, which is fp32."""
    absmax_block: Positive | None = None
    """Blocks of a row whose absmax are kept in 8 bits, as shares of the largest of them, which is
    fp32 (double quantisation). Default: each absmax is fp32."""


class AdaptersConfig(Section):
    """Low-rank adapters (LoRA, Hu et al. 2021): to a frozen matrix W the product alpha / rank B A
    is added, and only A and B are trained and saved, with `dora` norms of rows as well."""

    rank: Positive = 8
    """Rank of the product: outputs of A, inputs of B."""
    alpha: Annotated[float, Field(gt=0)] = Field(default_factory=lambda values: values["rank"])
    """The product is multiplied by alpha / rank. Default: `rank`, a factor of 1."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout of the inputs of A; the mask depends only on seed, step, matrix and token. Not for
    experts, whose tokens come from many samples."""
    dora: bool = False
    """Whether the norms of the rows of W + alpha / rank B A are trained too (DoRA, Liu et al.
    2024). They start as those of W, and the norm that a row is divided by has no gradient. Not for
    experts."""
    targets: tuple[str, ...] = ("*",)
    """The matrices that get an adapter, by their names within a block: `attention.qkv.query`, or
    what follows a dot of it, `query`; `*` matches anything. Default: all of the blocks' mixers,
    MLPs and experts."""
    layers: tuple[NonNegative, ...] | None = None
    """The layers that have adapters. Default: all."""
    quantize_base: QuantisationConfig | None = None
    """How matrices that may have adapters are kept, in all layers, whatever `targets` and `layers`
    say: as codes, from which a block's values are made while it computes. Default: as all weights
    are."""
