"""Compute-optimal sizes: how many parameters to train on how many tokens, for given FLOPs.

Training takes C = 6 N D FLOPs for N parameters and D tokens. A law says which N is best for C. It
is either the minimum of a fitted loss L(N, D) under that constraint, or a fitted power of C.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from megaframe.config.section import Section
from megaframe.errors import UserError, join_or
from megaframe.io.untrusted import make_printable, parse_yaml, read_file

FLOPS_PER_PARAMETER = 6.0
"""FLOPs of a token for each parameter in forward and backward (Kaplan et al. 2020, section 2.1)."""
PETAFLOP_DAY = 1e15 * 86400.0
_MAX_BYTES = 1 << 16
_Above0 = Annotated[float, Field(gt=0)]


@dataclass(frozen=True)
class LossLaw:
    """The loss E + A / N^alpha + B / D^beta (Hoffmann et al. 2022, equation 2).

    Attributes:
        irreducible: E, in nats per token.
        parameter_factor, parameter_exponent: A and alpha.
        token_factor, token_exponent: B and beta.
        source: Where the fit is from.
        counts_tables: Whether N counts the tables of words.
    """

    irreducible: float
    parameter_factor: float
    parameter_exponent: float
    token_factor: float
    token_exponent: float
    source: str
    counts_tables: bool = True

    def compute_loss(self, parameters: float, tokens: float) -> float:
        """Return the loss of a model that was trained on so many tokens, in nats per token."""
        return (
            self.irreducible
            + self.parameter_factor / parameters**self.parameter_exponent
            + self.token_factor / tokens**self.token_exponent
        )

    def find_parameters(self, flops: float) -> float:
        """Return the N of the lowest loss for C FLOPs: (alpha A / beta B)^(1 / (alpha + beta))
        (C / 6)^(beta / (alpha + beta)) (Hoffmann et al. 2022, equation 4)."""
        alpha, beta = self.parameter_exponent, self.token_exponent
        ratio = alpha * self.parameter_factor / (beta * self.token_factor)
        exponent = beta / (alpha + beta)
        power: float = (flops / FLOPS_PER_PARAMETER) ** exponent
        return float(ratio ** (1.0 / (alpha + beta)) * power)


@dataclass(frozen=True)
class PowerLaw:
    """N = k C^a, for C in FLOPs. It tells no loss.

    Attributes:
        coefficient, exponent: k and a.
        source: Where the fit is from.
        counts_tables: Whether N counts the tables of words.
    """

    coefficient: float
    exponent: float
    source: str
    counts_tables: bool = True

    def compute_loss(self, parameters: float, tokens: float) -> float | None:
        """Return None: a power of the FLOPs says nothing of other sizes than the best."""
        return None

    def find_parameters(self, flops: float) -> float:
        """Return the best N for C FLOPs."""
        return float(self.coefficient * flops**self.exponent)


ScalingLaw = LossLaw | PowerLaw


LAWS: Mapping[str, ScalingLaw] = {
    "chinchilla": LossLaw(
        1.8172, 482.01, 0.3478, 2085.43, 0.3658,
        "the fit to Chinchilla's runs of Besiroglu et al. 2024, which agrees with the other two "
        "approaches of Hoffmann et al. 2022",
    ),
    "chinchilla-as-published": LossLaw(
        1.69, 406.4, 0.34, 410.7, 0.28, "Hoffmann et al. 2022, approach 3"
    ),
    "kaplan": PowerLaw(
        1.3e9 / PETAFLOP_DAY**0.73, 0.73, "Kaplan et al. 2020, table 6", counts_tables=False
    ),
}  # fmt: skip
"""Published laws by name."""


def compute_tokens(flops: float, parameters: float) -> float:
    """Return the tokens on which C FLOPs train N parameters: C / 6 N."""
    return flops / (FLOPS_PER_PARAMETER * parameters)


def compute_tokens_per_parameter(law: ScalingLaw, flops: float, overtraining: float = 1.0) -> float:
    """Return D / N for C FLOPs: that of the law, `overtraining` times. For the same FLOPs the model
    is then smaller by the root of that factor, and the tokens are more by it.

    Args:
        law: What is best.
        flops: C.
        overtraining: By which factor there are more tokens for each parameter.
    """
    parameters = law.find_parameters(flops)
    return overtraining * compute_tokens(flops, parameters) / parameters


def compute_batch_tokens(flops: float) -> float:
    """Return the tokens of a near-optimal batch for a run of C FLOPs: 0.292 C^0.3271.

    Source: DeepSeek LLM (Bi et al. 2024), equation 1, for runs of 1e17 to 2e19 FLOPs.
    """
    return float(0.2920 * flops**0.3271)


def compute_learning_rate(flops: float) -> float:
    """Return a near-optimal learning rate of AdamW for a run of C FLOPs: 0.3118 C^-0.125.

    Source: DeepSeek LLM (Bi et al. 2024), equation 1, for runs of 1e17 to 2e19 FLOPs.
    """
    return float(0.3118 * flops**-0.1250)


class _LossFile(Section):
    irreducible: Annotated[float, Field(ge=0)]
    parameter_factor: _Above0
    parameter_exponent: _Above0
    token_factor: _Above0
    token_exponent: _Above0
    counts_tables: bool = True


class _PowerFile(Section):
    coefficient: _Above0
    exponent: Annotated[float, Field(gt=0, lt=1)]
    counts_tables: bool = True


def load_law(name: str) -> ScalingLaw:
    """Return a published law by its name, or read one from a YAML file: the five numbers of a
    `LossLaw`, or the two of a `PowerLaw`, under the names of their attributes.

    Raises:
        UserError: There is no such law, or the file is none.
    """
    if name in LAWS:
        return LAWS[name]
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        raise UserError(
            f"--law {name} is unknown; use {join_or(list(LAWS))}, or the path of a YAML file with "
            f"{join_or([', '.join(form.model_fields) for form in (_LossFile, _PowerFile)])}"
        )
    try:
        raw = parse_yaml(read_file(path, _MAX_BYTES))
    except OSError as error:
        raise UserError(f"--law {name} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"--law {name}: not valid YAML: {str(error)[:200]}") from None
    return _parse_law(name, raw)


def _parse_law(name: str, raw: object) -> ScalingLaw:
    """Return the law of a file's content. Which of both it is follows from its keys."""
    is_power = isinstance(raw, dict) and "exponent" in raw
    form: type[_LossFile] | type[_PowerFile] = _PowerFile if is_power else _LossFile
    try:
        figures = form.model_validate(raw).model_dump()
    except ValidationError as errors:
        lines = [_format_mistake(error) for error in errors.errors()[:20]]
        raise UserError("\n  ".join([f"--law {name}", *lines])) from None
    return (PowerLaw if is_power else LossLaw)(**figures, source=make_printable(name))


def _format_mistake(error: object) -> str:
    """Return a pydantic error as a line: the figure, and what is wrong with it."""
    assert isinstance(error, dict)
    where = ".".join(map(str, error["loc"])) or "the file"
    if error["type"] == "missing":
        return f"{where}: missing; give the figure"
    if error["type"] == "extra_forbidden":
        return (
            f"{where}: unknown key; use {', '.join(_LossFile.model_fields)}, or "
            f"{', '.join(_PowerFile.model_fields)}"
        )
    return f"{where}: {error['msg'][0].lower()}{error['msg'][1:]}"
