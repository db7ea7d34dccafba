"""Ranks that bring their own data: lengths and batch sizes may differ."""

from __future__ import annotations

import numpy as np
import pytest

from tests.conftest import on_ranks
from tests.strategies import programs


def own_batches(strategy):
    """The first rank has three batches of 8, 8 and 4 rows, the second one of 5."""
    import tensorflow as tf

    programs.start()
    x, y = programs.images(25)
    parts = [(x[:20], y[:20], 8), (x[20:], y[20:], 5)]

    def own(context):
        part, labels, batch = parts[context.input_pipeline_id]
        return tf.data.Dataset.from_tensor_slices((part, labels)).batch(batch)

    with strategy.scope():
        model = programs.mlp()
        model.compile(programs.optimizer("sgd"), programs.cross_entropy(), metrics=["accuracy"])
    history = model.fit(strategy.distribute_datasets_from_function(own), epochs=2, verbose=0)
    return programs.finish(model, history, x, y)


def joined_batches(strategy):
    """The same samples in the same steps, in one process."""
    import tensorflow as tf

    programs.start()
    x, y = programs.images(25)
    rows = [[*range(8), *range(20, 25)], [*range(8, 16)], [*range(16, 20)]]
    model = programs.mlp()
    model.compile(programs.optimizer("sgd"), programs.cross_entropy(), metrics=["accuracy"])

    def batches():
        for some in rows:
            yield x[some], y[some]

    data = tf.data.Dataset.from_generator(
        batches,
        output_signature=(
            tf.TensorSpec([None, 8, 8, 1]),
            tf.TensorSpec([None], tf.int64),
        ),
    )
    history = model.fit(data, epochs=2, verbose=0)
    return programs.finish(model, history, x, y)


@on_ranks(("horovod", 2), slow=[("tensorflow", 2)])
def test_a_shorter_rank_goes_on_without_samples(pool, one_process):
    expected = one_process.run(programs.in_one_process, joined_batches)[0]
    programs.assert_same(pool.run(programs.on_rank, own_batches), expected)


def unlike_batches(strategy):
    import tensorflow as tf

    def own(context):
        width = 3 + context.input_pipeline_id
        return tf.data.Dataset.from_tensors(np.zeros((4, width), "float32"))

    strategy.distribute_datasets_from_function(own)


@on_ranks(("tensorflow", 2))
def test_unlike_batches_are_refused_on_all_ranks(pool):
    with pytest.raises(ValueError, match="of the same structure"):
        pool.run(programs.on_rank, unlike_batches)


def unseeded_shuffle(strategy):
    import tensorflow as tf

    tf.random.set_seed(None)
    data = tf.data.Dataset.range(10).shuffle(10).batch(4)
    strategy.experimental_distribute_dataset(data)


@pytest.mark.slow
@on_ranks(("tensorflow", 2))
def test_a_shuffle_by_chance_is_refused(pool):
    with pytest.raises(ValueError, match="shuffles with a seed"):
        pool.run(programs.on_rank, unseeded_shuffle)


def unbatched(strategy):
    import tensorflow as tf

    strategy.experimental_distribute_dataset(tf.data.Dataset.range(10))


@on_ranks(("tensorflow", 2))
def test_a_data_set_without_batches_is_refused(pool):
    with pytest.raises(ValueError, match=r"Call `\.batch\(\)`"):
        pool.run(programs.on_rank, unbatched)
