"""Initial values of slices are those of the arrays, bit for bit."""

from __future__ import annotations

import types

import keras
import numpy as np
import pytest

from tfdist.addons.recommenders.sharded_embedding.draws import SliceDrawn, can_slice
from tfdist.collectives import Group
from tfdist.sharding.parts import Slice

KINDS = keras.initializers
INITIALIZERS = {
    "uniform": lambda: KINDS.RandomUniform(seed=3),
    "uniform, large seed": lambda: KINDS.RandomUniform(-1, 2, seed=2**31 + 5),
    "normal": lambda: KINDS.RandomNormal(1.0, 2.0, seed=4),
    "truncated normal": lambda: KINDS.TruncatedNormal(seed=5),
    "glorot uniform": lambda: KINDS.GlorotUniform(seed=6),
    "he normal": lambda: KINDS.HeNormal(seed=7),
    "fan out": lambda: KINDS.VarianceScaling(2.0, "fan_out", "untruncated_normal", seed=8),
    "constant": lambda: KINDS.Constant(0.5),
    "ones": KINDS.Ones,
    "zeros": KINDS.Zeros,
}


def slices(shape) -> list[Slice]:
    """Those of three ranks: of rows, of columns, and the whole on the second rank."""
    found = []
    for rank in range(3):
        group = Group((0, 1, 2), "data", types.SimpleNamespace(rank=rank))
        found += [Slice(group, 0, shape), Slice(group, 1, shape)]
        found.append(Slice(group, 0, shape, (0, shape[0], 0)))
    return found


@pytest.mark.parametrize("name", INITIALIZERS)
def test_a_slice_is_drawn_as_the_whole_is(name):
    for shape in [(37, 5), (1000, 33), (3, 1), (70_001, 17)]:  # The last is drawn in chunks.
        initializer = INITIALIZERS[name]()
        assert can_slice(initializer, shape)
        whole = np.asarray(initializer(shape, dtype="float32"))
        for part in slices(shape):
            found = np.asarray(SliceDrawn(initializer).read_slice(part, "float32"))
            np.testing.assert_array_equal(found, part.slice_of(whole))


def test_a_generator_of_seeds_moves_on_once():
    wholes, parts = (KINDS.RandomUniform(seed=keras.random.SeedGenerator(9)) for _ in range(2))
    part = slices((8, 3))[3]
    for _ in range(2):
        whole = np.asarray(wholes((8, 3), dtype="float32"))
        found = np.asarray(SliceDrawn(parts).read_slice(part, "float32"))
        np.testing.assert_array_equal(found, part.slice_of(whole))


@pytest.mark.parametrize(
    "initializer", [KINDS.Orthogonal(seed=1), KINDS.Constant([1.0, 2.0]), KINDS.Identity()]
)
def test_what_is_not_known_is_drawn_whole(initializer):
    assert not can_slice(initializer, (6, 2))
    whole = np.asarray(initializer((6, 2), dtype="float32"))
    for part in slices((6, 2)):
        found = np.asarray(SliceDrawn(initializer).read_slice(part, "float32"))
        np.testing.assert_array_equal(found, part.slice_of(whole))


def test_other_dtypes_are_drawn_whole():
    assert not can_slice(KINDS.RandomUniform(seed=1), (6, 2), "float16")
    assert can_slice(KINDS.Zeros(), (6, 2), "float16")
