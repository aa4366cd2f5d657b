"""Cases of a parametrized test that only `make test-all` runs.

With several `parametrize` on a test, a case is slow if any of its values is.
"""

import pytest

COLLECTED = pytest.StashKey[list[pytest.Item]]()
"""All tests of this run, in `config.stash`, those that its options leave out included."""


def slow(*values, **options):
    """Return a slow case of these values, one for each parameter, as `pytest.param` does."""
    return pytest.param(*values, marks=pytest.mark.slow, **options)


def mark_slow(cases, *, except_for):
    """Return the cases in their order, slow but for those `except_for`, each of which is one of
    them. A tuple is a case of several parameters."""
    cases, quick = list(cases), list(except_for)
    assert all(case in cases for case in quick), "a quick case is none of the cases"
    return [
        case if case in quick else slow(*case) if isinstance(case, tuple) else slow(case)
        for case in cases
    ]
