"""Whether layers may use kernels of the compiled library."""

from __future__ import annotations

import functools

import tensorflow as tf

from tfdist.native.library import library_path

__all__ = ["has_kernels", "step_takes_kernels"]


@functools.cache
def has_kernels() -> bool:
    """Whether the library is there; it works in the memory of the host."""
    return library_path().exists() and not tf.config.list_physical_devices("GPU")


def step_takes_kernels() -> bool:
    """Whether a step of several ranks is under way, where there are kernels.

    XLA, which knows of no such kernel, does not compile these steps. What is exported, or made for
    one process, must run where the library is not.
    """
    replica = tf.distribute.get_replica_context()
    mesh = getattr(replica.strategy, "mesh", None) if replica is not None else None
    return mesh is not None and mesh.size > 1 and has_kernels()
