"""Sources for tests of loaders, and inputs cut into small parts."""

import pytest
from loader_runs import write_sources

from megaframe.data.preprocessing import preprocess


@pytest.fixture
def paths(tmp_path):
    """Return the prefixes of three sources without a common token id."""
    return write_sources(tmp_path)


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(preprocess, "_SMALLEST_PART", 1500)
