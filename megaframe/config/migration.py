"""What a name of another program, or of an earlier version, is here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megaframe.config.settings_elsewhere import SETTINGS_ELSEWHERE, SETTINGS_WITHOUT_KEY

RENAMED_KEYS: Mapping[str, str] = {
    "compress_share": "parallel.compress_keep",
    "compress_rank": "parallel.compress_keep",
    "schedule_group": "parallel.schedule_microbatches",
    "schedule_memory": "parallel.schedule_microbatches",
}
"""By the name of a key of earlier versions, in the section of its successor: the key that has
replaced it. Of each two, a run could use only one."""
RENAMED_SECTIONS: Mapping[str, str] = {"meter": "metrics"}
"""By the name of a section of earlier versions: the one that has its keys."""


def upgrade_name(name: str) -> str:
    """Return a key of an earlier version, `section.key`, under the name that its section has now,
    other names as they are."""
    section, dot, key = name.partition(".")
    return f"{RENAMED_SECTIONS.get(section, section)}{dot}{key}"


def upgrade_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config in a checkpoint or a run folder, as plain values, with the keys of this
    version: what the former ones said that had an effect, under those that have replaced them."""
    config = {upgrade_name(name): value for name, value in config.items()}
    section = config.get("parallel")
    if not isinstance(section, dict):
        return config
    # These had defaults of their own; only that of the compression in use meant anything.
    unused = {"compress_rank": "topk", "compress_share": "powersgd"}
    parallel = {name: value for name, value in section.items() if name not in RENAMED_KEYS}
    for name in RENAMED_KEYS:
        kind = section.get("compress")
        if section.get(name) is None or (name in unused and kind in ("none", "int8", unused[name])):
            continue
        parallel[RENAMED_KEYS[name].partition(".")[2]] = section[name]
    return {**config, "parallel": parallel}


def translate_setting(name: str) -> str | None:
    """Say what a name of another program is here: `Megatron-LM's num_layers is model.layers`; or
    that of a former key.

    Args:
        name: As it was given, with or without a section and leading dashes; `num-layers` is
            `num_layers`.

    Returns:
        A clause for each thing that it is in some program; None if nobody has the name.
    """
    parts = name.strip().lstrip("-").lower().replace("-", "_").split(".")
    if parts[0] in RENAMED_SECTIONS:
        return f"{upgrade_name('.'.join(parts))} has replaced {'.'.join(parts)}"
    for start in range(len(parts)):
        foreign_name = ".".join(parts[start:])
        if foreign_name in RENAMED_KEYS:
            return f"{RENAMED_KEYS[foreign_name]} has replaced {foreign_name}"
        if owners := _find_owners(foreign_name):
            return "; ".join(
                f"{' and '.join(programs)} {foreign_name} {meaning}"
                for meaning, programs in owners.items()
            )
    return None


def _find_owners(foreign_name: str) -> dict[str, list[str]]:
    """Return what a name means, and the programs in which it means that."""
    owners: dict[str, list[str]] = {}
    for program, names in SETTINGS_ELSEWHERE.items():
        key = names.get(foreign_name, "")
        # A name that is the last part of ours is found by likeness, with fewer words.
        if key and key.rpartition(".")[2] != foreign_name.rpartition(".")[2]:
            owners.setdefault(f"is {key}", []).append(f"{program}'s")
    for program, names in SETTINGS_WITHOUT_KEY.items():
        if foreign_name in names:
            owners.setdefault(f"has no key: {names[foreign_name]}", []).append(f"{program}'s")
    return owners
