"""`PipelineModel`: a chain of layers as a Keras model whose stages lie on several ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.backend.graph.provenance import with_provenance
from tfdist.backend.keras.attributes import count_batch, loss_tracker, own_metrics
from tfdist.collectives import broadcast
from tfdist.collectives.local import LocalEngine
from tfdist.collectives.objects import all_gather_object
from tfdist.layers.whole_batch import check_micro_batches
from tfdist.pipeline.chain import Chain
from tfdist.pipeline.costs import measure_seconds
from tfdist.pipeline.partition import Partition, make_partition
from tfdist.pipeline.runtime import PipelineRuntime
from tfdist.pipeline.schedules import Schedule, chosen_schedule
from tfdist.pipeline.shapes import RowShape
from tfdist.pipeline.simulation import Run, check_schedule
from tfdist.step.context import ModelRole, current_strategy
from tfdist.utils import checks
from tfdist.utils.lazy import require_addon


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
        model: A Sequential or functional model, or a list that begins with a `keras.Input`, of layers
            that are called one after the other. It may have several inputs and outputs, and call other
            models. Where it was built in `deferred_weights`, or is a list, other ranks' weights take
            no memory.
        num_microbatches: Into how many micro-batches a rank's rows are cut; they divide by it.
        schedule: "gpipe", "1f1b", "interleaved" or "zero-bubble"; or a `tfdist.extend.Schedule` of yours,
            or a function that makes one of the size of the pipeline axis and `num_microbatches`.
        chunks: How many stages lie on each rank, for "interleaved" (2 by default).
        cut: "even", "cyclic", or the number of links of each stage: see `make_partition`.
        cost: What an even cut goes by: "flops" (the default where all shapes are known),
            "parameters", "seconds" (a forward and a backward of 8 rows through each link, by the
            clock, the mean of all ranks), or a number for each link, as of `measure_seconds`.
        input_shape: The shape of a row of the inputs, where the model leaves some of it open: for
            the costs, and for the FLOPs in the table. For several inputs one shape that all with open
            sizes have, a dict by their names, or a list.
        timed: Whether each step takes down when each action begins and ends, for `last_run`.
        name: The model's name.

    Raises:
        ValueError: The model is no chain, or cannot be cut so.
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
        super().__init__(name=name or f"{chain.model.name}_pipeline")
        strategy = current_strategy()
        engine = LocalEngine() if strategy is None else strategy.engine
        axes = engine.mesh.stage_axes
        group = engine.group(*axes)
        if (
            isinstance(cut, str)
            and cut == "cyclic"
            and chunks is None
            and not len(chain) % group.size
        ):
            chunks = len(chain) // group.size
        plan = chosen_schedule(schedule, group.size, num_microbatches, chunks)
        check_schedule(plan)
        if cost is None:
            cost = "flops" if chain.has_known_shapes else "parameters"
        elif isinstance(cost, str) and cost == "seconds":
            cost = measure_seconds(chain, None if strategy is None else strategy.group())
        partition = make_partition(chain, group.size, plan.chunks, cut=cut, cost=cost)
        _check_trained(partition)
        self._runtime = PipelineRuntime(plan, partition, group, timed)
        self._tfdist_role = ModelRole(
            self._runtime.last_stage in self._runtime.stages,
            axes,
            num_microbatches,
            self.chain_model,
        )
        # Tracked by Keras: what this rank trains, saves and shows.
        self.stage_layers = self._runtime.own_layers
        self.built = True
        if group.size > 1 and hasattr(chain.model, "generate"):
            # Its own would compute with weights that are not here.
            vars(chain.model)["generate"] = self.generate

    @property
    def schedule(self) -> Schedule:
        """The schedule of a training step."""
        return self._runtime.schedule

    @property
    def partition(self) -> Partition:
        """What lies on which stage."""
        return self._runtime.partition

    @property
    def chain_variables(self) -> tuple[list[keras.Variable], list[keras.Variable]]:
        """The variables of the whole chain, in its order, and those that this rank holds."""
        return self._runtime.placement.variables, self._runtime.placement.own

    @property
    def chain_model(self) -> keras.Model:
        """The model of the whole chain; what other ranks hold of it has no values here."""
        return self._runtime.chain.model

    @property
    def outputs(self) -> list[keras.KerasTensor]:
        """The symbolic outputs of the chain."""
        return self._runtime.chain.model.outputs

    @property
    def output_names(self) -> list[str]:
        """The names of the outputs, by which losses and metrics may be given."""
        return self._runtime.chain.model.output_names

    @property
    def metrics(self):
        """The metrics of `compile`, and those of the model itself; the same on all ranks."""
        return own_metrics(self)()

    def call(self, inputs, training=None):
        """The outputs of the whole chain, where it lies on this rank, or of symbolic inputs."""
        some = keras.tree.flatten(inputs)
        symbolic = isinstance(some[0], keras.KerasTensor) or not tf.executing_eagerly()
        if self._runtime.group.size > 1 and not symbolic:
            raise RuntimeError(
                f"This rank holds a part of `{self.name}`, which cannot be called by itself: call "
                "`predict` on all ranks."
            )
        return self._runtime.chain.model(inputs, training=training)

    def compile(self, *args, sampler=None, **kwargs):
        """As `compile` of any model.

        Args:
            *args: For Keras' `compile`.
            sampler: How `generate` draws tokens: a name or an object of `keras_hub.samplers`. None for
                that of the task, or the default of its family.
            **kwargs: For Keras' `compile`.

        Raises:
            ValueError: A loss needs the rows of the whole batch, and a step has micro-batches.
        """
        super().compile(*args, **kwargs)
        # Here, where all ranks are told: the loss is computed by the last stage alone.
        check_micro_batches(self.loss, self._runtime.schedule.num_microbatches, self.name)
        # Layers that got LoRA since have more weights.
        self._runtime.placement.renew()
        self._runtime.text = None
        if sampler is not None:
            self._text.use(sampler)

    def generate(self, inputs, max_length=None, stop_token_ids="auto", strip_prompt=False):
        """Text that goes on from prompts, where the chain is a language model of KerasHub.

        Every rank calls it with the same prompts, and gets the same tokens: those of the whole model on
        one rank. A rank computes its own stages, and keeps the keys and values of its own blocks.

        Args:
            inputs: Strings, where the task has a preprocessor; else token_ids and padding_mask as
                arrays of shape [rows, tokens]. As for KerasHub's `CausalLM.generate`.
            max_length: The number of tokens, prompts among them; for strings.
            stop_token_ids: Tokens behind which a row ends; None for none, "auto" for the end token
                of the preprocessor.
            strip_prompt: Whether prompts are left out of what is returned.

        Returns:
            What KerasHub returns: strings, or a dict of token_ids and padding_mask.

        Raises:
            ValueError: The chain is another model, or one whose program cannot run by stages.
        """
        checks.integer("max_length", max_length, minimum=1, optional=True)
        checks.boolean("strip_prompt", strip_prompt)
        options = {"max_length": max_length, "stop_token_ids": stop_token_ids}
        # Some families do not know the word.
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
            y_pred = [
                with_provenance(lambda *parts: tf.concat(parts, axis=0), *parts)
                for parts in zip(*outputs, strict=True)
            ]
            y_pred = self._runtime.chain.as_outputs(y_pred)
            count_batch(self, y, y_pred, sample_weight, rows)
        self._add_to_reported_loss(extra, rows)
        return self.get_metrics_result()

    def predict_step(self, data):
        """The outputs for this rank's rows, on all ranks of the pipeline axis."""
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        shapes = self._runtime.output_shapes(x)
        outputs, _ = self._runtime.forward(x)
        rows = tf.shape(tf.nest.flatten(x)[0])[0]
        whole = [tf.concat(parts, axis=0) for parts in zip(*outputs, strict=True)]
        # Ranks without the last stage have none.
        every = whole or [None] * len(shapes)
        predicted = [
            self._predicted(y, shape, rows, f"predictions/{place}")
            for place, (y, shape) in enumerate(zip(every, shapes, strict=True))
        ]
        return self._runtime.chain.as_outputs(predicted)

    def _predicted(self, y: tf.Tensor | None, like: RowShape, rows, name: str) -> tf.Tensor:
        """An output, from the rank that has it to those that have None."""
        group = self._runtime.group
        last = self._runtime.last_stage % group.size
        shape = like.at(rows)
        if not like.is_known:  # The rank of the last stage tells the others.
            own = tf.zeros([len(shape)], tf.int32) if y is None else tf.shape(y)
            shape = broadcast(own, group, last, name=f"{name}/shape")
        if y is None:
            y = tf.zeros(shape, like.dtype)
        return broadcast(tf.cast(y, like.dtype), group, last, name=name)

    def last_run(self) -> Run:
        """When each rank of the pipeline did what in the last training step.

        Called by all ranks; needs `timed=True`. Times are seconds from the first begin, by the
        clocks of the ranks' machines. `tfdist.addons.monitoring.save_timeline` writes it to a file.

        Raises:
            RuntimeError: Steps are not timed, or there was none yet.
        """
        times = self._runtime.times
        if times is None:
            raise RuntimeError("Make the model with `timed=True`, and train it, to have times.")
        every = all_gather_object(times.numpy(), self._runtime.group, name="pipeline/times")
        start = min(float(found.min()) for found in every)
        return Run(
            self._runtime.schedule,
            tuple(tuple((float(b - start), float(e - start)) for b, e in found) for found in every),
        )

    def summary(self, *args, **kwargs):
        """Prints which layers lie on which stage; then Keras' own table of this rank's layers."""
        print_fn = kwargs.get("print_fn") or print
        print_fn(
            f'Model: "{self.name}", {self._runtime.schedule.name}, '
            f"{self._runtime.schedule.num_microbatches} micro-batches"
        )
        print_fn(self.partition.table())
        super().summary(*args, **kwargs)

    def save(self, filepath, *args, **kwargs):
        """Saves the whole chain as the plain Keras model that it is; called by all ranks."""
        self._runtime.placement.renew()
        self.chain_model.save(filepath, *args, **kwargs)

    def save_weights(self, filepath, *args, **kwargs):
        """Saves the weights of the whole chain; called by all ranks."""
        self._runtime.placement.renew()
        self.chain_model.save_weights(filepath, *args, **kwargs)

    def load_weights(self, filepath, *args, **kwargs):
        """Loads the weights of the whole chain, of which each rank reads its own."""
        self._runtime.placement.renew()
        self.chain_model.load_weights(filepath, *args, **kwargs)

    def _add_to_reported_loss(self, extra: tf.Tensor, rows) -> None:
        """Adds what layers of this rank add to the loss; the last stage counts the rows."""
        total = loss_tracker(self).total
        total.assign_add(tf.cast(extra, total.dtype) * tf.cast(rows, total.dtype))


def _check_trained(partition: Partition) -> None:
    """Refuses a rank without weights to train, which an optimizer would."""
    for rank in range(partition.num_ranks):
        stages = range(rank, partition.num_stages, partition.num_ranks)
        links = [link for stage in stages for link in partition.links(stage)]
        if not any(link.trainable_variables for link in links):
            raise ValueError(
                f"Rank {rank} of the pipeline would have no weights to train: "
                f"{', '.join(link.name for link in links)}. Cut the chain elsewhere."
            )
