"""`PipelineModel`: a chain of layers as a Keras model whose stages lie on several ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.collectives import Group, broadcast
from tfdist.collectives.local import LocalEngine
from tfdist.pipeline.chain import Chain
from tfdist.pipeline.executor import Outcome, Route, run_forward, run_schedule
from tfdist.pipeline.keras_graph import initialize_weights
from tfdist.pipeline.partition import Partition, make_partition
from tfdist.pipeline.schedules import Schedule, make_schedule
from tfdist.pipeline.simulation import check
from tfdist.pipeline.stage import StageProgram, trace_stage
from tfdist.pipeline.staging import Placement

__all__ = ["PipelineModel"]


class PipelineModel(keras.Model):
    """Trains a chain of layers whose parts lie on the ranks of the pipeline axis.

    ```python
    strategy = HorovodStrategy(Mesh(pipeline=4))
    with strategy.scope():
        with tfdist.pipeline.deferred_weights():
            model = tfdist.models.gpt(50_257, num_layers=24, max_length=1024)
        model = PipelineModel(model, num_microbatches=16, schedule="1f1b")
        model.compile("adam", loss)
    model.fit(dataset)
    ```

    `compile`, `fit`, `evaluate`, `predict`, callbacks and metrics work as on any model, with the
    result of the whole model on one rank. Each rank holds the variables of its own stages. A
    training step cuts each rank's rows into micro-batches; the update is that of all of them
    together. Without a pipeline axis the model runs the micro-batches one after the other.

    Args:
        model: A Sequential or functional model with one input and one output, or a list that
            begins with a `keras.Input`, of layers that are called one after the other. Where it
            was built in `deferred_weights`, or is a list, other ranks' weights take no memory.
        num_microbatches: Into how many micro-batches a rank's rows are cut; they divide by it.
        schedule: "gpipe", "1f1b", "interleaved" or "zero-bubble".
        chunks: How many stages lie on each rank, for "interleaved" (2 by default).
        cut: "even", "cyclic", or the number of links of each stage: see `make_partition`.
        cost: What an even cut goes by: "flops" (the default where all shapes are known),
            "parameters", or a number for each link.
        name: The model's name.

    Raises:
        ValueError: The model is no chain, or cannot be cut so.
    """

    def __init__(
        self,
        model: keras.Model | Sequence,
        *,
        num_microbatches: int,
        schedule: str = "1f1b",
        chunks: int | None = None,
        cut: str | Sequence[int] = "even",
        cost: str | Sequence[float] | None = None,
        name: str | None = None,
    ):
        chain = Chain(model)
        super().__init__(name=name or f"{chain.model.name}_pipeline")
        strategy: Any = tf.distribute.get_strategy()
        has_engine = hasattr(strategy, "engine")
        group = (strategy if has_engine else LocalEngine()).group("pipeline")
        if cut == "cyclic" and chunks is None and not len(chain) % group.size:
            chunks = len(chain) // group.size
        plan = make_schedule(schedule, group.size, num_microbatches, chunks)
        check(plan)
        if cost is None:
            unknown = any(None in link.model.inputs[0].shape[1:] for link in chain.links)
            cost = "parameters" if unknown else "flops"
        partition = make_partition(chain, group.size, plan.chunks, cut=cut, cost=cost)
        self._parts = _Parts(plan, partition, group)
        # Tracked by Keras: what this rank trains, saves and shows.
        self.stage_layers = self._parts.own_layers
        self.built = True

    @property
    def schedule(self) -> Schedule:
        """The schedule of a training step."""
        return self._parts.schedule

    @property
    def partition(self) -> Partition:
        """What lies on which stage."""
        return self._parts.partition

    @property
    def metrics(self):
        """The metrics of `compile`, and those of the model itself; the same on all ranks."""
        return self._get_own_metrics() if self.compiled else list(self._metrics)

    @property
    def metrics_axes(self) -> tuple[str, ...]:
        """The mesh axes over which the states of metrics are to be read."""
        return ("data", "pipeline")

    @property
    def holds_outputs(self) -> bool:
        """Whether the last stage, which sees outputs and targets, lies on this rank."""
        return self._parts.last_stage in self._parts.stages

    def call(self, inputs, training=None):
        """The outputs of the whole chain, where it lies on this rank, or of symbolic inputs."""
        if self._parts.group.size > 1 and tf.executing_eagerly():
            if not isinstance(inputs, keras.KerasTensor):
                raise RuntimeError(
                    f"This rank holds a part of `{self.name}`, which cannot be called by itself: "
                    "call `predict` on all ranks."
                )
        return self._parts.chain.model(inputs, training=training)

    def train_step(self, data):
        """One update from this rank's rows."""
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        outcome = self._parts.train(self, x, (y, sample_weight))
        gradients = self._parts.gradients(outcome)
        variables = self.trainable_variables
        if not variables:
            raise ValueError(
                f"The stages of rank {self._parts.group.rank} of the pipeline have no weights to "
                "train. Cut the chain so that each rank has some."
            )
        self.optimizer.apply_gradients([(gradients.get(id(v)), v) for v in variables])
        return self.get_metrics_result()

    def test_step(self, data):
        """Metrics of this rank's rows."""
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        outputs, extra = self._parts.forward(x)
        rows = tf.shape(x)[0]
        if self.holds_outputs:
            y_pred = tf.concat(outputs, axis=0)
            loss = self._compile_loss(y, y_pred, sample_weight)
            self._loss_tracker.update_state(loss, sample_weight=rows)
            if self._compile_metrics is not None:
                self._compile_metrics.update_state(y, y_pred, sample_weight)
        self.add_to_reported_loss(extra, rows)
        return self.get_metrics_result()

    def predict_step(self, data):
        """The outputs for this rank's rows, on all ranks of the pipeline axis."""
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        outputs, _ = self._parts.forward(x)
        if self.holds_outputs:
            y = tf.concat(outputs, axis=0)
        else:
            spec = self._parts.output_spec(x)
            y = tf.zeros([tf.shape(x)[0], *spec.shape[1:]], spec.dtype)
        last = self._parts.last_stage % self._parts.group.size
        return broadcast(y, self._parts.group, last, name="predictions")

    def summary(self, *args, **kwargs):
        """Prints which layers lie on which stage; then Keras' own table of this rank's layers."""
        print_fn = kwargs.get("print_fn") or print
        print_fn(f'Model: "{self.name}", {self._parts.schedule.name}, '
                 f"{self._parts.schedule.num_microbatches} micro-batches")
        print_fn(self.partition.table())
        super().summary(*args, **kwargs)

    def save(self, filepath, *args, **kwargs):
        """Saves the whole chain as the plain Keras model that it is; called by all ranks."""
        with self._whole() as model:
            model.save(filepath, *args, **kwargs)

    def save_weights(self, filepath, *args, **kwargs):
        """Saves the weights of the whole chain; called by all ranks."""
        with self._whole() as model:
            model.save_weights(filepath, *args, **kwargs)

    def load_weights(self, filepath, *args, **kwargs):
        """Loads the weights of the whole chain, of which each rank keeps its own."""
        with self._whole() as model:
            model.load_weights(filepath, *args, **kwargs)

    @contextlib.contextmanager
    def _whole(self) -> Iterator[keras.Model]:
        """Inside, the whole chain has values on every rank."""
        placement = self._parts.placement
        filled = placement.fill()
        try:
            yield self._parts.chain.model
        finally:
            placement.empty(filled)

    def add_to_reported_loss(self, extra: tf.Tensor, rows) -> None:
        """Adds what layers of this rank add to the loss; the last stage counts the rows."""
        total = self._loss_tracker.total
        total.assign_add(tf.cast(extra, total.dtype) * tf.cast(rows, total.dtype))


