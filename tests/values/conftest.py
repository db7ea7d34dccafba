"""What the time of a call must not hold."""

import gc

import pytest


@pytest.fixture(scope="module", autouse=True)
def _what_other_tests_left_stays():
    """To collect it takes seconds, which would count as those of the call that it fell into."""
    gc.freeze()
    yield
    gc.unfreeze()
