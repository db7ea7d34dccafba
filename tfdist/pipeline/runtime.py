"""What a rank of a pipeline knows of it, and the work that it adds to a step's graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.backend.graph.provenance import with_provenance
from tfdist.backend.keras.attributes import count_batch
from tfdist.collectives import Group
from tfdist.gradients.non_finite import guard_of
from tfdist.pipeline.executor import Outcome, Route, run_forward, run_schedule
from tfdist.pipeline.partition import Partition
from tfdist.pipeline.placement import StagePlacement
from tfdist.pipeline.schedules import Schedule
from tfdist.pipeline.shapes import RowShape
from tfdist.pipeline.stage import StageProgram, trace_stage
from tfdist.sharding.layout import layout_of
from tfdist.step.context import current_step, current_strategy


class PipelineRuntime:
    """What a `PipelineModel` knows; apart from it, so that Keras does not look inside."""

    def __init__(self, schedule: Schedule, partition: Partition, group: Group, timed: bool):
        self.schedule, self.partition, self.group = schedule, partition, group
        self.timed = timed
        self.times: tf.Variable | None = None
        #: What generates text, made when it is first asked for.
        self.text: Any = None
        self.chain = partition.chain
        self.placement = StagePlacement(partition, group)
        self.stages = schedule.stages_of(group.rank)
        links = [link for stage in self.stages for link in partition.links(stage)]
        self.own_layers = list(
            {id(layer): layer for link in links for layer in link.layers}.values()
        )

    @property
    def last_stage(self) -> int:
        """The stage that sees outputs and targets."""
        return self.schedule.num_stages - 1

    def train(self, model, x, batch) -> dict[int, Any]:
        """Adds the work of this rank for one step to the graph.

        Args:
            model: The `PipelineModel`.
            x: The inputs of the rank's rows, in the form in which the model takes them.
            batch: Targets and weights.

        Returns:
            By the id of each of this rank's trained variables, its gradient or None.
        """
        count = self.schedule.num_microbatches
        inputs = self.chain.flat_inputs(x)
        rows = rows_of_microbatch(next(iter(inputs.values())), count)
        static = rows if isinstance(rows, int) else None
        route = self._route(inputs, static)
        given = {number: microbatches(tensor, rows, count) for number, tensor in inputs.items()}
        parts = [microbatches(tensor, rows, count) for tensor in _flat(batch)]
        step = current_step()
        if step is not None and len(self.chain.outputs) > 1:
            # What the losses of several outputs count by is made once, and not in a stage's graph.
            _ = step.gradient_share
        with self._parameters_at_hand() as to_shards:
            programs = {
                stage: self._program(model, stage, route, batch, static) for stage in self.stages
            }
        outcome = run_schedule(
            self.schedule,
            programs,
            route,
            inputs=lambda microbatch: {n: some[microbatch] for n, some in given.items()},
            batch=lambda microbatch: [part[microbatch] for part in parts],
            rows=rows,
            timed=self.timed,
        )
        if outcome.times is not None:
            if self.times is None:
                with tf.init_scope(), tf.device("/CPU:0"):
                    self.times = tf.Variable(tf.zeros(outcome.times.shape, tf.float64))
            self.times.assign(outcome.times)
        gradients = self._gradients(outcome)
        guard = guard_of(model)
        if guard is not None and self.last_stage in self.stages:
            with tf.control_dependencies(guard.end_step()):
                gradients = tf.nest.map_structure(tf.identity, gradients, expand_composites=True)
        return to_shards(gradients)

    @contextlib.contextmanager
    def _parameters_at_hand(self) -> Iterator[Callable]:
        """Inside, parameters that ZeRO keeps in shards are whole arrays.

        Yields:
            What makes gradients of shards of gradients of parameters, by the ids of variables.
        """
        links = [link for stage in self.stages for link in self.partition.links(stage)]
        seen: set[int] = set()
        groups = []
        for link in links:
            new = {id(v): v for v in link.variables if layout_of(v).flat and id(v) not in seen}
            seen |= new.keys()
            groups.append(list(new.values()))
        if not seen:
            yield lambda gradients: gradients
            return
        strategy: Any = current_strategy()
        with strategy.unsharded([group for group in groups if group], "stages") as to_shards:
            yield to_shards

    def _gradients(self, outcome: Outcome) -> dict[int, Any]:
        """By the id of each of this rank's trained variables, its gradient or None."""
        found: dict[int, Any] = {}
        for stage, gradients in outcome.gradients.items():
            for variable, gradient in zip(self._trained(stage), gradients, strict=True):
                before = found.get(id(variable))
                if before is not None and gradient is not None:
                    gradient = tf.convert_to_tensor(before) + tf.convert_to_tensor(gradient)
                found[id(variable)] = before if gradient is None else gradient
        self.placement.sum_tied(found)
        return found

    def forward(self, x):
        """Adds a forward pass to the graph.

        Returns:
            The outputs of each micro-batch, on the rank of the last stage; and what this rank's
            layers add to the loss.
        """
        count = self.schedule.num_microbatches
        given = self.chain.flat_inputs(x)
        rows = tf.shape(next(iter(given.values())))[0]
        # As even as can be: there may be fewer rows than micro-batches.
        ends = rows * tf.range(count + 1) // count
        parts = {n: tf.split(t, ends[1:] - ends[:-1], num=count) for n, t in given.items()}
        inputs = [{n: some[place] for n, some in parts.items()} for place in range(count)]
        extra: list[tf.Tensor] = []
        route = self._route(given, None)

        def stage_function(stage: int):
            links = self.partition.links(stage)

            def run(tensors):
                part = tf.shape(tensors[self.chain.inputs[0]])[0] / tf.maximum(rows, 1)
                tensors = self.chain.unpacked(tensors)
                losses: list = []
                for link in links:
                    tensors |= link(tensors, False, losses)
                total = self._extra_loss(stage, losses)
                if total is not None:
                    extra.append(total * tf.cast(part, total.dtype))
                if stage == self.last_stage:
                    return {number: tensors[number] for number in self.chain.outputs}
                leads = route.leads[stage + 1]
                return self.chain.packed(tensors, {n: route.shapes[n].spec(None) for n in leads})

            return run

        with self._parameters_at_hand():
            outputs = run_forward(
                {stage: stage_function(stage) for stage in self.stages},
                self.schedule.num_stages,
                route,
                inputs,
            )
        listed = [[some[number] for number in self.chain.outputs] for some in outputs]
        return listed, tf.add_n(extra) if extra else tf.constant(0.0)

    def output_shapes(self, x) -> list[RowShape]:
        """What the outputs of the chain are like, by the number of rows.

        Raises:
            ValueError: One has not a row for each of the batch.
        """
        shapes = self.chain.row_shapes(list(self.chain.flat_inputs(x).values()))
        for tensor, number in zip(self.chain.model.outputs, self.chain.outputs, strict=True):
            if not shapes[number].has_rows:
                raise ValueError(
                    "Outputs of a pipeline have a row for each of the batch. Received: the output "
                    f"`{tensor.name}` of shape {tuple(tensor.shape)}."
                )
        return [shapes[number] for number in self.chain.outputs]

    def _route(self, inputs: Mapping[int, tf.Tensor], rows: int | None) -> Route:
        """The way to the other ranks for tensors as they follow from a batch's inputs.

        Raises:
            ValueError: A shape is not known but for the number of rows.
        """
        shapes = self.chain.row_shapes(list(inputs.values()))
        for tensor, number in zip(self.chain.model.inputs, self.chain.inputs, strict=True):
            if not shapes[number].is_known:
                which = f"input `{tensor.name}` has" if len(inputs) > 1 else "inputs have"
                raise _unknown(which, shapes[number].spec(rows))
        begins = (0, *self.partition.ends[:-1])
        leads = [self.chain.before(begin) for begin in begins]
        for begin, numbers in zip(begins, leads, strict=True):
            for number in numbers:
                if not shapes[number].is_known:
                    name = self.chain.links[begin - 1].name
                    raise _unknown(f"outputs of `{name}` have", shapes[number].spec(rows))
        return Route(self.group, shapes, leads)

    def _trained(self, stage: int) -> list[keras.Variable]:
        found = {
            id(variable): variable
            for link in self.partition.links(stage)
            for variable in link.trainable_variables
        }
        return list(found.values())

    def _extra_loss(self, stage: int, losses: list) -> tf.Tensor | None:
        """What a stage adds to the loss: what its layers have added, and regularizers of weights.

        A weight that several stages hold counts on the first of them.
        """
        before = {id(variable) for earlier in range(stage) for variable in self._trained(earlier)}
        for variable in self._trained(stage):
            if variable.regularizer is not None and id(variable) not in before:
                losses = [*losses, variable.regularizer(variable)]
        scalars = [tf.reduce_sum(tf.convert_to_tensor(loss)) for loss in losses]
        return tf.add_n(scalars) if scalars else None

    def _program(self, model, stage: int, route: Route, batch, rows: int | None) -> StageProgram:
        chain, links = self.chain, self.partition.links(stage)
        is_last = stage == self.last_stage

        def scaled(loss):
            return model.optimizer.scale_loss(loss) / self.schedule.num_microbatches

        def extra_loss(losses, rows):
            total = self._extra_loss(stage, losses)
            if total is None:
                return None
            model._add_to_reported_loss(total, rows)
            return scaled(total)

        def loss(tensors, *of_batch):
            y, sample_weight = _packed(batch, of_batch)
            # Operations of the stage's graph, also where an output has come as it is.
            outputs = [with_provenance(tf.identity, tensors[number]) for number in chain.outputs]
            rows = tf.shape(tensors[with_rows[0]])[0]
            total = count_batch(model, y, chain.as_outputs(outputs), sample_weight, rows)
            guard = guard_of(model)
            if guard is not None:
                guard.note(total)
            return scaled(total)

        read = {number for link in links for number in link.reads}
        if is_last:
            read |= set(chain.outputs)
        inputs = [number for number in chain.inputs if number in read]
        arriving = [*route.leads[stage], *inputs]
        with_rows = [number for number in arriving if route.shapes[number].has_rows]
        if not with_rows:
            inputs = with_rows = [chain.inputs[0]]
        batch_specs = [tf.TensorSpec((rows, *t.shape[1:]), t.dtype) for t in _flat(batch)]

        def specs(numbers):
            return {number: route.shapes[number].spec(rows) for number in numbers}

        return trace_stage(
            chain,
            links,
            self._trained(stage),
            specs(route.leads[stage]),
            specs(inputs),
            {} if is_last else specs(route.leads[stage + 1]),
            with_gradient=chain.with_gradient(),
            rows_of=with_rows[0],
            extra_loss=extra_loss,
            loss=loss if is_last else None,
            batch=batch_specs if is_last else (),
            splits_backward=self.schedule.splits_backward,
        )


