"""Kernels of an optional library, which layers may use in place of several TensorFlow operations.

They are those of the add-on `tfdist.addons.cpu_kernels`. Everything works without it.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfdist.utils.lazy import find_addon


class _Local(threading.local):
    enabled = False


_local = _Local()


def kernels() -> Any:
    """The module of the kernels, as TensorFlow makes it of the library; only where `has_kernels()`."""
    addon: Any = find_addon("cpu_kernels")
    return addon.LIBRARY.load()


@functools.cache
def has_kernels() -> bool:
    """Whether the library is there; its kernels work in the memory of the host."""
    addon = find_addon("cpu_kernels")
    has_library = addon is not None and addon.LIBRARY.find() is not None
    return has_library and not tf.config.list_physical_devices("GPU")


@contextlib.contextmanager
def enabling_kernels() -> Iterator[None]:
    """Inside, kernels are enabled as in a step: in generation, and in graphs that are only counted."""
    before, _local.enabled = _local.enabled, True
    try:
        yield
    finally:
        _local.enabled = before


def kernels_enabled() -> bool:
    """Whether code that runs now may use kernels: in a step of one of tfdist's strategies, or in `enabling_kernels`.

    XLA cannot compile them: on several ranks it compiles no step, on one where the model says so. A model
    that is exported must run where the library is not installed; it is traced outside of steps.
    """
    if _local.enabled:
        return has_kernels()
    replica = tf.distribute.get_replica_context()
    mesh = getattr(replica.strategy, "mesh", None) if replica is not None else None
    if mesh is None or not has_kernels():
        return False
    step = getattr(replica, "step", None)
    return mesh.size > 1 or (step is not None and not step.model.jit_compile)
