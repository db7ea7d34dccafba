"""`train_on_batch`, `test_on_batch` and `predict_on_batch`: this rank's rows of a batch on all ranks."""

from __future__ import annotations

import contextlib

import keras
import tensorflow as tf

from tfdist.backend.keras.patching import Patches
from tfdist.backend.keras.private import TensorFlowTrainer
from tfdist.data.sharding import row_range
from tfdist.step.context import strategy_of
from tfdist.step.local_steps import global_parameters
from tfdist.strategies.keras_patches.models import adopt_optimizers, strategy_of_ranks
from tfdist.utils.temporary import attributes_set

PATCHES = Patches()


@PATCHES.of(TensorFlowTrainer, "predict_on_batch")
def _predict_on_batch(self, x, *, original):
    if strategy_of_ranks(self) is None:
        return original(self, x)
    return self.predict(x, batch_size=_num_rows(x), verbose=0)


@PATCHES.of(TensorFlowTrainer, "train_on_batch")
def _train_on_batch(self, x, y=None, sample_weight=None, *args, original, **kwargs):
    strategy = strategy_of(self)
    if strategy is not None:
        adopt_optimizers(self, strategy)
    with _sharded(self, "train_function", (x, y, sample_weight)) as batch:
        return original(self, *batch, *args, **kwargs)


@PATCHES.of(TensorFlowTrainer, "test_on_batch")
def _test_on_batch(self, x, y=None, sample_weight=None, *args, original, **kwargs):
    with _sharded(self, "test_function", (x, y, sample_weight)) as batch, global_parameters(self):
        return original(self, *batch, *args, **kwargs)


@contextlib.contextmanager
def _sharded(model, function: str, batch):
    """A context in which a function of a model takes this rank's rows and tokens of a batch.

    Its value is the batch for Keras: these rows, or all of them if their number is not divisible. Then the function
    draws its own from a dataset, as in `fit`: a graph that is traced for tensors assumes that their shapes are the
    same on all ranks.
    """
    strategy = strategy_of_ranks(model)
    if strategy is None:
        yield batch
        return
    strategy.extended.batch_logs_read.assign(True)
    group, rows = strategy.row_group, _num_rows(batch)
    if rows % group.size == 0 and strategy.token_group.size == 1:
        start, end = row_range(rows, group.size, group.rank)
        yield tf.nest.map_structure(lambda part: None if part is None else part[start:end], batch)
        return
    getattr(model, f"make_{function}")()
    call = getattr(model, function)

    def call_with_dataset(batches):
        dataset = tf.data.Dataset.from_tensors(keras.tree.lists_to_tuples(next(batches)))
        return call(iter(strategy.experimental_distribute_dataset(dataset)))

    with attributes_set(model, **{function: call_with_dataset}):
        yield batch


def _num_rows(batch) -> int:
    return next(part for part in tf.nest.flatten(batch) if part is not None).shape[0]
