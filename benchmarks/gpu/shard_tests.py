"""A plugin of pytest that keeps every n-th test: `SHARD=3/12 pytest -p shard_tests`.

Several processes together run all tests once, in an environment without pytest-xdist.
"""

from __future__ import annotations

import os
from typing import Any


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Keep the tests of this shard."""
    number, count = map(int, os.environ.get("SHARD", "0/1").split("/"))
    items[:] = items[number::count]
