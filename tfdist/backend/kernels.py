"""Kernels of an optional library, which layers may use instead of several TensorFlow operations.

They are provided by the add-on `tfdist.addons.cpu_kernels`. Everything works without it.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import Any

import tensorflow as tf

from tfdist.backend import devices
from tfdist.backend.graph.compiling import is_compiled
from tfdist.utils.lazy import find_addon
from tfdist.utils.temporary import attributes_set


class _Local(threading.local):
    enabled = False


_local = _Local()


def kernels() -> Any:
    """The module of the kernels, created by TensorFlow from the library; requires `has_kernels()`."""
    addon: Any = find_addon("cpu_kernels")
    return addon.LIBRARY.load()


@functools.cache
def has_kernels() -> bool:
    """Whether the library is available and there is no GPU; its kernels use the memory of the host."""
    addon = find_addon("cpu_kernels")
    has_library = addon is not None and addon.LIBRARY.find() is not None
    return has_library and not devices.has_gpu()


def enabling_kernels() -> contextlib.AbstractContextManager[None]:
    """Enables kernels inside as in a step: for generation, and for graphs that are only analyzed."""
    return attributes_set(_local, enabled=True)


def kernels_enabled() -> bool:
    """Whether kernels may be used now: in a step of a strategy of tfdist, or in `enabling_kernels`.

    XLA cannot compile them. An exported model must run without the library; it is traced outside of steps.
    """
    if _local.enabled:
        return has_kernels()
    replica = tf.distribute.get_replica_context()
    mesh = getattr(replica.strategy, "mesh", None) if replica is not None else None
    if mesh is None or not has_kernels():
        return False
    step = getattr(replica, "step", None)
    if mesh.size == 1:
        return step is not None and not step.model.jit_compile
    return not is_compiled()
