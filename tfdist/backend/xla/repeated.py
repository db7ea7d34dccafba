"""What the parts of a graph repeat instead of passing it on, and what they wait for."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence

import tensorflow as tf
from tensorflow.python.framework import auto_control_deps_utils

from tfdist.backend.graph.split import CHEAP
from tfdist.backend.xla.sizes import CONSTANTS, Sizes


def repeated_operations(
    operations: Iterable[tf.Operation], arguments: set[str], sizes: Sizes, outside: set[str]
) -> set[str]:
    """Constants, reads of variables that no operation changes later, and cheap results of these."""
    written = _written_before_last_read(operations)
    found: set[str] = set()
    for op in operations:
        if op.name in arguments or op.name in outside:
            continue
        if op.type in CONSTANTS or (
            op.outputs
            and not op._is_stateful
            and all(sizes.folded(output) is not None for output in op.outputs)
        ):
            found.add(op.name)
        elif op.control_inputs:
            continue
        elif op.type == "ReadVariableOp":
            if op.inputs[0].op.name in arguments and op.name not in written:
                found.add(op.name)
        elif op.type in CHEAP and all(
            each.op.name in found or each.op.name in arguments for each in op.inputs
        ):
            found.add(op.name)
    return found


def _written_before_last_read(operations: Iterable[tf.Operation]) -> set[str]:
    """The names of reads of variables whose result is used after the variable has changed."""
    users: dict[str, list[tf.Operation]] = {}
    writers: dict[str, list[tf.Operation]] = {}
    after: dict[str, list[tf.Operation]] = collections.defaultdict(list)
    for op in operations:
        for before in [*(tensor.op for tensor in op.inputs), *op.control_inputs]:
            after[before.name].append(op)
        for tensor in op.inputs:
            if op.type == "ReadVariableOp":
                users.setdefault(tensor.name, []).append(op)
        for handle in _changed_by(op):
            writers.setdefault(handle, []).append(op)
    found: set[str] = set()
    for handle, reads in users.items():
        late = _reached(writers.get(handle, ()), after)
        found |= {read.name for read in reads if any(op.name in late for op in _users(read, after))}
    return found


def _reached(roots: Iterable[tf.Operation], after: dict[str, list[tf.Operation]]) -> set[str]:
    found: set[str] = set()
    waiting = list(roots)
    while waiting:
        for op in after[waiting.pop().name]:
            if op.name not in found:
                found.add(op.name)
                waiting.append(op)
    return found


def _users(read: tf.Operation, after: dict[str, list[tf.Operation]]) -> Iterable[tf.Operation]:
    """The operations that use the result of a read, also through cheap operations."""
    waiting = [read]
    while waiting:
        op = waiting.pop()
        for user in after[op.name]:
            yield user
            if user.type in CHEAP:
                waiting.append(user)


def dependencies(
    listed: Sequence[tf.Operation], skipped: set[str], outside: set[str]
) -> tuple[dict[str, list[str]], list[tuple[str, str]]]:
    """The names of the operations in parts on which each operation depends by data or by order.

    An operation that changes a variable waits for those that use what repeated reads have returned.

    Returns:
        The names by operation; and pairs of an operation outside of compiled parts, and one without side effects
        inside that is to wait for it if possible, such as a gradient for an earlier bucket of gradients.
    """
    before: dict[str, list[str]] = {}
    soft: list[tuple[str, str]] = []
    readers: dict[str, list[str]] = collections.defaultdict(list)
    for op in listed:
        may_wait = op.name in outside or op._is_stateful
        direct = [tensor.op for tensor in op.inputs]
        for each in op.control_inputs:
            if may_wait or each.name not in outside:
                direct.append(each)
            else:
                soft.append((each.name, op.name))
        before[op.name] = list(
            dict.fromkeys(each.name for each in direct if each.name not in skipped)
        )
        for handle in _handles_read(op, skipped):
            readers[handle].append(op.name)
    for op in listed:
        for handle in _changed_by(op):
            more = (name for name in readers[handle] if name != op.name)
            before[op.name] = list(dict.fromkeys([*before[op.name], *more]))
    return before, soft


def _changed_by(op: tf.Operation) -> list[str]:
    """The names of the resources that an operation may change."""
    if not any(tensor.dtype == tf.resource for tensor in op.inputs):
        return []
    return [tensor.name for tensor in auto_control_deps_utils.get_read_write_resource_inputs(op)[1]]


def _handles_read(op: tf.Operation, skipped: set[str]) -> set[str]:
    """The variables whose values an operation takes from repeated reads."""
    found: set[str] = set()
    waiting = [tensor.op for tensor in op.inputs if tensor.op.name in skipped]
    while waiting:
        each = waiting.pop()
        if each.type == "ReadVariableOp":
            found.add(each.inputs[0].name)
        waiting += [tensor.op for tensor in each.inputs if tensor.op.name in skipped]
    return found
