"""`parallelize` by a `LayoutMap`, as Keras has them for JAX: built on TensorFlow, and matched whole."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from tests.conftest import on_ranks
from tests.parity.comparing import apart
from tests.tensor_parallel import layout_maps

pytest.importorskip("keras_hub")

TENSOR = {"mesh": {"data": 1, "tensor": 2}}
#: KerasHub's maps name the data axis too.
BOTH = {"mesh": {"data": 2, "tensor": 2}, "zero_stage": 3}
slow = pytest.mark.slow


@functools.cache
def alone(one_process, name, dtype):
    """The losses and weights of one process."""
    return one_process.run(layout_maps.train, name, None, False, dtype, timeout=240)[0][:2]


def apart_in_float64(pool, one_process, name, options) -> float:
    """The largest difference of a weight in float64, on any rank."""
    _, right = alone(one_process, name, "float64")
    found = pool.run(layout_maps.train, name, options, True, "float64", timeout=240)
    return max(apart(weights, right) for _, weights, _ in found)


def check(pool, one_process, name, options):
    """A model that is split by a map trains as by the plan that is found, and as one process."""
    losses, right = alone(one_process, name, "float32")
    found = pool.run(layout_maps.train, name, options, False, timeout=240)
    mapped = pool.run(layout_maps.train, name, options, True, timeout=240)
    for by_map, by_plan in zip(mapped, found, strict=True):
        assert by_map[2] == by_plan[2]  # The same dims of the same variables.
        assert by_map[0] == pytest.approx(losses, rel=1e-5)
        assert list(by_map[1]) == list(right)
        assert apart(by_map[1], by_plan[1]) <= 1e-6
    if max(apart(weights, right) for _, weights, _ in mapped) > 1e-5:
        # Rounding grows from step to step; in float64 nothing of it is left.
        assert apart_in_float64(pool, one_process, name, options) <= 1e-10
    assert losses[-1] < losses[0]


@pytest.mark.slow
@on_ranks(("horovod", 2))
@pytest.mark.parametrize("name", ["Llama", "Llama3", "Gemma", "Gemma2", "Qwen"])
def test_maps_of_keras_hub(pool, one_process, name):
    check(pool, one_process, name, TENSOR)


@slow
@on_ranks(("horovod", 4))
@pytest.mark.parametrize("name", ["Llama", "Gemma"])
def test_maps_that_name_the_data_axis(pool, one_process, name):
    check(pool, one_process, name, BOTH)


@on_ranks(("horovod", 2))
def test_a_map_of_ones_own(pool):
    for before, after, axes in pool.run(layout_maps.own_rules, timeout=120):
        np.testing.assert_allclose(after, before, atol=1e-6)
        assert axes == [1, 0, 0, None, None, None]


@slow
@on_ranks(("horovod", 2))
def test_wrong_maps_are_refused(pool):
    for found in pool.run(layout_maps.refused, timeout=240):
        assert found.keys() == layout_maps.REFUSED.keys()
        for name, message in found.items():
            for part in layout_maps.REFUSED[name][2]:
                assert part in message, f"{name}: {message}"
            assert "\n" not in message, name
