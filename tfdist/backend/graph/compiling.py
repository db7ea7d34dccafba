"""What the code of a step has to know and to say about compilation by XLA."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import threading
from collections.abc import Callable

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2

from tfdist.utils.temporary import attributes_set

_SIZED_BY_VALUES = "_tfdist_sized_by_values"
#: The attribute of operations that compute again what was computed before, to save memory.
AGAIN = "_tfdist_again"


class _Local(threading.local):
    is_compiled: bool = False


_local = _Local()


def compiling() -> contextlib.AbstractContextManager[None]:
    """A context in which the traced step will be compiled, except for what it excludes."""
    return attributes_set(_local, is_compiled=True)


def is_compiled() -> bool:
    """Whether the traced step will be compiled, except for what it excludes."""
    return _local.is_compiled


def excluded() -> contextlib.AbstractContextManager:
    """Excludes operations inside from the compilation of the traced step."""
    if not _local.is_compiled or tf.executing_eagerly():
        return contextlib.nullcontext()
    return tf.xla.experimental.jit_scope(compile_ops=False)


def is_excluded(op: tf.Operation) -> bool:
    """Whether an operation is excluded from compilation, by `excluded` or by `jit_scope` of TensorFlow."""
    compile_it = op.node_def.attr.get("_XlaCompile")
    return compile_it is not None and not compile_it.b


def mark_sized_by_values(tensor: tf.Tensor) -> None:
    """Declares that the sizes of a tensor depend on values, if its graph does not show it."""
    if tf.is_symbolic_tensor(tensor):
        tensor.op._set_attr(_SIZED_BY_VALUES, attr_value_pb2.AttrValue(b=True))


def is_sized_by_values(op: tf.Operation) -> bool:
    """Whether `mark_sized_by_values` was called for a result of an operation."""
    return _SIZED_BY_VALUES in op.node_def.attr


def needs_fixed_sizes() -> bool:
    """Whether sizes in a step must not depend on values.

    In a compiled step, and where `TF_XLA_FLAGS` or `tf.config.optimizer.set_jit` have TensorFlow compile clusters
    of any graph. For two consecutive filters, such as `tf.boolean_mask`, XLA silently returns different rows than
    TensorFlow.
    """
    return _local.is_compiled or _clusters_are_compiled()


def _clusters_are_compiled() -> bool:
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
    if not tf.executing_eagerly() and _clusters_are_compiled():
        raise ValueError(
            f"XLA cannot compile {what}: the number of rows for a rank depends on values. Received: "
            f"TF_XLA_FLAGS={os.environ.get('TF_XLA_FLAGS', '')!r}, tf.config.optimizer.get_jit()="
            f"{tf.config.optimizer.get_jit()!r}. Do not use `--tf_xla_auto_jit` and `set_jit`."
        )