class _Parts:
    """What a `PipelineModel` knows; apart from it, so that Keras does not look inside."""

    def __init__(self, schedule: Schedule, partition: Partition, group: Group):
        self.schedule, self.partition, self.group = schedule, partition, group
        self.chain = partition.chain
        self.placement = Placement(partition, group)
        self.stages = schedule.stages_of(group.rank)
        initialize_weights(self.placement.own)
        self.placement.mark()
        links = [link for stage in self.stages for link in partition.links(stage)]
        self.own_layers = list(
            {id(layer): layer for link in links for layer in link.layers}.values()
        )

    @property
    def last_stage(self) -> int:
        """The stage that sees outputs and targets."""
        return self.schedule.num_stages - 1

    def train(self, model: PipelineModel, x: tf.Tensor, batch) -> Outcome:
        """Adds the work of this rank for one step to the graph."""
        count = self.schedule.num_microbatches
        rows = rows_of_microbatch(x, count)
        parts = [microbatches(t, rows, count) for t in (x, *_flat(batch))]
        static = rows if isinstance(rows, int) else None
        specs = self._specs(x, static)
        programs = {
            stage: self._program(model, stage, specs, batch, static) for stage in self.stages
        }
        return run_schedule(
            self.schedule,
            programs,
            Route(self.group, specs),
            inputs=lambda microbatch: parts[0][microbatch],
            batch=lambda microbatch: [part[microbatch] for part in parts[1:]],
            rows=rows,
        )

    def gradients(self, outcome: Outcome) -> dict[int, Any]:
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

        outputs = run_forward(
            {stage: stage_function(stage) for stage in self.stages},
            self.schedule.num_stages,
            Route(self.group, self._specs(x, None)),
            inputs,
        )
        return outputs, tf.add_n(extra) if extra else tf.constant(0.0)

    def output_spec(self, x: tf.Tensor) -> keras.KerasTensor:
        """What the outputs of the chain are like."""
        inputs = keras.KerasTensor(x.shape, x.dtype.name)
        return self.chain.model.compute_output_spec(inputs)

    def _specs(self, x: tf.Tensor, rows: int | None) -> dict[int, tf.TensorSpec]:
        """What the inputs of each stage are like.

        Raises:
            ValueError: A shape is not known but for the number of rows.
        """
        tensor = keras.KerasTensor((rows, *x.shape[1:]), x.dtype.name)
        what = "inputs"
        specs = {}
        for stage in range(self.schedule.num_stages):
            if None in tuple(tensor.shape)[1:]:
                raise ValueError(
                    f"The {what} have the shape {tuple(tensor.shape)}: a rank must know what it "
                    "gets from the stage before. Give all dims but the batch a fixed size."
                )
            specs[stage] = tf.TensorSpec(tensor.shape, tensor.dtype)
            for link in self.partition.links(stage):
                tensor = link.model.compute_output_spec(tensor)
                what = f"outputs of `{link.name}`"
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
            model.add_to_reported_loss(total, rows)
            return scaled(total)

        def loss(y_pred, *tensors):
            y, sample_weight = _packed(batch, tensors)
            total = model._compile_loss(y, y_pred, sample_weight)
            model._loss_tracker.update_state(total, sample_weight=tf.shape(y_pred)[0])
            if model._compile_metrics is not None:
                model._compile_metrics.update_state(y, y_pred, sample_weight)
            return scaled(total)

        batch_specs = [tf.TensorSpec((rows, *t.shape[1:]), t.dtype) for t in _flat(batch)]
        return trace_stage(
            [link.model for link in links],
            self._trained(stage),
            specs[stage],
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
    with tf.control_dependencies([tf.debugging.Assert(rows % count == 0, [said, "Received:", rows])]):
        return tf.identity(rows // count)


def microbatches(tensor: tf.Tensor, rows: int | tf.Tensor, count: int) -> list[tf.Tensor]:
    """Cuts a tensor into `count` pieces of `rows` rows."""
    return tf.unstack(tf.reshape(tensor, [count, rows, *tensor.shape[1:]]), num=count)


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
    found = {}
    for link in links:
        for layer in link.layers:
            found |= {id(loss): loss for loss in layer.losses}
    losses = [tf.reduce_sum(tf.convert_to_tensor(loss)) for loss in found.values()]
    return tf.add_n(losses) if losses else None

