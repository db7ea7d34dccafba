"""tf_keras under MultiWorkerMirroredStrategy."""

from __future__ import annotations

import tensorflow as tf
import tf_keras

from .keras_models import clock, count, limit_threads, make_loss, make_model
from .serving import FitTraining, Settings, Training, own_rows


def prepare(settings: Settings) -> Training:
    """Builds this worker's replica."""
    limit_threads(settings)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    tf_keras.utils.set_random_seed(0)
    with strategy.scope():
        model = make_model(settings)
        model.compile(tf_keras.optimizers.Adam(1e-3), make_loss(settings))
    # Each worker brings its own rows, so that nothing has to be split.
    data = strategy.distribute_datasets_from_function(
        lambda _: tf.data.Dataset.from_tensors(own_rows(settings)).repeat()
    )
    return FitTraining(model, data, clock, count(model))
