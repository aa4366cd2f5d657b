"""Sources for tests of loaders."""

import pytest
from loader_runs import write_sources


@pytest.fixture
def paths(tmp_path):
    """Return the prefixes of three sources without a common token id."""
    return write_sources(tmp_path)
