"""tf_keras with Horovod's DistributedOptimizer."""

from __future__ import annotations

import horovod.tensorflow.keras as hvd
import tensorflow as tf
import tf_keras

from .keras_models import clock, count, limit_threads, make_loss, make_model, make_optimizer
from .serving import FitTraining, Settings, Training, own_rows


def prepare(settings: Settings) -> Training:
    """Builds this rank's replica."""
    limit_threads(settings)
    hvd.init()
    tf_keras.utils.set_random_seed(0)  # The same weights on all ranks.
    model = make_model(settings)
    # Sparse gradients of embeddings are gathered, as by default.
    optimizer = hvd.DistributedOptimizer(make_optimizer(settings))
    model.compile(optimizer, make_loss(settings))
    data = tf.data.Dataset.from_tensors(own_rows(settings)).repeat()
    return FitTraining(model, data, clock, count(model))
