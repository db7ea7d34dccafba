"""What ranks hold of a global array: together all of it, and each entry once."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest

from tfdist.checkpoint.shards import boxes, shards_of
from tfdist.sharding.layout import global_shape, update_layout
from tfdist.sharding.parts import FlatShard, Slice


@dataclasses.dataclass(frozen=True)
class GroupStandIn:
    """All that is asked of a group here."""

    rank: int
    size: int


class Variable:
    def __init__(self, shape, path="layer/kernel"):
        self.shape, self.path = tuple(shape), path


SHAPES = [(), (1,), (7,), (3, 5), (4, 1, 3), (5, 2, 3), (2, 0)]


class Rows:
    """An array of which it is counted how many rows are read at once."""

    def __init__(self, array):
        self._array, self.most = array, 0

    def __array__(self, dtype=None, copy=None):
        return self._array

    def __getitem__(self, index):
        rows = self._array[index]
        self.most = max(self.most, len(rows))
        return rows


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_shard_is_read_by_its_rows(shape, size):
    array = np.arange(1, math.prod(shape) + 1).reshape(shape)
    for rank in range(size):
        shard, rows = FlatShard(GroupStandIn(rank, size), shape), Rows(array)
        np.testing.assert_array_equal(shard.read(rows), shard.local_shard(array))
        # A share may begin and end within a row.
        assert rows.most <= math.ceil((shape or (1,))[0] / size) + 1


@pytest.mark.parametrize("shape", SHAPES)
def test_boxes_of_a_run_are_the_run(shape):
    array = np.arange(math.prod(shape)).reshape(shape)
    for begin, end in itertools.combinations_with_replacement(range(array.size + 1), 2):
        found = [part for _, box in boxes(begin, end, shape) for part in array[box].reshape(-1)]
        assert found == list(range(begin, end))
        runs = [edge for run, _ in boxes(begin, end, shape) for edge in run]
        assert runs == sorted(runs)


def held(array: np.ndarray, tensor: GroupStandIn | None, axis: int, data: GroupStandIn | None):
    """A variable of a rank, and the value that it has."""
    value, split = array, None
    if tensor is not None:
        split = Slice(tensor, axis, array.shape)
        value = np.array(split.slice_of(array))
    variable = Variable(value.shape)
    if split is not None:
        update_layout(variable, slice=split)
    if data is not None:
        flat = FlatShard(data, value.shape)
        value = np.array(flat.local_shard(value))
        update_layout(variable, flat=flat)
    return variable, value


@pytest.mark.parametrize("shape", [(7,), (3, 5), (4, 1, 3)])
@pytest.mark.parametrize("num_tensor", [1, 2, 3])
@pytest.mark.parametrize("num_data", [1, 2, 5])
def test_shards_of_all_ranks_are_the_array(shape, num_tensor, num_data):
    array = np.arange(1, 1 + math.prod(shape), dtype="float32").reshape(shape)
    for axis in range(len(shape)):
        written = np.zeros_like(array)
        for tensor, data in itertools.product(range(num_tensor), range(num_data)):
            places = (
                GroupStandIn(tensor, num_tensor) if num_tensor > 1 else None,
                GroupStandIn(data, num_data) if num_data > 1 else None,
            )
            variable, value = held(array, places[0], axis, places[1])
            assert global_shape(variable) == shape
            read = np.zeros_like(value)
            for shard in shards_of(variable):
                assert np.all(written[shard.box] == 0)
                written[shard.box] = shard.get(value)
                shard.put(read, array[shard.box])
            np.testing.assert_array_equal(read, value)
        np.testing.assert_array_equal(written, array)


def several_optimizers(folder: str):
    import keras

    from tfdist.checkpoint import restore, save
    from tfdist.strategies import LocalStrategy

    def trained(steps: int):
        keras.utils.set_random_seed(steps)
        with LocalStrategy().scope():
            layers = [keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(1)]
            model = keras.Sequential(layers)
            by_name = keras.optimizers.OptimizerMap(
                keras.optimizers.Adam(0.1), {".*bias": keras.optimizers.RMSprop(0.1)}
            )
            model.compile(keras.optimizers.MultiOptimizer(by_name), "mse")
        x = np.random.default_rng(0).normal(size=(4 * steps, 3)).astype("float32")
        model.fit(x, x[:, :1], batch_size=4, shuffle=False, verbose=0)
        return model

    before, after = trained(3), trained(1)
    restore(save(folder, before, step=3), after)
    return [
        [(variable.path.split("/")[-1], variable.numpy()) for variable in model.optimizer.variables]
        for model in (before, after)
    ]


def test_several_optimizers_in_one(one_process, tmp_path):
    """Each parameter's state lies in the optimizer that updates it."""
    ((expected, restored),) = one_process.run(several_optimizers, str(tmp_path))
    assert len(expected) > 8
    for (name, value), (_, right) in zip(restored, expected, strict=True):
        np.testing.assert_array_equal(value, right, err_msg=name)
