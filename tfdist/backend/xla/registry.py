"""The operations that XLA can compile, as registered in the installed TensorFlow."""

from __future__ import annotations

import collections
import functools

import tensorflow as tf
from tensorflow.python.framework import kernels, op_def_registry

from tfdist.backend import devices

#: Arguments that TensorFlow's kernels for GPUs read from the memory of the host, and that XLA computes with.
_ANY_VALUE = frozenset({"branch_index", "cond", "seed"})

_INTEGERS = {tf.int32, tf.int64}


@functools.cache
def compiled_operations() -> dict[str, frozenset[str]]:
    """The operations with a kernel of XLA for this rank's device, and their inputs that must be constant.

    XLA needs the values of some inputs, such as the shape of a `Reshape`, when it compiles. The list of kernels
    does not tell which; they are those that TensorFlow's kernels for GPUs read from the memory of the host.

    `get_all_registered_kernels` and `op_def_registry` are internal to TensorFlow;
    `tests/backend/xla/test_registry.py` fails if they change.

    Returns:
        The names of those inputs, by operation.
    """
    with tf.init_scope(), tf.device(devices.device_name()):
        # XLA registers its kernels when it first compiles.
        tf.function(tf.identity, jit_compile=True)(tf.zeros([]))
    wanted = "XLA_GPU_JIT" if devices.has_gpu() else "XLA_CPU_JIT"
    names: set[str] = set()
    others: dict[str, list] = collections.defaultdict(list)
    for kernel in kernels.get_all_registered_kernels().kernel:
        if kernel.device_type == wanted:
            names.add(kernel.op)
        elif kernel.device_type in ("GPU", "DEFAULT"):
            others[kernel.op].append(kernel)
    return {name: _constant(name, others[name]) for name in names}


def _constant(name: str, others: list) -> frozenset[str]:
    """The inputs of an operation that all its kernels for GPUs read from the memory of the host.

    Kernels for integers read all inputs there: where they are the only ones, that says nothing of an input which
    other kernels have in other dtypes.
    """
    if not others:
        return frozenset()
    on_host = frozenset.intersection(*(frozenset(kernel.host_memory_arg) for kernel in others))
    dtypes: dict[str, set[tf.DType]] = collections.defaultdict(set)
    for constraint in (each for kernel in others for each in kernel.constraint):
        dtypes[constraint.name] |= set(map(tf.as_dtype, constraint.allowed_values.list.type))
    definition = op_def_registry.get(name)
    results = {result.type_attr for result in definition.output_arg}
    for attribute in definition.attr:
        allowed = set(map(tf.as_dtype, attribute.allowed_values.list.type))
        if allowed and allowed <= _INTEGERS and attribute.name not in results:
            dtypes.pop(attribute.name, None)
    return frozenset(
        argument.name
        for argument in definition.input_arg
        if argument.name in on_host
        and not (argument.type_attr in dtypes and dtypes[argument.type_attr] <= _INTEGERS)
        and argument.type != tf.resource.as_datatype_enum
        and argument.name not in _ANY_VALUE
    )
