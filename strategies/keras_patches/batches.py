"""`train_on_batch`, `test_on_batch` and `predict_on_batch`: this rank's rows of a batch on all ranks."""

from __future__ import annotations

import tensorflow as tf

from tfdist.backend.keras.patching import Patches
from tfdist.backend.keras.private import TensorFlowTrainer
from tfdist.data.sharding import row_range
from tfdist.step.context import strategy_of
from tfdist.step.local_steps import global_parameters
from tfdist.strategies.keras_patches.models import adopt_optimizers, strategy_of_ranks

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
    x, y, sample_weight = _own_rows(self, (x, y, sample_weight))
    return original(self, x, y, sample_weight, *args, **kwargs)


@PATCHES.of(TensorFlowTrainer, "test_on_batch")
def _test_on_batch(self, x, y=None, sample_weight=None, *args, original, **kwargs):
    x, y, sample_weight = _own_rows(self, (x, y, sample_weight))
    with global_parameters(self):
        return original(self, x, y, sample_weight, *args, **kwargs)


def _own_rows(model, batch):
    """This rank's rows and tokens of a batch; all rows on all ranks if their number is not divisible.

    Both give the update of a single process. Rows are never split unevenly here, because a graph is traced for
    the shapes of its arguments, and assumes that they are the same on all ranks.
    """
    strategy = strategy_of_ranks(model)
    if strategy is None:
        return batch
    strategy.extended.batch_logs_read.assign(True)
    group, tokens, rows = strategy.row_group, strategy.token_group, _num_rows(batch)
    if rows % group.size == 0:
        start, end = row_range(rows, group.size, group.rank)
        batch = tf.nest.map_structure(lambda part: None if part is None else part[start:end], batch)
    if tokens.size == 1:
        return batch
    from tfdist.data.tokens import own_tokens

    return own_tokens(batch, tokens.size, tokens.rank, even=True)


def _num_rows(batch) -> int:
    return next(part for part in tf.nest.flatten(batch) if part is not None).shape[0]
