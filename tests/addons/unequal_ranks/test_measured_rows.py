"""How rows are divided by measured shares, without ranks."""

from __future__ import annotations

import json

import keras
import pytest
import tensorflow as tf

from tfdist.addons.unequal_ranks.measured_rows import MeasuredRowShares
from tfdist.checkpoint.fit_state import FitState, check_state
from tfdist.data.sharding import shard_batches
from tfdist.step.shares import PARTS, MeasuredShares, parts_of


def test_limits_hold_for_each_batch():
    found = MeasuredRowShares(MeasuredShares(max_rows=[4, 10, 6]), 3)

    def sizes(rows):
        ranges = [found.row_range(rows, rank) for rank in range(3)]
        return [int(end - start) for start, end in ranges]

    assert sizes(6) == [2, 2, 2]
    assert sizes(18) == [4, 8, 6]
    assert sizes(20) == [4, 10, 6]
    assert sum(sizes(50)) == 50  # More than there is room for.
    found.set_parts(parts_of([20, 1, 1]))
    assert sizes(11) == [4, 6, 1]


def test_what_a_checkpoint_keeps_comes_back():
    shares = MeasuredRowShares(MeasuredShares(), 2)
    shares.set_parts(parts_of([5, 3]))
    shares.speeds = (50.0, 30.0)
    kept = json.loads(json.dumps(shares.values(in_epoch=True)))
    other = MeasuredRowShares(MeasuredShares(), 2)
    other.restore(kept)
    assert other.parts == shares.parts and other.speeds == shares.speeds
    assert [int(bound) for bound in other.row_range(16, 0)] == [0, 10]
    of_three = MeasuredRowShares(MeasuredShares(), 3)
    of_three.restore(kept)
    assert len(of_three.parts) == 3 and of_three.speeds is None


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"parts": 3, "speeds": None},
        {"parts": [PARTS], "speeds": "fast"},
        {"parts": [PARTS + 1, -1], "speeds": None},
        {"parts": [1.0 * PARTS, 0.0], "speeds": None},
        {"parts": [PARTS, 0], "speeds": [1.0, 0.0]},
        {"parts": [PARTS, 0], "speeds": [1.0]},
        {"parts": [PARTS, 0], "speeds": [1.0, float("nan")]},
    ],
)
def test_values_of_something_else_are_refused(values):
    shares = MeasuredRowShares(MeasuredShares(), 2)
    with pytest.raises(ValueError, match="as `values` returns them"):
        shares.restore(values)
    assert shares.parts == (PARTS // 2, PARTS // 2) and shares.speeds is None


def test_limits_are_one_for_each_rank():
    with pytest.raises(ValueError, match="max_rows"):
        MeasuredRowShares(MeasuredShares(max_rows=[1, 2, 3]), 2)


def test_parts_that_are_no_shares_are_refused():
    shares = MeasuredRowShares(MeasuredShares(), 2)
    for parts in ([PARTS], [PARTS, 1], [PARTS + 1, -1]):
        with pytest.raises(ValueError, match="2 integers that add up"):
            shares.set_parts(parts)


def test_a_change_holds_for_the_next_batch():
    """Nothing is read ahead with old shares."""
    shares = MeasuredRowShares(MeasuredShares(), 2)
    data = tf.data.Dataset.range(100).batch(10)
    ranks = [iter(shard_batches(data, 2, rank, shares)) for rank in range(2)]
    for parts in ([1, 1], [9, 1], [1, 4], [1, 0], [2, 3]):
        total = sum(parts)
        shares.set_parts(
            [PARTS * part // total for part in parts[:1]] + [PARTS - PARTS * parts[0] // total]
        )
        own = [next(rank).numpy().tolist() for rank in ranks]
        assert [len(rows) for rows in own] == [10 * part // total for part in parts]
        joined = own[0] + own[1]
        assert joined == list(range(joined[0], joined[0] + 10))


class AtTheStart:
    """A position in data before the first batch."""

    def state(self, batch):
        counts = dict.fromkeys(("iterators", "more_samples"), 0)
        return counts | dict.fromkeys(("taken", "batches", "batch_size", "random"))

    def resume(self, data, batch):
        return batch


def test_shares_of_earlier_checkpoints_come_back():
    """They were beside the kept states, which had no names."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.history = keras.callbacks.History()
    model.history.on_train_begin()
    shares = MeasuredRowShares(MeasuredShares(), 2)
    shares.set_parts(parts_of([5, 3]))
    state = FitState(model, AtTheStart(), [], [shares]).collect(0, 0)
    state["batch_shares"], state["kept"] = state["kept"]["batch_shares"], []
    check_state(state)
    other = MeasuredRowShares(MeasuredShares(), 2)
    FitState(model, AtTheStart(), [], [other]).resume(state)
    assert other.parts == shares.parts
    del state["batch_shares"]
    state["kept"] = {}
    FitState(model, AtTheStart(), [], [MeasuredRowShares(MeasuredShares(), 2)]).resume(state)
