"""The base class of all config sections, and the number types that they share."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

MOST = 10**12
"""Largest number of anything in a config, so that plans of absurd sizes stay numbers of numpy."""
Positive = Annotated[int, Field(gt=0, le=MOST)]
NonNegative = Annotated[int, Field(ge=0, le=MOST)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class Section(BaseModel):
    """Base of all sections: frozen, unknown keys refused, field docstrings kept as descriptions."""

    main_key: ClassVar[str] = ""
    """The key that is meant if a text stands where the section should; empty: none."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _read_main_key(cls, given: Any) -> Any:
        return {cls.main_key: given} if cls.main_key and isinstance(given, str) else given
