"""Divides a traced step into the parts that XLA compiles, and the operations between them.

A collective, or another operation that XLA cannot compile, divides the operations of a step: those before it,
those after it, and those that do not depend on it. All operations that have the same such predecessors are
compiled together, so no part waits for a collective that one of its operations does not need, and the order of
the collectives of a rank is that of the step itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import tensorflow as tf

from tfdist.backend.xla.grouping import (
    early_operations,
    first_operations,
    groups_of,
    sorted_places,
)
from tfdist.backend.xla.obstacles import (
    Functions,
    Obstacle,
    called,
    has_list,
    obstacles,
    sorted_operations,
)
from tfdist.backend.xla.repeated import dependencies, repeated_operations
from tfdist.backend.xla.sizes import Inputs, Sizes


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
        repeated = repeated_operations(operations, arguments, sizes, outside)
        listed = [op for op in operations if op.name not in arguments and op.name not in repeated]
        before, soft = dependencies(listed, repeated | arguments, outside)
        # A function that is called many times is compiled once, and not in each part that calls it.
        alone = {op.name for op in listed if op.name not in outside and _calls_one(op, functions)}
        early = early_operations(operations, alone, sizes, arguments)
        first = first_operations(listed, outside, early)
        groups = groups_of(listed, before, outside | alone, early - outside, first, created)
        lists = _lists_across(groups)
        if not lists:
            break
        # A list cannot be passed from one compiled part to another.
        outside |= lists
    parts = [Part(each, len(each) > 1 or each[0].name in alone) for each in groups]
    ordered = _in_order(parts, before, soft)
    return Division(_joined(ordered), repeated, before, sizes, [each for _, each in found])


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


def _in_order(
    parts: Sequence[Part], before: dict[str, list[str]], soft: Iterable[tuple[str, str]]
) -> list[Part]:
    """The parts, each after those that it depends on.

    Of the soft dependencies those are added to `before` that do not let a part wait for itself.
    """
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
    return [parts[place] for place in sorted_places(range(len(parts)), needed)]


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


def _joined(parts: Iterable[Part]) -> list[Part]:
    """The parts, with successive ones that are not compiled as one."""
    found: list[Part] = []
    for part in parts:
        if found and not part.is_compiled and not found[-1].is_compiled:
            found[-1].operations.extend(part.operations)
        else:
            found.append(part)
    return found
