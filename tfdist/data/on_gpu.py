"""Batches that are copied to a rank's GPU before their steps."""

from __future__ import annotations

import tensorflow as tf

from tfdist.backend import devices
from tfdist.data.read_ahead import is_drawn_when_needed


def copied_ahead(dataset: tf.data.Dataset, device: str) -> tf.data.Dataset:
    """The dataset, whose next batch is copied to a GPU during a step; unchanged if that does not suit it.

    It does not suit ids, which the host reads, ragged and sparse tensors, text, and batches that must not be
    prepared before their steps.

    Args:
        dataset: This rank's rows.
        device: The device of the rank.
    """
    if not devices.has_gpu() or is_drawn_when_needed(dataset) or not _suits(dataset.element_spec):
        return dataset
    return dataset.apply(tf.data.experimental.prefetch_to_device(device, buffer_size=1))


def _suits(spec) -> bool:
    parts = tf.nest.flatten(spec)
    if not all(isinstance(part, tf.TensorSpec) for part in parts):
        return False
    floats = [part for part in parts if part.dtype.is_floating]
    others = [part for part in parts if not part.dtype.is_floating]
    # Labels have one number for each row.
    are_labels = all(
        (part.dtype.is_integer or part.dtype.is_bool) and part.shape[1:].num_elements() == 1
        for part in others
        if part.shape.rank
    )
    return bool(floats) and are_labels and all(part.shape.rank for part in others)
