"""Runs a schedule: a rank's own work in its order, and what it sends and receives for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

import tensorflow as tf

from tfdist.backend.clock.stamps import time_after
from tfdist.backend.graph.dependence import mark_independent
from tfdist.backend.graph.split import Part
from tfdist.collectives import Group
from tfdist.collectives.run import receive_tensor, send_tensor
from tfdist.pipeline.schedules import Action, Schedule
from tfdist.pipeline.shapes import RowShape
from tfdist.pipeline.stage import StageProgram


@dataclasses.dataclass(frozen=True)
class Route:
    """How a rank reaches its neighbours in the chain.

    Attributes:
        group: The pipeline axis; its rank and size are this rank's place and the number of ranks.
        shapes: By number, what the tensors between stages are like.
        leads: By stage, the numbers of the tensors that it gets from the one before.
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
        """Tensors, or what has their shapes, from the rank of a stage."""
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
        """Whether a stage lies on this rank."""
        return stage % self.group.size == self.group.rank


@dataclasses.dataclass
class Outcome:
    """What a rank's part of a training step gives.

    Attributes:
        gradients: By stage, for each of its variables the sum over micro-batches, or None.
        times: Begin and end of each action in seconds, shape [actions, 2]; None unless asked for.
    """

    gradients: dict[int, list]
    times: tf.Tensor | None


def run_schedule(
    schedule: Schedule,
    programs: Mapping[int, StageProgram],
    route: Route,
    inputs: Callable[[int], Mapping[int, tf.Tensor]],
    batch: Callable[[int], Sequence[tf.Tensor]],
    rows,
    *,
    timed: bool = False,
) -> Outcome:
    """Adds this rank's part of a step to the graph that is being built.

    Args:
        schedule: The schedule.
        programs: The programs of this rank's stages.
        route: The way to the other ranks.
        inputs: From a micro-batch to its inputs, by number.
        batch: From a micro-batch to what the loss needs of it.
        rows: The number of rows of a micro-batch: an int or an int32 scalar.
        timed: Whether begins and ends are taken down.
    """
    known: dict[tuple[int, int], dict[str, tf.Tensor]] = {}
    totals: dict[int, list[list]] = {
        stage: [[] for _ in program.gradients] for stage, program in programs.items()
    }
    times: list[tf.Tensor] = []
    #: An operation that is over when an action so far is, the last one at the end. An action begins
    #: when the one before it is over; its message is asked for one action earlier.
    ends: list[list[tf.Operation]] = [[], []]
    last = schedule.num_stages - 1
    for action in schedule.actions[route.group.rank]:
        stage, microbatch = action.stage, action.microbatch
        program = programs[stage]
        tensors = known.setdefault((stage, microbatch), {})
        if action.kind == Action.FORWARD:
            of = inputs(microbatch)
            tensors |= {name: of[number] for number, name in program.inputs.items()}
            if program.x:
                passed = _passed_on(known, route, programs, action, rows, ends[-2])
                tensors |= {name: passed[number] for number, name in program.x.items()}
            tensors |= zip(program.batch, batch(microbatch) if stage == last else (), strict=True)
            part: Part = program.forward
        elif action.kind == Action.BACKWARD:
            if program.dy:
                passed = _passed_on(known, route, programs, action, rows, ends[-2])
                tensors |= {name: passed[number] for number, name in program.dy.items()}
            part = program.backward
        else:
            part = program.weights or program.backward
        arguments, began = _after(ends[-1], {n: tensors[n] for n in part.inputs}, timed)
        results = part(arguments)
        # A call is over, as others see it, when its side effects are; the tensors say more.
        finished = [tf.identity(tensor) for tensor in results.values()] or list(arguments.values())
        for place, names in enumerate(program.gradients):
            if names and names[0] in results:
                more = [results[name] for name in names]
                total = _added(totals[stage][place], more, program.same_rows[place])
                totals[stage][place] = total
                finished += total
        # One for all: each argument of the next action would wait for each result of this one.
        if timed:
            ended = time_after(finished)
            ends.append([ended.op])
            times.append(tf.stack([began, ended]))
        else:
            with tf.control_dependencies(finished):
                ends.append([tf.no_op()])
        tensors |= results
        out = program.y if action.kind == Action.FORWARD else program.dx
        if action.kind != Action.WEIGHT and out:
            to = stage + (1 if action.kind == Action.FORWARD else -1)
            if not route.is_here(to):
                sent = {number: tensors[name] for number, name in out.items()}
                route.send(sent, to, _name(action))
    gradients = {
        stage: [
            _gradient(total, same_rows)
            for total, same_rows in zip(found, programs[stage].same_rows, strict=True)
        ]
        for stage, found in totals.items()
    }
    return Outcome(gradients, tf.stack(times) if timed else None)


