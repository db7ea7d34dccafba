"""Divides a traced step into the parts that XLA compiles, and the operations between them.

A collective, or another operation that XLA cannot compile, divides the operations of a step: those before it,
those after it, and those that do not depend on it. All operations that have the same such predecessors are
compiled together, so no part waits for a collective that one of its operations does not need, and the order of
the collectives of a rank is that of the step itself.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
from collections.abc import Iterable, Sequence

import tensorflow as tf
from tensorflow.python.framework import auto_control_deps_utils

from tfdist.backend.graph.compiling import is_excluded
from tfdist.backend.xla.obstacles import (
    Functions,
    Obstacle,
    called,
    obstacles,
    sorted_operations,
)
from tfdist.backend.xla.sizes import CONSTANTS, Inputs, Sizes

#: Parts with fewer operations stay as they are: starting a compiled part takes as long as some operations.
_FEWEST = 6
#: Not counted among these.
_FREE = frozenset({"Identity", "IdentityN", "NoOp", "ReadVariableOp", "StopGradient"})
#: Operations with negligible cost: they are repeated in each part that uses their results.
_CHEAP = frozenset(
    {"Cast", "ExpandDims", "Identity", "Pack", "Reshape", "Shape", "Squeeze", "StridedSlice"}
)


@dataclasses.dataclass
class Part:
    """Operations that run together.

    Attributes:
        operations: The operations, each after those that it depends on.
        is_compiled: Whether XLA compiles them.
    """

    operations: list[tf.Operation]
    is_compiled: bool


@dataclasses.dataclass
class Division:
    """A graph, divided.

    Attributes:
        parts: The parts, each after those that it depends on.
        repeated: The names of operations that are in no part: those that use their results repeat them.
        before: By operation, the names of all operations in parts that must have run before.
        sizes: The sizes of the graph.
        obstacles: The operations that XLA cannot compile.
    """

    parts: list[Part]
    repeated: set[str]
    before: dict[str, list[str]]
    sizes: Sizes
    obstacles: list[Obstacle]


def divide(graph, inputs: Inputs, functions: Functions) -> Division:
    """Divides the graph of a function.

    Args:
        graph: A `FuncGraph`.
        inputs: What is known of its inputs.
        functions: The functions that it calls.
    """
    operations = sorted_operations(graph)
    arguments = {tensor.op.name for tensor in graph.inputs}
    sizes = Sizes(operations, graph.inputs, inputs)
    found = list(obstacles(operations, sizes, functions, arguments))
    outside = {op.name for op, _ in found}
    repeated = _repeated(operations, arguments, sizes, outside)
    listed = [op for op in operations if op.name not in arguments and op.name not in repeated]
    before = _dependencies(listed, repeated, arguments)
    # A function that is called many times is compiled once, and not in each part that calls it.
    alone = {op.name for op in listed if op.name not in outside and _calls_one(op, functions)}
    early = _early(operations, alone, sizes, arguments)
    first = _first(listed, outside, early)
    groups = _groups(listed, before, outside | alone, early - outside, first)
    parts = [
        Part(members, True)
        if len(members) > 1 or members[0].name in alone
        else Part(members, False)
        for members in groups
    ]
    Division.dbg = outside
    return Division(
        _joined(_in_order(parts, before)), repeated, before, sizes, [each for _, each in found]
    )


def _calls_one(op: tf.Operation, functions: Functions) -> bool:
    return any(functions.never_inlined(name) for each in called(op).values() for name in each)


def _repeated(
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
        elif op.type in _CHEAP and all(
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
        for handle in changed_by(op):
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
            if user.type in _CHEAP:
                waiting.append(user)


def _dependencies(
    listed: Sequence[tf.Operation], repeated: set[str], arguments: set[str]
) -> dict[str, list[str]]:
    """The names of the operations in parts on which each operation depends by data or by order.

    An operation that changes a variable waits for those that use what repeated reads have returned.
    """
    skipped = repeated | arguments
    before: dict[str, list[str]] = {}
    readers: dict[str, list[str]] = collections.defaultdict(list)
    for op in listed:
        direct = [*(tensor.op for tensor in op.inputs), *op.control_inputs]
        before[op.name] = list(
            dict.fromkeys(each.name for each in direct if each.name not in skipped)
        )
        for handle in _handles_read(op, repeated):
            readers[handle].append(op.name)
    for op in listed:
        for handle in changed_by(op):
            more = (name for name in readers[handle] if name != op.name)
            before[op.name] = list(dict.fromkeys([*before[op.name], *more]))
    return before


def changed_by(op: tf.Operation) -> list[str]:
    """The names of the resources that an operation may change."""
    if not any(tensor.dtype == tf.resource for tensor in op.inputs):
        return []
    return [tensor.name for tensor in auto_control_deps_utils.get_read_write_resource_inputs(op)[1]]


def _handles_read(op: tf.Operation, repeated: set[str]) -> set[str]:
    """The variables whose values an operation takes from repeated reads."""
    found: set[str] = set()
    waiting = [tensor.op for tensor in op.inputs if tensor.op.name in repeated]
    while waiting:
        each = waiting.pop()
        if each.type == "ReadVariableOp":
            found.add(each.inputs[0].name)
        waiting += [tensor.op for tensor in each.inputs if tensor.op.name in repeated]
    return found


def _groups(
    listed: Sequence[tf.Operation],
    before: dict[str, list[str]],
    dividing: set[str],
    early: set[str],
    first: set[str],
) -> list[list[tf.Operation]]:
    """Disjoint groups of operations; those of one operation are not compiled."""
    dividing = dividing | first
    places = {name: place for place, name in enumerate(sorted(dividing - first))}
    labels: dict[str, int] = {}
    after: dict[str, list[str]] = collections.defaultdict(list)
    order = _topological([op.name for op in listed], before)
    by_name = {op.name: op for op in listed}
    for name in order:
        label = 0
        for each in before[name]:
            label |= labels[each] | (1 << places[each] if each in places else 0)
            after[each].append(name)
        labels[name] = label
    # What depends on no data runs with those that use it, not at the begin of the step.
    for name in reversed(order):
        if name in early and name not in first and after[name]:
            common = -1
            for each in after[name]:
                common &= labels[each]
            labels[name] |= common
    groups: dict[object, list[tf.Operation]] = {}
    for name in order:
        key = name if name in dividing else labels[name]
        groups.setdefault(key, []).append(by_name[name])
    found = []
    for members in groups.values():
        if sum(op.type not in _FREE for op in members) >= _FEWEST:
            found.append(members)
        else:
            found += [[op] for op in members]
    return found


def _early(
    operations: Sequence[tf.Operation], dividing: set[str], sizes: Sizes, arguments: set[str]
) -> set[str]:
    """The names of operations that depend on no data, except for its sizes."""
    found: set[str] = set()
    for op in operations:
        if op.name in dividing or op.name in arguments:
            continue
        if all(each.name in found or each.name in arguments for each in op.control_inputs) and all(
            tensor.dtype == tf.resource or tensor.op.name in found or sizes.is_known(tensor)
            for tensor in op.inputs
        ):
            found.add(op.name)
    return found


def _first(listed: Sequence[tf.Operation], outside: set[str], early: set[str]) -> set[str]:
    """The names of operations that run first and divide nothing.

    They are those operations outside of compiled parts that depend on no data, such as the seeds that a GPU's
    kernels read from the host, and those before them.
    """
    by_name = {op.name: op for op in listed}
    waiting = [op for op in listed if op.name in outside and op.name in early and not _may_wait(op)]
    found: set[str] = set()
    while waiting:
        op = waiting.pop()
        if op.name not in found:
            found.add(op.name)
            before = [*(tensor.op for tensor in op.inputs), *op.control_inputs]
            waiting += [each for each in before if each.name in by_name]
    return found


def _may_wait(op: tf.Operation) -> bool:
    """Whether an operation may wait for something outside of the step, such as a message."""
    return is_excluded(op) or (op._is_stateful and not op.type.startswith(("Assign", "Read")))


def _topological(names: Sequence[str], before: dict[str, list[str]]) -> list[str]:
    """The names, each after those before it, and otherwise in their order."""
    return [names[place] for place in _sorted(names, before)]


def _in_order(parts: Sequence[Part], before: dict[str, list[str]]) -> list[Part]:
    """The parts, each after those that it depends on."""
    part_of = {op.name: place for place, part in enumerate(parts) for op in part.operations}
    needed = {
        place: list({part_of[each] for op in part.operations for each in before[op.name]} - {place})
        for place, part in enumerate(parts)
    }
    return [parts[place] for place in _sorted(range(len(parts)), needed)]


def _sorted(items: Sequence, before: dict) -> list[int]:
    """The places of items, each after those before it; the first possible one comes first."""
    place_of = {item: place for place, item in enumerate(items)}
    lacking = {place: len(before[item]) for place, item in enumerate(items)}
    after: dict[int, list[int]] = collections.defaultdict(list)
    for place, item in enumerate(items):
        for each in before[item]:
            after[place_of[each]].append(place)
    ready = [place for place, count in lacking.items() if count == 0]
    heapq.heapify(ready)
    found = []
    while ready:
        place = heapq.heappop(ready)
        found.append(place)
        for each in after[place]:
            lacking[each] -= 1
            if lacking[each] == 0:
                heapq.heappush(ready, each)
    if len(found) < len(items):
        raise RuntimeError("The operations of the step depend on each other in a circle.")
    return found


def _joined(parts: Iterable[Part]) -> list[Part]:
    """The parts, with successive ones that are not compiled as one."""
    found: list[Part] = []
    for part in parts:
        if found and not part.is_compiled and not found[-1].is_compiled:
            found[-1].operations.extend(part.operations)
        else:
            found.append(part)
    return found
