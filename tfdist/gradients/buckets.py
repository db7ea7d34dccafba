"""Buckets: arrays that are sent together."""

from __future__ import annotations

from collections.abc import Iterable

import tensorflow as tf


def buckets(tensors: Iterable[tuple[int, tf.Tensor]], most_bytes: int) -> list[list[int]]:
    """Splits a sequence of tensors into buckets of one dtype and a limited size.

    Args:
        tensors: Places and tensors, in the order in which they become ready.
        most_bytes: The size at which a bucket is full. A tensor of unknown size fills a bucket.

    Returns:
        The places of the tensors in each bucket.
    """
    found: list[list[int]] = []
    dtype, filled = None, 0
    for place, tensor in tensors:
        elements = tf.TensorShape(tensor.shape).num_elements()
        size = most_bytes if elements is None else elements * tf.as_dtype(tensor.dtype).size
        if not found or tensor.dtype != dtype or filled + size > most_bytes:
            found.append([])
            dtype, filled = tensor.dtype, 0
        found[-1].append(place)
        filled += size
    return found
