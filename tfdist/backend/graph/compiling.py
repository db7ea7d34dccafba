"""Detects whether XLA compiles parts of a step that were not marked for it."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable

import tensorflow as tf


def needs_fixed_sizes() -> bool:
    """Whether sizes in a step must not depend on values.

    TensorFlow compiles clusters of any graph if `TF_XLA_FLAGS` or `tf.config.optimizer.set_jit` enable
    it. For two consecutive filters, such as `tf.boolean_mask`, XLA silently returns different rows than
    TensorFlow.
    """
    flags = os.environ.get("TF_XLA_FLAGS", "").strip()
    if flags and not flags.startswith("-"):
        return True  # A file of flags.
    asked = re.findall(r"tf_xla_auto_jit[= ]*(\S+)", flags)
    return bool(asked and asked[-1] not in ("0", "-1")) or bool(tf.config.optimizer.get_jit())


def outside_clusters(function: Callable) -> Callable:
    """The function, for `Dataset.map`, excluded from the clusters that XLA compiles.

    In the input pipeline of a rank of `tf.distribute`, TensorFlow finds two devices for a cluster, and
    fails: "Multiple CPU devices".
    """

    @functools.wraps(function)
    def outside(*args):
        with tf.xla.experimental.jit_scope(compile_ops=False):
            return function(*args)

    return outside


def check_sizes_may_change(what: str) -> None:
    """Checks that XLA does not compile a graph in which sizes depend on values.

    Args:
        what: The operation with these sizes, for the message.

    Raises:
        ValueError: XLA compiles the graph.
    """
    if not tf.executing_eagerly() and needs_fixed_sizes():
        raise ValueError(
            f"XLA cannot compile {what}: the number of rows for a rank depends on values. Received: "
            f"TF_XLA_FLAGS={os.environ.get('TF_XLA_FLAGS', '')!r}, tf.config.optimizer.get_jit()="
            f"{tf.config.optimizer.get_jit()!r}. Do not use `--tf_xla_auto_jit` and `set_jit`."
        )
