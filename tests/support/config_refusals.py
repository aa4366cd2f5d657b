"""What the checks across sections refuse of a config, on so many ranks."""

from megaframe.config import load
from megaframe.errors import UserError
from megaframe.validate.run import validate_config

LATENT = "model.latent={kv_rank: 64, head_dim: 32, rotary_dim: 16, value_dim: 32}"
SOUND = ("model.vocab=100", "data.sources=[{path: x}]")


def list_refusals(*overrides, world=1):
    """Return the lines of the refusal without its headline, or none if the config passes."""
    try:
        validate_config(load(None, [*SOUND, *overrides]), world)
    except UserError as error:
        return str(error).split("\n  ")[1:]
    return []


def list_refusals_of_ranks(keys):
    """Return the refusals of a config by keys, on as many ranks as its axes ask for."""
    ranks = keys.get("parallel.context", 1) * keys.get("parallel.tensor", 1)
    return list_refusals(*(f"{name}={value}" for name, value in keys.items()), world=ranks)
