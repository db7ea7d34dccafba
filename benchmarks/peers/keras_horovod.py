"""tf_keras with Horovod's DistributedOptimizer."""

from __future__ import annotations

import horovod.tensorflow.keras as hvd
import tensorflow as tf
import tf_keras

from .keras_models import clock, count, limit_threads, make_loss, make_model
from .serving import FitTraining, Settings, Training, own_rows


def prepare(settings: Settings) -> Training:
    """Builds this rank's replica."""
    limit_threads(settings)
    hvd.init()
    tf_keras.utils.set_random_seed(0)  # The same weights on all ranks.
    model = make_model(settings)
    optimizer = hvd.DistributedOptimizer(tf_keras.optimizers.Adam(1e-3))
    model.compile(optimizer, make_loss())
    data = tf.data.Dataset.from_tensors(own_rows(settings)).repeat()
    return FitTraining(model, data, clock, count(model))
