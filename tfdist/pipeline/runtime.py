"""What a rank of a pipeline knows of it, and the work that it adds to a step's graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.collectives import Group
from tfdist.context import current_strategy
from tfdist.gradients.non_finite import guard_of
from tfdist.keras_internals.attributes import count_batch
from tfdist.keras_internals.functional import initialize_weights
from tfdist.pipeline.executor import Outcome, Route, run_forward, run_schedule
from tfdist.pipeline.partition import Partition
from tfdist.pipeline.placement import StagePlacement
from tfdist.pipeline.schedules import Schedule
from tfdist.pipeline.stage import StageProgram, trace_stage
from tfdist.sharding.layout import layout_of

__all__ = ["PipelineRuntime"]


class PipelineRuntime:
    """What a `PipelineModel` knows; apart from it, so that Keras does not look inside."""

    def __init__(self, schedule: Schedule, partition: Partition, group: Group, timed: bool):
        self.schedule, self.partition, self.group = schedule, partition, group
        self.timed = timed
        self.times: tf.Variable | None = None
        self.chain = partition.chain
        self.placement = StagePlacement(partition, group)
        self.stages = schedule.stages_of(group.rank)
        initialize_weights(self.placement.own)
        self.placement.set_layouts()
        links = [link for stage in self.stages for link in partition.links(stage)]
        self.own_layers = list(
            {id(layer): layer for link in links for layer in link.layers}.values()
        )

    @property
    def last_stage(self) -> int:
        """The stage that sees outputs and targets."""
        return self.schedule.num_stages - 1

    def train(self, model, x: tf.Tensor, batch) -> dict[int, Any]:
        """Adds the work of this rank for one step to the graph.

        Returns:
            By the id of each of this rank's trained variables, its gradient or None.
        """
        count = self.schedule.num_microbatches
        rows = rows_of_microbatch(x, count)
        static = rows if isinstance(rows, int) else None
        specs = self._specs(x, static)
        parts = [microbatches(t, rows, count) for t in (x, *_flat(batch))]
        with self._parameters_at_hand() as to_shards:
            programs = {
                stage: self._program(model, stage, specs, batch, static) for stage in self.stages
            }
        outcome = run_schedule(
            self.schedule,
            programs,
            Route(self.group, specs),
            inputs=lambda microbatch: parts[0][microbatch],
            batch=lambda microbatch: [part[microbatch] for part in parts[1:]],
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

    def forward(self, x: tf.Tensor):
        """Adds a forward pass to the graph.

        Returns:
            The outputs of each micro-batch, on the rank of the last stage; and what this rank's
            layers add to the loss.
        """
        count = self.schedule.num_microbatches
        rows = tf.shape(x)[0]
        # As even as can be: there may be fewer rows than micro-batches.
        ends = rows * tf.range(count + 1) // count
        inputs = tf.split(x, ends[1:] - ends[:-1], num=count)
        extra: list[tf.Tensor] = []

        def stage_function(stage: int):
            links = self.partition.links(stage)

            def run(tensor):
                part = tf.shape(tensor)[0] / tf.maximum(rows, 1)
                for link in links:
                    tensor = link.model(tensor, training=False)
                total = _extra_loss(links)
                if total is not None:
                    extra.append(total * tf.cast(part, total.dtype))
                return tensor

            return run

        with self._parameters_at_hand():
            outputs = run_forward(
                {stage: stage_function(stage) for stage in self.stages},
                self.schedule.num_stages,
                Route(self.group, self._specs(x, None)),
                inputs,
            )
        return outputs, tf.add_n(extra) if extra else tf.constant(0.0)

    def output_spec(self, x: tf.Tensor) -> keras.KerasTensor:
        """What the outputs of the chain are like."""
        tensor = keras.KerasTensor(x.shape, x.dtype.name)
        for link in self.chain.links:
            tensor = link.model.compute_output_spec(tensor)
        return tensor

    def _specs(self, x: tf.Tensor, rows: int | None) -> dict[int, tf.TensorSpec]:
        """What the inputs of each stage are like.

        Raises:
            ValueError: A shape is not known but for the number of rows.
        """
        between = self.chain.specs(rows, x.shape[1:], x.dtype.name)
        specs = {}
        for stage, begin in enumerate((0, *self.partition.ends[:-1])):
            specs[stage] = between[begin]
            if None in specs[stage].shape[1:]:
                name = self.chain.links[begin - 1].name
                what = f"outputs of `{name}`" if begin else "inputs"
                raise ValueError(
                    f"The {what} have the shape {tuple(specs[stage].shape)}: a rank must know what "
                    "it gets from the stage before. Give all dims but the batch a fixed size."
                )
        return specs

    def _trained(self, stage: int) -> list[keras.Variable]:
        found = {
            id(variable): variable
            for link in self.partition.links(stage)
            for variable in link.trainable_variables
        }
        return list(found.values())

    def _program(self, model, stage: int, specs, batch, rows: int | None) -> StageProgram:
        links = self.partition.links(stage)
        is_last = stage == self.last_stage

        def scaled(loss):
            return model.optimizer.scale_loss(loss) / self.schedule.num_microbatches

        def extra_loss(rows):
            total = _extra_loss(links)
            if total is None:
                return None
            model._add_to_reported_loss(total, rows)
            return scaled(total)

        def loss(y_pred, *tensors):
            y, sample_weight = _packed(batch, tensors)
            outputs = self.chain.as_outputs(y_pred)
            total = count_batch(model, y, outputs, sample_weight, tf.shape(y_pred)[0])
            guard = guard_of(model)
            if guard is not None:
                guard.note(total)
            return scaled(total)

        batch_specs = [tf.TensorSpec((rows, *t.shape[1:]), t.dtype) for t in _flat(batch)]
        return trace_stage(
            [link.model for link in links],
            self._trained(stage),
            specs[stage],
            specs.get(stage + 1),
            first=stage == 0,
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


def _flat(batch) -> list[tf.Tensor]:
    """The tensors of targets and sample weights, those that are there."""
    return [tensor for tensor in tf.nest.flatten(batch) if tensor is not None]


def _packed(batch, tensors: Sequence[tf.Tensor]):
    """Tensors in the places where `batch` has some."""
    left = iter(tensors)
    flat = [None if tensor is None else next(left) for tensor in tf.nest.flatten(batch)]
    return tf.nest.pack_sequence_as(batch, flat)


def _extra_loss(links) -> tf.Tensor | None:
    """What the layers of some links have just added to the loss: regularizers, `add_loss`."""
    found: dict[int, Any] = {}
    for link in links:
        for layer in link.layers:
            found |= {id(loss): loss for loss in layer.losses}
    losses = [tf.reduce_sum(tf.convert_to_tensor(loss)) for loss in found.values()]
    return tf.add_n(losses) if losses else None
