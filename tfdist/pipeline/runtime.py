"""The state of a pipeline on a rank, and the operations that it adds to a step's graph."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.backend.graph.dependence import mark_independent
from tfdist.backend.graph.provenance import with_provenance
from tfdist.backend.keras.attributes import count_batch
from tfdist.collectives import Group, all_reduce
from tfdist.collectives.objects import all_gather_object
from tfdist.gradients.non_finite import guard_of
from tfdist.gradients.sparse import joined_rows
from tfdist.pipeline.executor import Route, run_forward, run_schedule
from tfdist.pipeline.partition import Partition
from tfdist.pipeline.placement import Forms, StagePlacement
from tfdist.pipeline.schedules import Schedule
from tfdist.pipeline.shapes import RowShape
from tfdist.pipeline.stage import LOSS, StageProgram, trace_stage
from tfdist.sharding.layout import layout_of
from tfdist.step.context import current_replica, current_step, current_strategy
from tfdist.step.keras_step import Divisors
from tfdist.utils.temporary import attributes_set


class PipelineRuntime:
    """The state of a `PipelineModel`, in a separate object that Keras does not track."""

    def __init__(self, schedule: Schedule, partition: Partition, group: Group, timed: bool):
        self.schedule, self.partition, self.group = schedule, partition, group
        self.timed = timed
        self.times: tf.Variable | None = None
        #: The generator of text, made on first use.
        self.text: Any = None
        self.chain = partition.chain
        self.placement = StagePlacement(partition, group)
        self.stages = schedule.stages_of(group.rank)
        self.last_stage = schedule.num_stages - 1
        segments = partition.segments_of_rank(group.rank)
        layers = {id(layer): layer for segment in segments for layer in segment.layers}
        self.own_layers = list(layers.values())

    def train(self, model, x, batch) -> dict[int, Any]:
        """Adds the work of this rank for one step to the graph.

        Args:
            model: The `PipelineModel`.
            x: The inputs of the rank's rows, in the structure of the model's inputs.
            batch: Targets and weights.

        Returns:
            The gradient of each of this rank's variables that has one, by the variables' ids.
        """
        count = self.schedule.num_microbatches
        inputs = self.chain.flat_inputs(x)
        rows = rows_of_microbatch(next(iter(inputs.values())), count)
        static = rows if isinstance(rows, int) else None
        route = self._route(inputs, static)
        given = {number: tf.split(tensor, [rows] * count) for number, tensor in inputs.items()}
        parts = [tf.split(tensor, [rows] * count) for tensor in _flat(batch)]
        step = current_step()
        if step is not None:
            # Made once for all losses, and outside of the graphs of stages.
            _ = step.gradient_share
        with self._whole_parameters() as to_shards:
            programs = {
                stage: self._program(model, stage, route, batch, static) for stage in self.stages
            }
        forms = self._forms(programs)
        if self.last_stage in programs:
            parts.append([self._divisors(programs[self.last_stage], given, parts)] * count)
        sums, times = run_schedule(
            self.schedule,
            programs,
            route,
            inputs=lambda microbatch: {n: some[microbatch] for n, some in given.items()},
            batch=lambda microbatch: [part[microbatch] for part in parts],
            rows=rows,
            timed=self.timed,
        )
        if times is not None:
            if self.times is None:
                with tf.init_scope(), tf.device("/CPU:0"):
                    self.times = tf.Variable(tf.zeros(times.shape, tf.float64))
            self.times.assign(times)
        gradients = self._gradients(sums, forms)
        guard = guard_of(model)
        if guard is not None and self.last_stage in self.stages:
            with tf.control_dependencies(guard.end_step()):
                gradients = tf.nest.map_structure(tf.identity, gradients, expand_composites=True)
        return to_shards(gradients)

    @contextlib.contextmanager
    def _whole_parameters(self) -> Iterator[Callable]:
        """Inside, parameters that ZeRO has sharded are whole arrays.

        Yields:
            A function from the gradients of parameters to those of shards, by the ids of variables.
        """
        groups: list[list] = []
        seen: set[int] = set()
        for segment in self.partition.segments_of_rank(self.group.rank):
            new = [v for v in segment.variables if layout_of(v).flat and id(v) not in seen]
            if new:
                groups.append(new)
                seen |= set(map(id, new))
        if groups:
            strategy: Any = current_strategy()
            with strategy.unsharded(groups, "stages") as to_shards:
                yield to_shards
        else:
            yield lambda gradients: gradients

    def _forms(self, programs: Mapping[int, StageProgram]) -> Forms:
        """The form of each gradient of all ranks.

        Gradients that no loss leads to are left out. One process does not have them either.
        """
        own = {s: (p.dx, p.gradients, p.same_rows, p.sources) for s, p in programs.items()}
        with tf.init_scope():
            found = all_gather_object(own, self.group, name="pipeline/gradients")
        every = [(stage, about) for some in found for stage, about in some.items()]
        forms: Forms = {}
        live: set[int] = set()
        for stage, (dx, gradients, same_rows, sources) in sorted(every, reverse=True):
            live.add(LOSS)
            for variable, *form in zip(self._trained(stage), gradients, same_rows, strict=True):
                names, same = form
                if names and live & sources[names[0]]:
                    forms.setdefault(id(variable), {})[stage] = len(names), same
            live = {number for number, name in dx.items() if live & sources[name]}
        self.partition.check_trained(forms)
        return forms

    def _gradients(self, sums: dict[int, list], forms: Forms) -> dict[int, Any]:
        """The gradient of each of this rank's variables that has one, by the variables' ids."""
        parts: dict[int, list] = {}
        for stage, gradients in sums.items():
            for variable, gradient in zip(self._trained(stage), gradients, strict=True):
                if stage in forms.get(id(variable), ()):
                    parts.setdefault(id(variable), []).append(gradient)
        found = {
            key: joined_rows(some) if min(forms[key].values())[0] > 1 else tf.add_n(some)
            for key, some in parts.items()
        }
        self.placement.sum_tied(found, forms)
        for key, each in found.items():
            same_rows = isinstance(each, tf.IndexedSlices) and min(
                same for _, same in forms[key].values()
            )
            if same_rows and tf.is_symbolic_tensor(each.indices):
                mark_independent(each.indices)
        return found

    def _divisors(self, last: StageProgram, inputs: Mapping, parts: Sequence) -> tf.Tensor:
        """What the losses of the last stage are divided by, over all micro-batches and ranks: see `Divisors`."""
        step = current_step()
        if last.divisors is None or step is None:
            return tf.zeros([0])
        own = []
        for microbatch in range(self.schedule.num_microbatches):
            tensors = {name: inputs[number][microbatch] for number, name in last.inputs.items()}
            tensors |= zip(last.batch, (part[microbatch] for part in parts), strict=False)
            own.append(tf.stack(list(last.divisors(tensors).values())))
        return all_reduce(tf.add_n(own), step.gradient_group, name="loss-divisors")

    def forward(self, x):
        """Adds a forward pass to the graph.

        Returns:
            The outputs, on the rank of the last stage, else []; and the losses of this rank's layers.
        """
        count = self.schedule.num_microbatches
        given = self.chain.flat_inputs(x)
        rows = tf.shape(next(iter(given.values())))[0]
        # Of similar sizes: there may be fewer rows than micro-batches.
        ends = rows * tf.range(count + 1) // count
        parts = {n: tf.split(t, ends[1:] - ends[:-1], num=count) for n, t in given.items()}
        inputs = [{n: some[place] for n, some in parts.items()} for place in range(count)]
        extra: list[tf.Tensor] = []
        route = self._route(given, None)

        def stage_function(stage: int):
            segments = self.partition.segments(stage)

            def run(tensors):
                part = tf.shape(tensors[self.chain.inputs[0]])[0] / tf.maximum(rows, 1)
                tensors = self.chain.unpacked(tensors)
                losses: list = []
                for segment in segments:
                    tensors |= segment(tensors, False, losses)
                total = self._extra_loss(stage, losses)
                if total is not None:
                    extra.append(tf.math.multiply_no_nan(total, tf.cast(part, total.dtype)))
                if stage == self.last_stage:
                    return {number: tensors[number] for number in self.chain.outputs}
                return self.chain.packed(tensors, _specs(route, route.leads[stage + 1], None))

            return run

        replica = current_replica()
        cutting = attributes_set(replica, cuts=True) if replica else contextlib.nullcontext()
        with self._whole_parameters(), cutting:
            outputs = run_forward(
                {stage: stage_function(stage) for stage in self.stages},
                self.schedule.num_stages,
                route,
                inputs,
            )
        listed = [[some[number] for some in outputs] for number in self.chain.outputs if outputs]
        whole = [with_provenance(lambda *of: tf.concat(of, axis=0), *parts) for parts in listed]
        return whole, tf.add_n(extra) if extra else tf.constant(0.0)

    def output_shapes(self, x) -> list[RowShape]:
        """The shapes of the outputs of the chain, by the number of rows.

        Raises:
            ValueError: An output does not have a row for each of the batch.
        """
        shapes = self.chain.row_shapes(list(self.chain.flat_inputs(x).values()))
        for tensor, number in zip(self.chain.model.outputs, self.chain.outputs, strict=True):
            if not shapes[number].has_rows:
                raise ValueError(
                    "Outputs of a pipeline must have a row for each of the batch. Received: the output "
                    f"`{tensor.name}` of shape {tuple(tensor.shape)}."
                )
        return [shapes[number] for number in self.chain.outputs]

    def _route(self, inputs: Mapping[int, tf.Tensor], rows: int | None) -> Route:
        """The transfer of tensors, whose shapes follow from a batch's inputs.

        Raises:
            ValueError: More than the number of rows of a shape is unknown.
        """
        shapes = self.chain.row_shapes(list(inputs.values()))
        leads = [self.chain.before(begin) for begin in (0, *self.partition.ends[:-1])]
        for number in sorted({*self.chain.inputs, *itertools.chain(*leads)}):
            if not shapes[number].is_known:
                raise ValueError(
                    "A pipeline requires a fixed size of all dims but the batch, because each rank must "
                    f"know the shapes of the tensors it receives. Received: {self.chain.described(number)} "
                    f"of shape {tuple(shapes[number].spec(rows).shape)}."
                )
        return Route(self.group, shapes, leads)

    def _trained(self, stage: int) -> list[keras.Variable]:
        segments = self.partition.segments(stage)
        return list({id(v): v for each in segments for v in each.trainable_variables}.values())

    def _extra_loss(self, stage: int, losses: list) -> tf.Tensor | None:
        """The addition of a stage to the loss: the losses of its layers, and regularizers of weights.

        The regularizer of a weight that several stages have is added by the first of them.
        """
        before = {id(variable) for earlier in range(stage) for variable in self._trained(earlier)}
        for variable in self._trained(stage):
            if variable.regularizer is not None and id(variable) not in before:
                losses = [*losses, variable.regularizer(variable)]
        scalars = [tf.reduce_sum(tf.convert_to_tensor(loss)) for loss in losses]
        return tf.add_n(scalars) if scalars else None

    def _program(self, model, stage: int, route: Route, batch, rows: int | None) -> StageProgram:
        chain, segments, step = self.chain, self.partition.segments(stage), current_step()
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
            divisors = Divisors(of_batch[-1], [])
            y, sample_weight = _packed(batch, of_batch[:-1])
            # Operations of the stage's graph, also if an output is an input.
            outputs = [with_provenance(tf.identity, tensors[number]) for number in chain.outputs]
            rows = tf.shape(tensors[with_rows[0]])[0]
            with attributes_set(step, divisors=divisors) if step else contextlib.nullcontext():
                total = count_batch(model, y, chain.as_outputs(outputs), sample_weight, rows)
            guard = guard_of(model)
            if guard is not None:
                guard.note(total)
            return scaled(total), divisors.own

        read = {number for segment in segments for number in segment.reads}
        if is_last:
            read |= set(chain.outputs)
        inputs = [number for number in chain.inputs if number in read]
        arriving = [*route.leads[stage], *inputs]
        with_rows = [number for number in arriving if route.shapes[number].has_rows]
        if not with_rows:
            inputs = with_rows = [chain.inputs[0]]
        batch_specs = [tf.TensorSpec((rows, *t.shape[1:]), t.dtype) for t in _flat(batch)]
        batch_specs.append(tf.TensorSpec([None], tf.float32))  # Of `Divisors`.
        return trace_stage(
            chain,
            segments,
            self._trained(stage),
            _specs(route, route.leads[stage], rows),
            _specs(route, inputs, rows),
            {} if is_last else _specs(route, route.leads[stage + 1], rows),
            rows_of=with_rows[0],
            extra_loss=extra_loss,
            loss=loss if is_last else None,
            batch=batch_specs if is_last else (),
            splits_backward=self.schedule.splits_backward,
        )


def rows_of_microbatch(x: tf.Tensor, count: int) -> int | tf.Tensor:
    """The number of rows of each of `count` equal micro-batches of a rank's batch.

    Returns:
        An int if the shape of the batch is static, else an int32 scalar.

    Raises:
        ValueError: The number of rows is static, and not a multiple of `count`.
        InvalidArgumentError: In the step itself, if the number of rows is not static.
    """
    message = (
        f"The number of rows of a batch on each rank of the data axis must be divisible by {count}, the "
        "number of micro-batches. Change batch_size or num_microbatches, or drop the remainder of the data "
        "(drop_remainder=True)."
    )
    rows = x.shape[0]
    if rows is not None:
        if rows % count:
            raise ValueError(f"{message} Received: {rows} rows.")
        return rows // count
    rows = tf.shape(x)[0]
    check = tf.debugging.Assert(rows % count == 0, [message, "Received:", rows])
    with tf.control_dependencies([check]):
        return tf.identity(rows // count)


def _specs(route: Route, numbers: Sequence[int], rows: int | None) -> dict[int, tf.TensorSpec]:
    return {number: route.shapes[number].spec(rows) for number in numbers}


def _flat(batch) -> list[tf.Tensor]:
    """The tensors of targets and sample weights, without those that are None."""
    return [tensor for tensor in tf.nest.flatten(batch) if tensor is not None]


def _packed(batch, tensors: Sequence[tf.Tensor]):
    """The inverse of `_flat`: tensors in the structure of `batch`."""
    left = iter(tensors)
    flat = [None if tensor is None else next(left) for tensor in tf.nest.flatten(batch)]
    return tf.nest.pack_sequence_as(batch, flat)
