"""Whether XLA compiles parts of a step that nobody has marked for it."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable

import tensorflow as tf


def needs_fixed_sizes() -> bool:
    """Whether sizes in a step must not depend on values.

    TensorFlow compiles clusters of any graph where `TF_XLA_FLAGS` or `tf.config.optimizer.set_jit` say so. Of
    two filters in a row, as `tf.boolean_mask` is one, XLA makes other rows than TensorFlow, without a word.
    """
    flags = os.environ.get("TF_XLA_FLAGS", "").strip()
    if flags and not flags.startswith("-"):
        return True  # A file of flags.
    asked = re.findall(r"tf_xla_auto_jit[= ]*(\S+)", flags)
    return bool(asked and asked[-1] not in ("0", "-1")) or bool(tf.config.optimizer.get_jit())


def outside_clusters(function: Callable) -> Callable:
    """The function, for `Dataset.map`, in no cluster that XLA compiles.

    TensorFlow finds two devices for a cluster in the input of a rank of `tf.distribute`, and fails:
    "Multiple CPU devices".
    """

    @functools.wraps(function)
    def outside(*args):
        with tf.xla.experimental.jit_scope(compile_ops=False):
            return function(*args)

    return outside


def check_sizes_may_change(what: str) -> None:
    """Raises where XLA compiles a graph in which sizes depend on values by their nature.

    Raises:
        ValueError: It does.
    """
    if not tf.executing_eagerly() and needs_fixed_sizes():
        raise ValueError(
            f"XLA cannot compile {what}: how many rows go to a rank depends on their values. Received: "
            f"TF_XLA_FLAGS={os.environ.get('TF_XLA_FLAGS', '')!r}, tf.config.optimizer.get_jit()="
            f"{tf.config.optimizer.get_jit()!r}. Leave `--tf_xla_auto_jit` and `set_jit` out."
        )
