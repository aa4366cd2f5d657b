"""The answers of one rank, with which all layouts are compared."""

import pytest


@pytest.fixture(scope="session")
def run_alone(pool):
    """run_alone(model, train, ...) -> what `run` finds on one rank, once for equal arguments."""
    # It imports Triton, before which shared_fixtures chooses the interpreter.
    from parity_runs import run

    results = {}

    def find(*arguments):
        key = repr(arguments)
        if key not in results:
            (results[key],) = pool.run(1, run, *arguments)
        return results[key]

    return find
