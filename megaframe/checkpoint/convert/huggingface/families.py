"""The table of families, and what an extension adds to it."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from difflib import get_close_matches

from megaframe.checkpoint.convert.huggingface.deepseek_v4_families import DEEPSEEK_V4_FAMILIES
from megaframe.checkpoint.convert.huggingface.delta_net_families import DELTA_NET_FAMILIES
from megaframe.checkpoint.convert.huggingface.dense_families import DENSE_FAMILIES
from megaframe.checkpoint.convert.huggingface.falcon_families import FALCON_FAMILIES
from megaframe.checkpoint.convert.huggingface.family import Family
from megaframe.checkpoint.convert.huggingface.gemma3n_families import GEMMA3N_FAMILIES
from megaframe.checkpoint.convert.huggingface.gemma4_families import GEMMA4_FAMILIES
from megaframe.checkpoint.convert.huggingface.gpt_families import GPT_FAMILIES
from megaframe.checkpoint.convert.huggingface.hunyuan_families import HUNYUAN_FAMILIES
from megaframe.checkpoint.convert.huggingface.kimi_families import KIMI_FAMILIES
from megaframe.checkpoint.convert.huggingface.layered_families import LAYERED_FAMILIES
from megaframe.checkpoint.convert.huggingface.lfm2_families import LFM2_FAMILIES
from megaframe.checkpoint.convert.huggingface.llama4_families import LLAMA4_FAMILIES
from megaframe.checkpoint.convert.huggingface.mamba_families import MAMBA_FAMILIES
from megaframe.checkpoint.convert.huggingface.mimo_families import MIMO_FAMILIES
from megaframe.checkpoint.convert.huggingface.moe_families import MOE_FAMILIES
from megaframe.checkpoint.convert.huggingface.moe_variants import MOE_VARIANTS
from megaframe.checkpoint.convert.huggingface.older_families import OLDER_FAMILIES
from megaframe.checkpoint.convert.huggingface.sparse_families import SPARSE_FAMILIES
from megaframe.config import ModelConfig
from megaframe.config.registry import get_registry
from megaframe.errors import UserError

_ROWS = (
    *(*GPT_FAMILIES, *OLDER_FAMILIES, *DENSE_FAMILIES, *LAYERED_FAMILIES, *HUNYUAN_FAMILIES),
    *(*MOE_FAMILIES, *MOE_VARIANTS, *DELTA_NET_FAMILIES, *LFM2_FAMILIES, *GEMMA4_FAMILIES),
    *(*LLAMA4_FAMILIES, *FALCON_FAMILIES, *MAMBA_FAMILIES, *MIMO_FAMILIES, *KIMI_FAMILIES),
    *(*SPARSE_FAMILIES, *GEMMA3N_FAMILIES, *DEEPSEEK_V4_FAMILIES),
)
FAMILIES = {family.name: family for family in _ROWS}
"""By `model_type`."""


def list_families() -> Mapping[str, Family]:
    """Return all families by name, those of the run's extensions included.

    Raises:
        UserError: An extension has registered one under a name of ours.
    """
    registered = get_registry().families
    if taken := sorted(registered.keys() & FAMILIES.keys()):
        raise UserError(
            f"an extension registers the family {taken[0]}, which is a name of megaframe's own"
        )
    return {**FAMILIES, **registered}


def get_family(name: object) -> Family:
    """Return a family.

    Raises:
        UserError: If there is none of this name.
    """
    families = list_families()
    others = {other: family for family in families.values() for other in family.also}
    if isinstance(name, str) and name in others:
        return others[name]
    if not isinstance(name, str) or name not in families:
        near = get_close_matches(name, families, 3) if isinstance(name, str) else []
        known = f"the nearest are {', '.join(near)}" if near else f"known are {', '.join(families)}"
        raise UserError(f"model_type {reprlib.repr(name)} is not a known family; {known}")
    return families[name]


def find_fitting_families(model: ModelConfig) -> list[str]:
    """Return the names of the families that have a model which computes the same."""
    fitting = []
    for name, family in list_families().items():
        try:
            family.write_config(model, 1)
        except UserError:
            continue
        fitting.append(name)
    return fitting
