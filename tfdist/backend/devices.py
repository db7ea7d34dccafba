"""Whether this rank computes on a GPU, and what then stays in the memory of the host."""

from __future__ import annotations

import contextlib

import tensorflow as tf
from tensorflow.python.eager import context


def has_gpu() -> bool:
    """Whether TensorFlow computes on a GPU in this process."""
    return bool(tf.config.get_visible_devices("GPU"))


def device_name() -> str:
    """The device on which this rank computes, for `tf.device`."""
    return "/GPU:0" if has_gpu() else "/CPU:0"


def stays_on_host(dtype: tf.DType) -> bool:
    """Whether tensors of a dtype are in the memory of the host on a rank with a GPU: integers and bool.

    TensorFlow's kernels for GPUs read and write int32 there, and decisions, sizes and seeds are needed there.
    """
    return not (dtype.is_floating or dtype.is_complex)


def index_dtype() -> tf.DType:
    """The dtype of ids that this rank's device computes with; a GPU's kernels of int32 are the host's."""
    return tf.int64 if has_gpu() else tf.int32


def on_host() -> contextlib.AbstractContextManager:
    """Places operations inside on the CPU of a rank with a GPU."""
    return placed(host=True)


def placed(host: bool) -> contextlib.AbstractContextManager:
    """Places operations inside on the CPU or on the GPU of a rank with a GPU, also eager ones."""
    return tf.device("/CPU:0" if host else device_name()) if has_gpu() else contextlib.nullcontext()


def names_host() -> bool:
    """Whether `tf.device` names the CPU for eager operations now.

    Only the private `context.device_name` tells this; `tests/gpu_like/test_variables.py` fails if it changes.
    """
    return "CPU:0" in (context.context().device_name or "")
