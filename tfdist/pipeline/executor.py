"""Runs a schedule: a rank's own work in its order, and the messages that it sends and receives."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

import tensorflow as tf

from tfdist.backend.clock.stamps import time_after
from tfdist.collectives import Group
from tfdist.collectives.run import receive_tensor, send_tensor
from tfdist.pipeline.schedules import Action, Schedule
from tfdist.pipeline.shapes import RowShape
from tfdist.pipeline.stage import StageProgram


@dataclasses.dataclass(frozen=True)
class Route:
    """The transfer of tensors between a rank and its neighbors in the chain.

    Attributes:
        group: The pipeline axis; its rank and size are this rank's index and the number of ranks.
        shapes: The shapes of the tensors between stages, by number.
        leads: The numbers of the tensors that each stage gets from the previous one.
    """

    group: Group
    shapes: Mapping[int, RowShape]
    leads: Sequence[Sequence[int]]

    def send(self, tensors: Mapping[int, tf.Tensor], to_stage: int, name: str) -> None:
        """Sends tensors, or their gradients, to the rank of a stage."""
        for number, tensor in tensors.items():
            to = to_stage % self.group.size
            send_tensor(tensor, self.group, to, name=f"{name}/{number}")

    def receive(
        self, numbers: Iterable[int], rows, from_stage: int, name: str, after: Sequence
    ) -> dict[int, tf.Tensor]:
        """Receives tensors, or their gradients, from the rank of a stage."""
        source = from_stage % self.group.size
        found = {}
        with tf.control_dependencies(list(after)):
            for number in numbers:
                shape = self.shapes[number]
                found[number] = receive_tensor(
                    shape.at(rows), shape.dtype, self.group, source, name=f"{name}/{number}"
                )
        return found

    def is_here(self, stage: int) -> bool:
        """Whether a stage is on this rank."""
        return stage % self.group.size == self.group.rank


def run_schedule(
    schedule: Schedule,
    programs: Mapping[int, StageProgram],
    route: Route,
    inputs: Callable[[int], Mapping[int, tf.Tensor]],
    batch: Callable[[int], Sequence[tf.Tensor]],
    rows,
    *,
    timed: bool = False,
) -> tuple[dict[int, list], tf.Tensor | None]:
    """Adds this rank's part of a step to the current graph.

    Args:
        schedule: The schedule.
        programs: The programs of this rank's stages.
        route: The transfer of tensors to and from other ranks.
        inputs: From a micro-batch to its inputs, by number.
        batch: From a micro-batch to the tensors that the loss reads.
        rows: The number of rows of a micro-batch: an int or an int32 scalar.
        timed: Whether begins and ends are recorded.

    Returns:
        For each stage and each of its variables the sum of gradients over micro-batches, or None; and, if
        requested, begin and end of each action in seconds, shape [actions, 2].
    """
    known: dict[tuple[int, int], dict[str, tf.Tensor]] = {}
    totals: dict[int, list[list]] = {
        stage: [[] for _ in program.gradients] for stage, program in programs.items()
    }
    times: list[tf.Tensor] = []
    #: For each action an operation that ends with it, the latest one last. An action begins when the one
    #: before it has ended, and its message is received one action earlier.
    ends: list[list[tf.Operation]] = [[], []]
    last = schedule.num_stages - 1
    for action in schedule.actions[route.group.rank]:
        stage, microbatch = action.stage, action.microbatch
        program = programs[stage]
        tensors = known.setdefault((stage, microbatch), {})
        part, arriving, leaving, to = program.weights or program.backward, {}, {}, stage
        if action.kind == Action.FORWARD:
            part, arriving, leaving, to = program.forward, program.x, program.y, stage + 1
            of = inputs(microbatch)
            tensors |= {name: of[number] for number, name in program.inputs.items()}
            tensors |= zip(program.batch, batch(microbatch) if stage == last else (), strict=True)
        elif action.kind == Action.BACKWARD:
            part, arriving, leaving, to = program.backward, program.dy, program.dx, stage - 1
        if arriving:
            passed = _received(known, route, programs, action, arriving, rows, ends[-2])
            tensors |= {name: passed[number] for number, name in arriving.items()}
        arguments, began = _after(ends[-1], {n: tensors[n] for n in part.inputs}, timed)
        results = part(arguments)
        # For other operations, a call ends with its side effects, which may be before its results.
        finished = [tf.identity(tensor) for tensor in results.values()] or list(arguments.values())
        for place, names in enumerate(program.gradients):
            if names and names[0] in results:
                more = [results[name] for name in names]
                total = _added(totals[stage][place], more, program.same_rows[place])
                totals[stage][place] = total
                finished += total
        # A single operation, instead of a dependency of each argument of the next action on each result.
        if timed:
            ended = time_after(finished)
            ends.append([ended.op])
            times.append(tf.stack([began, ended]))
        else:
            with tf.control_dependencies(finished):
                ends.append([tf.no_op()])
        tensors |= results
        if leaving and not route.is_here(to):
            sent = {number: tensors[name] for number, name in leaving.items()}
            route.send(sent, to, _name(action))
    gradients = {stage: [*map(_gradient, found)] for stage, found in totals.items()}
    return gradients, tf.stack(times) if timed else None


def run_forward(
    stages: Mapping[int, Callable[[dict[int, tf.Tensor]], dict[int, tf.Tensor]]],
    num_stages: int,
    route: Route,
    inputs: Sequence[dict[int, tf.Tensor]],
) -> list[dict[int, tf.Tensor]]:
    """Adds a forward pass to the current graph.

    Args:
        stages: This rank's stages as functions from the tensors before a stage and the inputs of the model
            to the tensors after it, by number.
        num_stages: The number of stages in the chain.
        route: The transfer of tensors to and from other ranks.
        inputs: The inputs of each micro-batch, by number.

    Returns:
        The result of the last stage for each micro-batch; empty if it is on another rank.
    """
    before: list[tf.Operation] = []
    passed: list[dict[int, tf.Tensor]] = [{} for _ in inputs] if 0 in stages else []
    for stage, run in sorted(stages.items()):
        outputs = []
        for microbatch, of in enumerate(inputs):
            rows = tf.shape(next(iter(of.values())))[0]
            if passed:
                x = passed[microbatch]
            else:
                source = f"pipeline/outputs/stage{stage - 1}/{microbatch}"
                x = route.receive(route.leads[stage], rows, stage - 1, source, before[-2:-1])
            with tf.control_dependencies(before[-1:]):
                x = {number: tf.identity(tensor) for number, tensor in (of | x).items()}
            y = run(x)
            with tf.control_dependencies(list(y.values())):
                before.append(tf.no_op())
            outputs.append(y)
            if stage < num_stages - 1 and not route.is_here(stage + 1):
                route.send(y, stage + 1, f"pipeline/outputs/stage{stage}/{microbatch}")
        passed = outputs if route.is_here(stage + 1) else []
    return outputs if route.is_here(num_stages - 1) else []


def _received(known, route: Route, programs, action: Action, numbers, rows, after) -> dict:
    """The tensors of an action by number, from the adjacent stage on this rank or another one."""
    forward = action.kind == Action.FORWARD
    source = action.stage - 1 if forward else action.stage + 1
    if route.is_here(source):
        names = programs[source].y if forward else programs[source].dx
        return {n: known[source, action.microbatch][name] for n, name in names.items()}
    name = _name(Action(action.kind, source, action.microbatch))
    return route.receive(numbers, rows, source, name, after)


def _after(before: Sequence, arguments: dict, timed: bool):
    """The arguments, available only after some operations have ended; and the time of that."""
    began = time_after([*before, *arguments.values()]) if timed else None
    with tf.control_dependencies([began] if timed else list(before)):
        return {name: tf.identity(tensor) for name, tensor in arguments.items()}, began


def _added(total: list[tf.Tensor], more: list[tf.Tensor], same_rows: bool) -> list[tf.Tensor]:
    """The sum of two gradients: one tensor, or rows, indices and possibly a shape."""
    if not total:
        return more
    if len(more) == 1:
        # TensorFlow would make one sum of a chain of additions, and keep all terms until the last.
        return [tf.add_n(total + more)]
    if same_rows:
        return [tf.add_n([total[0], more[0]]), *total[1:]]
    rows, indices = (tf.concat([total[i], more[i]], axis=0) for i in (0, 1))
    return [rows, indices, *total[2:]]


def _gradient(total: list[tf.Tensor]):
    """The gradient in the form that optimizers accept."""
    if len(total) > 1:
        return tf.IndexedSlices(total[0], total[1], *total[2:])
    return total[0] if total else None


def _name(action: Action) -> str:
    """The name of the message with the result of an action."""
    what = "activations" if action.kind == Action.FORWARD else "gradients"
    return f"pipeline/{what}/stage{action.stage}/{action.microbatch}"