def run_forward(
    stages: Mapping[int, Callable[[dict[int, tf.Tensor]], dict[int, tf.Tensor]]],
    num_stages: int,
    route: Route,
    inputs: Sequence[dict[int, tf.Tensor]],
) -> list[dict[int, tf.Tensor]]:
    """Adds a forward pass to the graph that is being built.

    Args:
        stages: This rank's stages as functions of the tensors that lead up to each and the inputs
            of the model, by number; they return those that lead on.
        num_stages: The number of stages in the chain.
        route: The way to the other ranks.
        inputs: The inputs of each micro-batch, by number.

    Returns:
        What the last stage returns for each micro-batch; none where it lies on another rank.
    """
    before: list[tf.Tensor] = []
    passed: list[dict[int, tf.Tensor]] = [{} for _ in inputs] if 0 in stages else []
    for stage, run in sorted(stages.items()):
        outputs = []
        for microbatch, of in enumerate(inputs):
            rows = tf.shape(next(iter(of.values())))[0]
            name = f"pipeline/outputs/stage{stage}/{microbatch}"
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
                route.send(y, stage + 1, name)
        passed = outputs if route.is_here(stage + 1) else []
    return outputs if route.is_here(num_stages - 1) else []


def _passed_on(known, route: Route, programs, action: Action, rows, after) -> dict[int, tf.Tensor]:
    """What an action gets from the one before it in the chain, on whichever rank that lies."""
    forward = action.kind == Action.FORWARD
    source = action.stage - 1 if forward else action.stage + 1
    if route.is_here(source):
        names = programs[source].y if forward else programs[source].dx
        return {n: known[source, action.microbatch][name] for n, name in names.items()}
    sender = Action(action.kind, source, action.microbatch)
    # The gradient of a tensor has its shape.
    program = programs[action.stage]
    numbers = program.x if forward else program.dy
    return route.receive(numbers, rows, source, _name(sender), after)


def _after(before: Sequence, arguments: dict, timed: bool):
    """The arguments, there only when what was before is over; and the time of that."""
    if timed:
        began = time_after([*before, *arguments.values()])
        before = [began]
    else:
        began = None
    with tf.control_dependencies(list(before)):
        return {name: tf.identity(tensor) for name, tensor in arguments.items()}, began


def _added(total: list[tf.Tensor], more: list[tf.Tensor], same_rows: bool) -> list[tf.Tensor]:
    """A gradient and that of another micro-batch: one tensor, or rows, indices and maybe a shape."""
    if not total:
        return more
    if len(more) == 1:
        # A chain of additions TensorFlow would make one sum of many terms, which all stand until the
        # last is there.
        return [tf.add_n(total + more)]
    if same_rows:
        return [tf.add_n([total[0], more[0]]), *total[1:]]
    rows, indices = (tf.concat([total[i], more[i]], axis=0) for i in (0, 1))
    return [rows, indices, *total[2:]]


def _gradient(total: list[tf.Tensor], same_rows: bool):
    """What the optimizer gets."""
    if len(total) > 1:
        if same_rows:
            mark_independent(total[1])
        return tf.IndexedSlices(total[0], total[1], *total[2:])
    return total[0] if total else None


def _name(action: Action) -> str:
    """By what name the outcome of an action travels."""
    what = "activations" if action.kind == Action.FORWARD else "gradients"
    return f"pipeline/{what}/stage{action.stage}/{action.microbatch}"
