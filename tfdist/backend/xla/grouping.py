"""Groups the operations of a graph that are compiled together."""

from __future__ import annotations

import collections
import heapq
from collections.abc import Iterator, Sequence

import tensorflow as tf

from tfdist.backend.graph.compiling import is_excluded
from tfdist.backend.xla.sizes import Sizes

#: Groups with fewer operations stay as they are: starting a compiled part takes as long as some operations.
_FEWEST = 6
#: A group is divided for the sake of collectives if each piece has at least this number of operations.
_PIECE = 100
#: Not counted among these.
_FREE = frozenset({"Identity", "IdentityN", "NoOp", "ReadVariableOp", "StopGradient"})


def groups_of(
    listed: Sequence[tf.Operation],
    before: dict[str, list[str]],
    dividing: set[str],
    early: set[str],
    first: set[str],
    created: dict[str, int],
) -> list[list[tf.Operation]]:
    """Disjoint groups of operations.

    Args:
        listed: The operations, each after those that it depends on.
        before: By operation, the names of those that it depends on.
        dividing: The names of operations that are alone in their group.
        early: The names of operations that depend on no data.
        first: The names of operations that run first and divide nothing.
        created: By operation, when it was created.
    """
    dividing = dividing | first
    places = {name: place for place, name in enumerate(sorted(dividing - first))}
    labels: dict[str, int] = {}
    after: dict[str, list[str]] = collections.defaultdict(list)
    names = [op.name for op in listed]
    order = [names[place] for place in sorted_places(names, before)]
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


def early_operations(
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


def first_operations(
    listed: Sequence[tf.Operation], outside: set[str], early: set[str]
) -> set[str]:
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


def sorted_places(items: Sequence, before: dict) -> list[int]:
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
        raise RuntimeError(
            "XLA can compile only steps whose operations do not depend on each other in a circle. Received: "
            f"{len(items) - len(found)} that do. Use jit_compile=False."
        )
    return found
