"""`PipelineModel`: a chain of layers as a Keras model with its stages on several ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.backend.keras import attributes
from tfdist.collectives import broadcast
from tfdist.collectives.local import LocalEngine
from tfdist.collectives.objects import all_gather_object
from tfdist.layers.whole_batch import check_micro_batches
from tfdist.pipeline.chain import Chain
from tfdist.pipeline.partition import Partition, make_partition
from tfdist.pipeline.runtime import PipelineRuntime
from tfdist.pipeline.schedules import Schedule, chosen_schedule
from tfdist.pipeline.shapes import RowShape
from tfdist.pipeline.simulation import Run, check_schedule
from tfdist.step.context import ModelRole, current_strategy
from tfdist.utils import checks
from tfdist.utils.lazy import require_addon


class PipelineModel(keras.Model):
    """Trains a chain of layers that is split over the ranks of the pipeline axis.

    ```python
    strategy = HorovodStrategy(Mesh(pipeline=4))
    with strategy.scope():
        with tfdist.pipeline.deferred_weights():
            model = tfdist.models.gpt(50_257, num_layers=24, max_length=1024)
        model = PipelineModel(model, num_microbatches=16, schedule="1f1b")
        model.compile("adam", loss)
    model.fit(dataset)
    ```

    `compile`, `fit`, `evaluate`, `predict`, callbacks and metrics work as on any model, with the same
    results as the whole model on one rank. Each rank only holds the variables of its stages. A training
    step splits each rank's rows into micro-batches, and makes one update from all of them. Without a
    pipeline axis the model runs the micro-batches one after the other.

    Args:
        model: A Sequential or functional model, or a list of layers that are called one after the other,
            with a `keras.Input` first. It may have several inputs and outputs, and call other models. If it
            was built in `deferred_weights`, or is a list, other ranks' weights take no memory.
        num_microbatches: The number of micro-batches, which a rank's number of rows must be a multiple of.
        schedule: "gpipe", "1f1b", "interleaved" or "zero-bubble"; or a custom `tfdist.extend.Schedule`, or
            a function from the size of the pipeline axis and `num_microbatches` to one.
        chunks: The number of stages on each rank, for "interleaved" (2 by default).
        cut: "even", "cyclic", or the number of segments of each stage: see `make_partition`.
        cost: The costs for an even split: "flops" (the default if all shapes are known), "parameters",
            "seconds" (the measured time of a forward and a backward of 8 rows through each segment, the mean
            over ranks), or a number for each segment, as of `measure_seconds`.
        input_shape: The shape of a row of the inputs, if the model does not define it completely, for the
            costs and for the FLOPs in the table. For several inputs: one shape for all inputs with undefined
            sizes, a dict by their names, or a list.
        timed: Whether each step records begin and end of each action, for `last_run`.
        name: The model's name.

    Raises:
        ValueError: The model is not supported, or cannot be split as requested.
    """

    def __init__(
        self,
        model: keras.Model | Sequence,
        *,
        num_microbatches: int,
        schedule: str | Schedule | Callable[[int, int], Schedule] = "1f1b",
        chunks: int | None = None,
        cut: str | Sequence[int] = "even",
        cost: str | Sequence[float] | None = None,
        input_shape: Sequence | Mapping | None = None,
        timed: bool = False,
        name: str | None = None,
    ):
        checks.integer("num_microbatches", num_microbatches, minimum=1)
        checks.integer("chunks", chunks, minimum=1, optional=True)
        checks.boolean("timed", timed)
        checks.text("name", name, optional=True)
        chain = Chain(model, input_shape)
        _check_steps(chain.model)
        super().__init__(
            name=name or f"{chain.model.name}_pipeline", dtype=chain.model.dtype_policy
        )
        strategy = current_strategy()
        if strategy is not None:
            # A model that was made outside of the scope has none, and ranks would save it without each other.
            attributes.model_strategy.set(chain.model, strategy)
        engine = LocalEngine() if strategy is None else strategy.engine
        axes = engine.mesh.stage_axes
        group = engine.group(*axes)
        is_cyclic = isinstance(cut, str) and cut == "cyclic"
        if is_cyclic and chunks is None and not len(chain) % group.size:
            chunks = len(chain) // group.size
        plan = chosen_schedule(schedule, group.size, num_microbatches, chunks)
        check_schedule(plan)
        if cost is None:
            cost = "flops" if chain.has_known_shapes else "parameters"
        elif isinstance(cost, str) and cost == "seconds":
            monitoring = require_addon("monitoring", 'cost="seconds"')
            cost = monitoring.measure_seconds(chain, None if strategy is None else strategy.group())
        partition = make_partition(chain, group.size, plan.chunks, cut=cut, cost=cost)
        partition.check_trained()
        self._runtime = PipelineRuntime(plan, partition, group, timed)
        self._tfdist_role = ModelRole(
            self._runtime.last_stage in self._runtime.stages,
            axes,
            num_microbatches,
            self.chain_model,
        )
        # Tracked by Keras: the layers that this rank trains, saves and shows.
        self.stage_layers = self._runtime.own_layers
        self.built = True
        if group.size > 1 and hasattr(chain.model, "generate"):
            # The model's own method would require the weights of other ranks.
            vars(chain.model)["generate"] = self.generate

    @property
    def schedule(self) -> Schedule:
        """The schedule of a training step."""
        return self._runtime.schedule

    @property
    def partition(self) -> Partition:
        """The segments of each stage."""
        return self._runtime.partition

    @property
    def chain_variables(self) -> tuple[list[keras.Variable], list[keras.Variable]]:
        """The variables of the whole chain, in its order, and those that this rank holds."""
        return self._runtime.placement.variables, self._runtime.placement.own

    @property
    def chain_model(self) -> keras.Model:
        """The model of the whole chain; variables of other ranks have no values here."""
        return self._runtime.chain.model

    @property
    def outputs(self) -> list[keras.KerasTensor]:
        """The symbolic outputs of the chain."""
        return self.chain_model.outputs

    @property
    def output_names(self) -> list[str]:
        """The names of the outputs, which are valid keys for losses and metrics."""
        return self.chain_model.output_names

    @property
    def metrics(self):
        """The metrics of `compile`, and those of the model itself; the same on all ranks."""
        return attributes.own_metrics(self)()

    def call(self, inputs, training=None):
        """The outputs of the whole chain, if all of it is on this rank, or for symbolic inputs."""
        some = keras.tree.flatten(inputs)
        symbolic = isinstance(some[0], keras.KerasTensor) or not tf.executing_eagerly()
        if self._runtime.group.size > 1 and not symbolic:
            raise RuntimeError(
                f"`{self.name}` cannot be called on one rank, which holds only a part of it. Call "
                "`predict` on all ranks."
            )
        return self.chain_model(inputs, training=training)

    def compile(self, *args, sampler=None, **kwargs):
        """Configures the model for training, as `compile` of any Keras model.

        Args:
            *args: Arguments of Keras' `compile`.
            sampler: The sampler of `generate`: a name or an object of `keras_hub.samplers`. None for that
                of the task, or the default of its family.
            **kwargs: Arguments of Keras' `compile`.

        Raises:
            ValueError: A loss requires the rows of the whole batch, and a step has micro-batches.
        """
        super().compile(*args, **kwargs)
        # Checked here, on all ranks, because only the last stage computes the loss.
        check_micro_batches(self.loss, self._runtime.schedule.num_microbatches, self.name)
        self.partition.check_trained()  # Layers may have been frozen since.
        # Layers may have got more weights since, by LoRA.
        self._runtime.placement.renew()
        self._runtime.placement.check_states(self.chain_model)
        self._runtime.text = None
        if sampler is not None:
            self._text.use(sampler)

    def generate(self, inputs, max_length=None, stop_token_ids="auto", strip_prompt=False):
        """Generates text from prompts, if the chain is a language model of KerasHub.

        Every rank must call it with the same prompts, and gets the same tokens as the whole model on one
        rank. A rank computes its stages, and caches the keys and values of its blocks.

        Args:
            inputs: Strings, if the task has a preprocessor; otherwise token_ids and padding_mask as
                arrays of shape [rows, tokens]. As for KerasHub's `CausalLM.generate`.
            max_length: The number of tokens including the prompt, for strings.
            stop_token_ids: The tokens that end a row; None for none, "auto" for the end token of the
                preprocessor.
            strip_prompt: Whether prompts are removed from the result.

        Returns:
            The result of KerasHub: strings, or a dict of token_ids and padding_mask.

        Raises:
            ValueError: The chain is not such a model, or cannot be run by stages.
        """
        checks.integer("max_length", max_length, minimum=1, optional=True)
        checks.boolean("strip_prompt", strip_prompt)
        options = {"max_length": max_length, "stop_token_ids": stop_token_ids}
        # Not all families have this argument.
        options |= {"strip_prompt": True} if strip_prompt else {}
        return self._text.generate(inputs, self.run_eagerly, **options)

    @property
    def _text(self) -> Any:
        if self._runtime.text is None:
            hub = require_addon("hub", "PipelineModel.generate")
            self._runtime.text = hub.TextGenerator(self._runtime)
        return self._runtime.text

    def train_step(self, data):
        """One update from this rank's rows."""
        if tf.executing_eagerly() and self._runtime.group.engine.name == "tensorflow":
            raise ValueError(
                "run_eagerly=True is not supported in a pipeline on TensorFlow's engine, whose eager messages "
                f"wait for each other. Received: `{self.name}`. Use HorovodStrategy."
            )
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        gradients = self._runtime.train(self, x, (y, sample_weight))
        variables = self.trainable_variables
        self.optimizer.apply_gradients([(gradients.get(id(v)), v) for v in variables])
        return self.get_metrics_result()

    def test_step(self, data):
        """Metrics of this rank's rows."""
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        outputs, extra = self._runtime.forward(x)
        rows = tf.shape(tf.nest.flatten(x)[0])[0]
        if self._tfdist_role.sees_outputs:
            y_pred = self._runtime.chain.as_outputs(outputs)
            attributes.count_batch(self, y, y_pred, sample_weight, rows)
        self._add_to_reported_loss(extra, rows)
        return self.get_metrics_result()

    def predict_step(self, data):
        """The outputs for this rank's rows, on all ranks of the pipeline axis."""
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        shapes = self._runtime.output_shapes(x)
        outputs, _ = self._runtime.forward(x)
        rows = tf.shape(tf.nest.flatten(x)[0])[0]
        # Ranks without the last stage have none.
        every = outputs or [None] * len(shapes)
        predicted = [
            self._predicted(y, shape, rows, f"predictions/{place}")
            for place, (y, shape) in enumerate(zip(every, shapes, strict=True))
        ]
        return self._runtime.chain.as_outputs(predicted)

    def _predicted(self, y: tf.Tensor | None, like: RowShape, rows, name: str) -> tf.Tensor:
        """An output, broadcast from the rank that has it to those that have None."""
        group = self._runtime.group
        last = self._runtime.last_stage % group.size
        shape = like.at(rows)
        if not like.is_known:  # Broadcast from the rank of the last stage.
            own = tf.zeros([len(shape)], tf.int32) if y is None else tf.shape(y)
            shape = broadcast(own, group, last, name=f"{name}/shape")
        if y is None:
            y = tf.zeros(shape, like.dtype)
        return broadcast(tf.cast(y, like.dtype), group, last, name=name)

    def last_run(self) -> Run:
        """The times of all actions in the last training step.

        All ranks must call it; requires `timed=True`. Times are in seconds from the first begin, by the
        clocks of the ranks' hosts. `tfdist.addons.monitoring.save_timeline` writes them to a file.

        Raises:
            RuntimeError: Steps are not timed, or there was no step yet.
        """
        times = self._runtime.times
        if times is None:
            raise RuntimeError("Times require a model with `timed=True` and a training step.")
        every = all_gather_object(times.numpy(), self._runtime.group, name="pipeline/times")
        start = min(float(found.min()) for found in every)
        return Run(
            self._runtime.schedule,
            tuple(tuple((float(b - start), float(e - start)) for b, e in found) for found in every),
        )

    def summary(self, *args, **kwargs):
        """Prints the layers of each stage, and then Keras' table of this rank's layers."""
        print_fn = kwargs.get("print_fn") or print
        print_fn(
            f'Model: "{self.name}", {self._runtime.schedule.name}, '
            f"{self._runtime.schedule.num_microbatches} micro-batches"
        )
        print_fn(self.partition.table())
        super().summary(*args, **kwargs)

    def save(self, filepath, *args, **kwargs):
        """Saves the whole chain as a plain Keras model without an optimizer; all ranks must call it."""
        self._runtime.placement.renew()
        if self.chain_model.compiled:
            # One that was loaded has the optimizer of its earlier training.
            self.chain_model.compiled = False
            del self.chain_model.optimizer
        self.chain_model.save(filepath, *args, **kwargs)

    def save_weights(self, filepath, *args, **kwargs):
        """Saves the weights of the whole chain; all ranks must call it."""
        self._runtime.placement.renew()
        self.chain_model.save_weights(filepath, *args, **kwargs)

    def load_weights(self, filepath, *args, **kwargs):
        """Loads the weights of the whole chain; each rank reads its own."""
        self._runtime.placement.renew()
        self.chain_model.load_weights(filepath, *args, **kwargs)

    def _add_to_reported_loss(self, extra: tf.Tensor, rows) -> None:
        """Adds the losses of this rank's layers; the last stage counts the rows."""
        total = attributes.loss_tracker(self).total
        total.assign_add(tf.cast(extra, total.dtype) * tf.cast(rows, total.dtype))


def _check_steps(model: keras.Model) -> None:
    """Raises ValueError if a model has steps or losses of its own, which its layers do not have."""
    for name in ("train_step", "test_step", "predict_step", "compute_loss", "compute_metrics"):
        home = getattr(type(model), name).__module__.partition(".")[0]
        if home not in ("keras", "keras_hub", "tfdist"):
            raise ValueError(
                f"A pipeline does not call the methods of a model, only its layers. Received: `{model.name}`, a "
                f"{type(model).__name__} with its own `{name}`. Pass keras.Model(model.inputs, model.outputs), "
                "and the loss to `compile`."
            )
