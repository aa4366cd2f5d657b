"""The answers of one rank, with which all layouts are compared."""

import pytest
from parity_runs import run


@pytest.fixture(scope="session")
def run_alone(pool):
    """run_alone(model, train, ...) -> what `run` finds on one rank, once for equal arguments."""
    results = {}

    def find(*arguments):
        key = repr(arguments)
        if key not in results:
            (results[key],) = pool.run(1, run, *arguments)
        return results[key]

    return find
