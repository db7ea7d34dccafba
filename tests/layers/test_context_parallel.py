"""Attention over a context axis gives what one rank gives, and so does training on one."""

from __future__ import annotations

import numpy as np
import pytest

from tests.conftest import on_ranks
from tests.layers import context_programs as programs
from tfdist.layers.context_parallel import KINDS


def check(pool, kind, causal, mask=None, tolerance=1e-5, **options):
    shapes = {name: value for name, value in options.items() if name not in ("eager", "dtype")}
    expected = programs.plain(mask, causal, **shapes)
    results = pool.run(programs.on_rank, kind, causal, mask, timeout=200, **options)
    for name, found, right in zip(
        ("out", "dq", "dk", "dv"), programs.joined(results), expected, strict=True
    ):
        np.testing.assert_allclose(found, right, rtol=tolerance, atol=tolerance, err_msg=name)


@on_ranks(("horovod", 2), slow=[("horovod", 4), ("tensorflow", 3)])
@pytest.mark.parametrize("kind", KINDS)
def test_attention_is_that_of_one_rank(pool, kind):
    for causal in (True, False):
        check(pool, kind, causal, heads=12, key_heads=12, time=24)
        check(pool, kind, causal, heads=24, key_heads=12, time=21)


_single: dict = {}


def single(one_process, **options):
    """The outcome of one process, trained once for all that compare with it."""
    key = repr(sorted(options.items()))
    if key not in _single:
        _single[key] = one_process.run(programs.train, None, timeout=240, **options)[0]
    return _single[key]


def check_training(pool, one_process, mesh, tolerance=1e-5, only_here=None, **options):
    history, weights = single(one_process, **options)
    for found, own in pool.run(
        programs.train, mesh, timeout=300, **options, **(only_here or {})
    ):
        for name in found:
            np.testing.assert_allclose(
                found[name], history[name], rtol=tolerance, atol=tolerance, err_msg=name
            )
        for one, right in zip(own, weights, strict=True):
            np.testing.assert_allclose(one, right, rtol=tolerance, atol=tolerance)


TWO = {"data": 1, "context": 2}


@on_ranks(("horovod", 2))
@pytest.mark.parametrize("time", [16, 13])
def test_gpt_trains_as_in_one_process(pool, one_process, time):
    check_training(pool, one_process, TWO, time=time)
