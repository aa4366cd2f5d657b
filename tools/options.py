"""Print all options of a run as Markdown: the content of docs/reference/options.md.

python tools/options.py > docs/reference/options.md
"""

from __future__ import annotations

from megaframe.config.describe import COMMON
from megaframe.config.keys import ConfigKey, get_config_keys
from megaframe.io.closed_output import allow_closed_output

_BEGIN = """\
# Options

Every config key with the values it takes and its default. `tools/options.py` generates this \
page from the schema, and a test keeps them in sync. `pretrain_gpt.py --explain KEY` prints the \
same for one key, and `--help all` for all of them. A `derived` default depends on other keys, as \
the description says.

## The keys that people change

`pretrain_gpt.py --help` shows these. All keys follow, by section.
"""


def format_page() -> str:
    """Return the whole page."""
    parts = [f"{_BEGIN}\n{_format_rows([get_config_keys()[name] for name in COMMON])}"]
    for name, section in get_config_keys().items():
        inner = [key for key in get_config_keys().values() if key.name.rpartition(".")[0] == name]
        leaves = [key for key in inner if not key.section or key.nullable]
        if section.section and leaves:
            parts.append(_format_section(section, leaves))
    return "\n\n".join(parts) + "\n"


def _format_section(section: ConfigKey, leaves: list[ConfigKey]) -> str:
    lines = [f"## {section.name}", "", section.text, ""] if section.text else [section.name, ""]
    return "\n".join([*lines, _format_rows(leaves)])


def _format_rows(leaves: list[ConfigKey]) -> str:
    lines = ["| key | takes | default | |", "|---|---|---|---|"]
    lines += [f"| {' | '.join(_format_cells(key))} |" for key in leaves]
    return "\n".join(lines)


def _format_cells(key: ConfigKey) -> list[str]:
    takes = f"keys of {key.name}, or null" if key.section else key.allowed
    cells = [f"`{key.name}`", takes, f"`{key.default}`", key.text]
    return [cell.replace("|", "\\|") for cell in cells]


def main() -> None:
    """Print the page."""
    print(format_page(), end="")


if __name__ == "__main__":
    with allow_closed_output():
        main()