def rows_of_microbatch(x: tf.Tensor, count: int) -> int | tf.Tensor:
    """The rows of each of `count` equal micro-batches of a rank's batch.

    Returns:
        An int where the shape says it, else an int32 scalar.

    Raises:
        ValueError: The rows are known, and do not divide.
        InvalidArgumentError: In the step itself, where they are not known before.
    """
    said = (
        f"The rows of a batch on each rank of the data axis divide into {count} equal "
        "micro-batches. Change batch_size or num_microbatches, or drop what is left at the end of "
        "the data (drop_remainder=True)."
    )
    rows = x.shape[0]
    if rows is not None:
        if rows % count:
            raise ValueError(f"{said} Received: {rows} rows.")
        return rows // count
    rows = tf.shape(x)[0]
    with tf.control_dependencies(
        [tf.debugging.Assert(rows % count == 0, [said, "Received:", rows])]
    ):
        return tf.identity(rows // count)


def microbatches(tensor: tf.Tensor, rows: int | tf.Tensor, count: int) -> list[tf.Tensor]:
    """Cuts a tensor into `count` pieces of `rows` rows."""
    return tf.unstack(tf.reshape(tensor, [count, rows, *_inner_shape(tensor)]), num=count)


def _inner_shape(tensor: tf.Tensor) -> list:
    """The sizes of all dims but the first; those that are not known as tensors."""
    sizes = tf.shape(tensor)
    return [sizes[i] if size is None else size for i, size in enumerate(tensor.shape)][1:]


def _unknown(what: str, spec: tf.TensorSpec) -> ValueError:
    return ValueError(
        f"The {what} the shape {tuple(spec.shape)}: a rank must know what it gets from the stage "
        "before. Give all dims but the batch a fixed size."
    )


def _flat(batch) -> list[tf.Tensor]:
    """The tensors of targets and sample weights, those that are there."""
    return [tensor for tensor in tf.nest.flatten(batch) if tensor is not None]


def _packed(batch, tensors: Sequence[tf.Tensor]):
    """Tensors in the places where `batch` has some."""
    left = iter(tensors)
    flat = [None if tensor is None else next(left) for tensor in tf.nest.flatten(batch)]
    return tf.nest.pack_sequence_as(batch, flat)
