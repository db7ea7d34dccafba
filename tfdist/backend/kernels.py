"""Whether layers may use kernels of the compiled library."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator

import tensorflow as tf

from tfdist.backend.native.library import find_library

__all__ = ["has_kernels", "may_take_kernels", "taking_kernels"]


class _Local(threading.local):
    takes = False


_local = _Local()


@functools.cache
def has_kernels() -> bool:
    """Whether the library is there; it works in the memory of the host."""
    return find_library() is not None and not tf.config.list_physical_devices("GPU")


@contextlib.contextmanager
def taking_kernels() -> Iterator[None]:
    """Inside, layers may take kernels as in a step: in generation, and in graphs that are only counted."""
    before, _local.takes = _local.takes, True
    try:
        yield
    finally:
        _local.takes = before


def may_take_kernels() -> bool:
    """Whether a step of one of tfdist's strategies, or `taking_kernels`, is under way that may take kernels.

    XLA knows of none: on several ranks it compiles no step, on one where the model says so. What is
    exported must run where the library is not; it is made outside of steps.
    """
    if _local.takes:
        return has_kernels()
    replica = tf.distribute.get_replica_context()
    mesh = getattr(replica.strategy, "mesh", None) if replica is not None else None
    if mesh is None or not has_kernels():
        return False
    step = getattr(replica, "step", None)
    return mesh.size > 1 or (step is not None and not step.model.jit_compile)
