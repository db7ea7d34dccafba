"""Plain KerasHub in one process, without tfdist."""

from __future__ import annotations

import keras
import tensorflow as tf

from .hub_models import compile_task, make_task, training_of
from .serving import Settings, Training


def prepare(settings: Settings) -> Training:
    """Builds the model."""
    tf.config.threading.set_intra_op_parallelism_threads(settings.threads)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    keras.utils.set_random_seed(0)
    task = make_task(settings.sizes)
    task.backbone.enable_lora(settings.sizes["rank"])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    compile_task(task, loss, jit_compile=settings.options["jit_compile"])
    return training_of(task, settings, lambda variable: tuple(variable.shape))
