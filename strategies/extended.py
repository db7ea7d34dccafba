"""What a step under `ParallelStrategy` can ask of the other ranks: TensorFlow's `StrategyExtended`."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import tensorflow as tf
from tensorflow.python.distribute.one_device_strategy import OneDeviceExtended

from tfdist.backend.graph.arrival import after_arrival
from tfdist.collectives import all_gather, all_reduce
from tfdist.collectives.flight_counts import outermost_is_eager
from tfdist.data.first_batch import FirstBatch
from tfdist.data.read_ahead import without_early_reads
from tfdist.data.sharding import equal_steps, is_per_rank, mark_per_rank, shard_batches
from tfdist.step.context import DistributedStrategy, ReplicaContext
from tfdist.step.keras_step import KerasStep
from tfdist.step.token_split import TokenSplit
from tfdist.strategies.keras_patches.steps import keras_step


class ParallelExtended(OneDeviceExtended):
    """One device in this process, and an engine to the other ranks.

    TensorFlow's one-device strategy already keeps plain variables and tensors. What is overridden
    here is all that a step can ask of the other ranks.
    """

    def __init__(self, strategy: DistributedStrategy):
        super().__init__(strategy, "/GPU:0" if tf.config.list_logical_devices("GPU") else "/CPU:0")
        self._parallel = strategy
        self._local = threading.local()
        self._batch_logs_read: tf.Variable | None = None
        self._runs: tf.Variable | None = None
        self._first_batch: FirstBatch | None = None

    # -- what ranks are ---------------------------------------------------------------------

    @property
    def _num_replicas_in_sync(self):
        return self._parallel.row_group.size

    def _in_multi_worker_mode(self):
        return self._parallel.mesh.size > 1

    @property
    def should_checkpoint(self):
        """Whether this rank writes checkpoints."""
        return self._parallel.is_chief

    @property
    def should_save_summary(self):
        """Whether this rank writes summaries."""
        return self._parallel.is_chief

    # -- steps ------------------------------------------------------------------------------

    def _use_merge_call(self):
        return False

    @contextlib.contextmanager
    def _running(self, step: KerasStep | None) -> Iterator[None]:
        before = getattr(self._local, "step", None)
        self._local.step = step
        try:
            yield
        finally:
            self._local.step = before

    def _call_for_each_replica(self, fn, args, kwargs):
        step = getattr(self._local, "step", None)
        group = self._parallel.token_group
        tokens = None
        if group.size > 1:
            from tfdist.data.tokens import agreed_split

            # Other functions, and `predict`, may get eager tensors, whose sizes are this rank's alone.
            tokens = agreed_split((args, kwargs), group, sizes_agree=step is not None)
        if step is not None:
            step.tokens = tokens
        context = ReplicaContext(self._parallel, step, tokens)
        self._count_run()
        with tf.device(self._device), context, after_arrival((args, kwargs)):
            if step is None:
                outputs = fn(*args, **kwargs)
            else:
                step.arguments = args
                with keras_step(step, fn, context) as call:
                    step.outputs = call(*args, **kwargs)
                outputs = step.outputs
            for function in context.at_end:
                function()
            return outputs

    @contextlib.contextmanager
    def predicting(self) -> Iterator[None]:
        """Inside, `run` returns the rows of all ranks, in the order of the global batch."""
        self._local.predicting = True
        try:
            yield
        finally:
            self._local.predicting = False

    def _finish_outputs(self, outputs):
        if not getattr(self._local, "predicting", False):
            return outputs
        strategy = self._parallel
        return tf.nest.map_structure(lambda part: _gather_outputs(part, strategy), outputs)

    @property
    def batch_logs_read(self) -> tf.Variable:
        """Whether a callback on any rank reads the logs of each batch: a bool variable."""
        if self._batch_logs_read is None:
            with tf.init_scope():
                self._batch_logs_read = tf.Variable(True, trainable=False, name="batch_logs_read")
        return self._batch_logs_read

    def _count_run(self) -> None:
        # A graph of TensorFlow 1 has sessions with variables of their own.
        if self._parallel.mesh.size == 1 or not outermost_is_eager():
            return
        if self._runs is None:
            with tf.init_scope(), tf.device("/CPU:0"):
                self._runs = tf.Variable(0, trainable=False, dtype=tf.int64, name="runs")
        self._runs.assign_add(1, read_value=False)

    def num_runs(self) -> int:
        """How many calls of `strategy.run` there have been, in graphs too. Eager only."""
        return 0 if self._runs is None else int(self._runs.numpy())

    # -- reductions -------------------------------------------------------------------------

    def _replica_ctx_all_reduce(self, reduce_op, value, options=None):
        context = tf.distribute.get_replica_context()
        return context.all_reduce(reduce_op, value, options)

    def _reduce_to(self, reduce_op, value, destinations, options):
        del destinations, options
        return all_reduce(value, self._parallel.row_group, reduce_op.value.lower())

    def _gather_to_implementation(self, value, destinations, axis, options):
        del destinations, options
        return all_gather(value, self._parallel.row_group, axis, uneven=True)

    def _replica_ctx_update(self, var, fn, args=(), kwargs=None, group=True):
        del group
        return fn(var, *args, **(kwargs or {}))

    # -- data -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def noting(self, first: FirstBatch | None) -> Iterator[None]:
        """Inside, data sets that are distributed note the first of their global batches."""
        self._first_batch = first
        try:
            yield
        finally:
            self._first_batch = None

    def _experimental_distribute_dataset(self, dataset, options):
        del options
        if is_per_rank(dataset):
            return equal_steps(dataset, self._parallel.group())
        if self._in_multi_worker_mode():
            dataset = without_early_reads(dataset)
            if self._first_batch is not None:
                dataset = self._first_batch.noted(dataset)
        group = self._parallel.row_group
        return self._own_tokens(
            shard_batches(dataset, group.size, group.rank, self._parallel.row_shares)
        )

    def _distribute_datasets_from_function(self, dataset_fn, options):
        del options
        group = self._parallel.row_group
        context = tf.distribute.InputContext(
            num_input_pipelines=group.size,
            input_pipeline_id=group.rank,
            num_replicas_in_sync=group.size,
        )
        dataset = mark_per_rank(dataset_fn(context))
        return self._own_tokens(equal_steps(dataset, self._parallel.group()))

    def _own_tokens(self, dataset):
        tokens = self._parallel.token_group
        if tokens.size == 1:
            return dataset
        from tfdist.data.tokens import shard_tokens

        return mark_per_rank(shard_tokens(dataset, tokens.size, tokens.rank))

    def _experimental_distribute_values_from_function(self, value_fn):
        group = self._parallel.row_group
        return value_fn(tf.distribute.experimental.ValueContext(group.rank, group.size))


def _gather_outputs(rows, strategy: DistributedStrategy):
    """This rank's outputs and those of the ranks with other rows and tokens."""
    if not isinstance(rows, tf.Tensor):
        raise NotImplementedError(
            "`predict` joins the ranks' rows of dense tensors. Received: an output of type "
            f"{type(rows).__name__}; convert it in the model, for example with `.to_tensor()`."
        )
    if rows.shape.rank == 0:
        rows = rows[None]
    tokens = strategy.token_group
    if tokens.size > 1:
        rows = all_gather(rows, tokens, 1, uneven=True, name="predictions/tokens")
        rows = TokenSplit(tokens.size, tokens.rank, tf.shape(rows)[1]).in_order(rows)
    # Keras hands `predict` eager batches, so a known shape is this rank's alone.
    return all_gather(rows, strategy.row_group, uneven=True, name="predictions")
