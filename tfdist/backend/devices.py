"""Whether this rank computes on a GPU, and what then stays in the memory of the host."""

from __future__ import annotations

import contextlib
import threading

import tensorflow as tf

from tfdist.utils.temporary import attributes_set


class _Local(threading.local):
    host_variables: bool = False


_local = _Local()


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


def host_variables() -> contextlib.AbstractContextManager[None]:
    """Has variables that are created inside placed on the host, where it reads them in each step."""
    return attributes_set(_local, host_variables=True)


def places_variables_on_host() -> bool:
    """Whether a variable that is created now is for the host of a rank with a GPU."""
    return _local.host_variables and has_gpu()
