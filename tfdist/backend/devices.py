"""Whether this rank computes on a GPU, and what then stays in the memory of the host."""

from __future__ import annotations

import contextlib

import tensorflow as tf


def has_gpu() -> bool:
    """Whether TensorFlow computes on a GPU in this process."""
    return bool(tf.config.get_visible_devices("GPU"))


def stays_on_host(dtype: tf.DType) -> bool:
    """Whether tensors of a dtype are in the memory of the host on a rank with a GPU: integers and bool.

    TensorFlow's kernels for GPUs read and write int32 there, and decisions, sizes and seeds are needed there.
    """
    return not (dtype.is_floating or dtype.is_complex)


def on_host(condition: bool = True) -> contextlib.AbstractContextManager:
    """Places operations inside on the CPU of a rank with a GPU.

    Args:
        condition: Whether they are placed there.
    """
    return tf.device("/CPU:0") if condition and has_gpu() else contextlib.nullcontext()
