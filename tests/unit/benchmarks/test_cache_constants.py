"""Sizes that a cache decides: each is found under its name, scaled for a while and put back."""

import cache_constants
import pytest


@pytest.mark.parametrize("name", cache_constants.CASES)
def test_each_size_is_scaled_for_a_while(name):
    case = cache_constants.CASES[name]
    before = getattr(case.module, case.name)
    with cache_constants.scale_constant(case, 2.0):
        scaled = getattr(case.module, case.name)
    both = zip(scaled, before, strict=True) if isinstance(before, tuple) else [(scaled, before)]
    assert all(large == 2 * small > 0 for large, small in both)
    assert getattr(case.module, case.name) == before
