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
from collections.abc import Iterable, Iterator, Sequence

import tensorflow as tf
from tensorflow.python.framework import auto_control_deps_utils

from tfdist.backend.graph.compiling import is_excluded
from tfdist.backend.xla.obstacles import (
    Functions,
    Obstacle,
    called,
    has_list,
    obstacles,
    sorted_operations,
)
from tfdist.backend.xla.sizes import CONSTANTS, Inputs, Sizes

#: Parts with fewer operations stay as they are: starting a compiled part takes as long as some operations.
_FEWEST = 6
#: A part is divided for the sake of collectives if each piece has at least this number of operations.
_PIECE = 100
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
    created = {op.name: place for place, op in enumerate(graph.get_operations())}
    while True:
        repeated = _repeated(operations, arguments, sizes, outside)
        listed = [op for op in operations if op.name not in arguments and op.name not in repeated]
        before, soft = _dependencies(listed, repeated | arguments, outside)
        # A function that is called many times is compiled once, and not in each part that calls it.
        alone = {op.name for op in listed if op.name not in outside and _calls_one(op, functions)}
        early = _early(operations, alone, sizes, arguments)
        first = _first(listed, outside, early)
        groups = _groups(listed, before, outside | alone, early - outside, first, created)
        lists = _lists_across(groups)
        if not lists:
            break
        # A list cannot be passed from one compiled part to another.
        outside |= lists
    parts = [Part(each, len(each) > 1 or each[0].name in alone) for each in groups]
    _add_soft(parts, before, soft)
    found_obstacles = [each for _, each in found]
    return Division(_joined(_in_order(parts, before)), repeated, before, sizes, found_obstacles)


def _lists_across(groups: Iterable[Sequence[tf.Operation]]) -> set[str]:
    """The names of operations on lists of tensors, where a list is passed from one group to another."""
    group_of = {op.name: place for place, members in enumerate(groups) for op in members}
    on_lists = [op for members in groups if len(members) > 1 for op in members if has_list(op)]
    crossing = any(
        tensor.dtype == tf.variant and group_of.get(tensor.op.name) != group_of[op.name]
        for members in groups
        for op in members
        for tensor in op.inputs
    )
    return {op.name for op in on_lists} if crossing else set()


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
        for handle in changed_by(op):
            more = (name for name in readers[handle] if name != op.name)
            before[op.name] = list(dict.fromkeys([*before[op.name], *more]))
    return before, soft


def _add_soft(
    parts: Sequence[Part], before: dict[str, list[str]], soft: Iterable[tuple[str, str]]
) -> None:
    """Adds the dependencies that are possible: those that do not let a part wait for itself."""
    part_of = {op.name: place for place, part in enumerate(parts) for op in part.operations}
    needed: dict[int, set[int]] = {
        place: {part_of[each] for op in part.operations for each in before[op.name]} - {place}
        for place, part in enumerate(parts)
    }
    for name, waiting in soft:
        source, place = part_of[name], part_of[waiting]
        if source != place and not _depends(source, place, needed):
            needed[place].add(source)
            before[waiting].append(name)


def _depends(place: int, on: int, needed: dict[int, set[int]]) -> bool:
    """Whether a part depends on another one, also through others."""
    known, waiting = {place}, [place]
    while waiting:
        for each in needed[waiting.pop()]:
            if each == on:
                return True
            if each not in known:
                known.add(each)
                waiting.append(each)
    return False


def changed_by(op: tf.Operation) -> list[str]:
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


def _groups(
    listed: Sequence[tf.Operation],
    before: dict[str, list[str]],
    dividing: set[str],
    early: set[str],
    first: set[str],
    created: dict[str, int],
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
    needed_by = _first_collective(order, by_name, after, created)
    found = []
    for members in groups.values():
        for piece in _pieces(members, needed_by):
            if sum(op.type not in _FREE for op in piece) >= _FEWEST:
                found.append(piece)
            else:
                found += [[op] for op in piece]
    return found


def _first_collective(
    order: Sequence[str],
    by_name: dict[str, tf.Operation],
    after: dict[str, list[str]],
    created: dict[str, int],
) -> dict[str, int]:
    """When the first collective is created that depends on each operation; a large number without one."""
    found: dict[str, int] = {}
    for name in reversed(order):
        # The tensor that a collective sends: see `tfdist.collectives.run`.
        own = created[name] if by_name[name].type == "PlaceholderWithDefault" else len(created)
        found[name] = min([own, *(found[each] for each in after[name])])
    return found


def _pieces(members: list[tf.Operation], needed_by: dict[str, int]) -> Iterator[list[tf.Operation]]:
    """Divides a group so that collectives begin before all of it has run: gradients, while others are computed."""
    by_collective: dict[int, list[tf.Operation]] = collections.defaultdict(list)
    for op in members:
        by_collective[needed_by[op.name]].append(op)
    piece: list[tf.Operation] = []
    rest = len(members)
    for place in sorted(by_collective):
        piece += by_collective[place]
        rest -= len(by_collective[place])
        if len(piece) >= _PIECE and rest >= _PIECE:
            yield piece
            piece = []
    yield piece


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
