"""Plain KerasHub in one process, without tfdist, on TensorFlow or JAX."""

from __future__ import annotations

import os

import keras
import tensorflow as tf

from .hub_models import compile_task, make_task, training_of
from .serving import Settings, Training, padded


def prepare(settings: Settings) -> Training:
    """Builds the model."""
    if keras.backend.backend() == "jax":
        # Before XLA makes its pool, which may be larger.
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: settings.threads])
    else:
        tf.config.threading.set_intra_op_parallelism_threads(settings.threads)
        tf.config.threading.set_inter_op_parallelism_threads(2)
    keras.utils.set_random_seed(0)
    task = make_task(settings.sizes)
    task.backbone.enable_lora(settings.sizes["rank"])
    with_conversations = settings.options["measure"] == "conversations"
    loss = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction="sum" if with_conversations else "sum_over_batch_size"
    )
    compile_task(task, loss, jit_compile=settings.options["jit_compile"])
    found = _conversations(settings) if with_conversations else None
    return training_of(task, settings, lambda variable: tuple(variable.shape), found)


def _conversations(settings: Settings):
    """Padded conversations without end, and the number of their batches."""
    batches = []
    for each in padded(settings.sizes):
        weights = each.trained.astype("float32") / each.trained.sum()
        inputs = {"token_ids": each.ids, "padding_mask": each.mask}
        batches.append((inputs, each.targets, weights))
    like = tf.nest.map_structure(
        lambda array: tf.TensorSpec([len(array), None], array.dtype), batches[0]
    )
    data = tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=like)
    return data.cache().repeat(), len(batches)
