"""The `StrategyExtended` of `ParallelStrategy`: replica context, reductions and datasets."""

from __future__ import annotations

import contextlib
import functools
import threading

import tensorflow as tf
from tensorflow.python.distribute.one_device_strategy import OneDeviceExtended

from tfdist.backend import devices
from tfdist.backend.graph.arrival import after_arrival
from tfdist.backend.graph.compiling import excluded
from tfdist.collectives import all_gather, all_reduce
from tfdist.collectives.flight_counts import outermost_is_eager
from tfdist.data.first_batch import FirstBatch
from tfdist.data.indexed import indexed_rows
from tfdist.data.on_gpu import copied_ahead
from tfdist.data.read_ahead import without_early_reads
from tfdist.data.sharding import equal_steps, is_per_rank, mark_per_rank, shard_batches
from tfdist.step.context import DistributedStrategy, ReplicaContext
from tfdist.step.keras_step import KerasStep
from tfdist.step.token_split import TokenSplit
from tfdist.strategies.keras_patches.steps import keras_step
from tfdist.utils.temporary import attributes_set


class _Local(threading.local):
    """The state of a thread.

    Attributes:
        step: The Keras step that runs.
        predicting: Whether `predict` runs.
    """

    step: KerasStep | None = None
    predicting: bool = False


class ParallelExtended(OneDeviceExtended):
    """One device in this process, and an engine for collectives with the other ranks.

    TensorFlow's one-device strategy already uses plain variables and tensors. This class overrides all
    methods that depend on the other ranks.
    """

    def __init__(self, strategy: DistributedStrategy):
        # For tensors of TensorFlow, which starts its devices here.
        tf.config.list_logical_devices()
        super().__init__(strategy, devices.device_name())
        self._parallel = strategy
        self._local = _Local()
        self._runs: tf.Variable | None = None
        self._first_batch: FirstBatch | None = None

    @property
    def _num_replicas_in_sync(self):
        return self._parallel.row_group.size

    def _in_multi_worker_mode(self):
        return self._parallel.mesh.size > 1

    @property
    def should_checkpoint(self):
        """Whether this rank writes checkpoints and summaries."""
        return self._parallel.is_chief

    should_save_summary = should_checkpoint

    def _use_merge_call(self):
        return False

    def _running(self, step: KerasStep | None) -> contextlib.AbstractContextManager[None]:
        return attributes_set(self._local, step=step)

    def _create_variable(self, next_creator, **kwargs):
        """Creates a variable on the device of the rank, or on the host where `tf.device` names it."""
        if devices.has_gpu() and devices.names_host():
            return next_creator(**kwargs)
        return super()._create_variable(next_creator, **kwargs)

    def _call_for_each_replica(self, fn, args, kwargs):
        step = self._local.step
        group = self._parallel.token_group
        tokens = None
        if group.size > 1:
            from tfdist.data.tokens import agreed_split

            # Other functions, and `predict`, may receive eager tensors, whose sizes differ between ranks.
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

    def predicting(self) -> contextlib.AbstractContextManager[None]:
        """A context in which `run` returns the rows of all ranks, in the order of the global batch."""
        return attributes_set(self._local, predicting=True)

    def _finish_outputs(self, outputs):
        if not self._local.predicting:
            return outputs
        return tf.nest.map_structure(lambda part: _gather_outputs(part, self._parallel), outputs)

    @functools.cached_property
    def batch_logs_read(self) -> tf.Variable:
        """Whether a callback on any rank reads the logs of each batch: a bool variable."""
        with tf.init_scope(), devices.on_host():
            return tf.Variable(True, trainable=False, name="batch_logs_read")

    def _count_run(self) -> None:
        # A graph of TensorFlow 1 has sessions with separate variables.
        if self._parallel.mesh.size == 1 or not outermost_is_eager():
            return
        if self._runs is None:
            with tf.init_scope(), tf.device("/CPU:0"):
                self._runs = tf.Variable(0, trainable=False, dtype=tf.int64, name="runs")
        with excluded():
            self._runs.assign_add(1, read_value=False)

    def num_runs(self) -> int:
        """The number of calls of `strategy.run`, including those in graphs. Eager only."""
        return 0 if self._runs is None else int(self._runs.numpy())

    def _replica_ctx_all_reduce(self, reduce_op, value, options=None):
        return tf.distribute.get_replica_context().all_reduce(reduce_op, value, options)

    def _reduce_to(self, reduce_op, value, destinations, options):
        return all_reduce(value, self._parallel.row_group, reduce_op.value.lower())

    def _gather_to_implementation(self, value, destinations, axis, options):
        return all_gather(value, self._parallel.row_group, axis, uneven=True)

    def _replica_ctx_update(self, var, fn, args=(), kwargs=None, group=True):
        return fn(var, *args, **(kwargs or {}))

    def recording(self, first: FirstBatch | None) -> contextlib.AbstractContextManager[None]:
        """A context in which distributed datasets record their first global batch."""
        return attributes_set(self, _first_batch=first)

    def _experimental_distribute_dataset(self, dataset, options):
        if is_per_rank(dataset):
            return equal_steps(dataset, self._parallel.group())
        if self._in_multi_worker_mode():
            rows = indexed_rows(dataset)
            batches = without_early_reads(dataset if rows is None else rows.indices)
            if self._first_batch is not None:
                batches = self._first_batch.recorded(batches)
            dataset = batches if rows is None else rows.over(batches).dataset()
        group, shares = self._parallel.row_group, self._parallel.row_shares
        own = self._own_tokens(shard_batches(dataset, group.size, group.rank, shares))
        # Measured shares are read when a step requests its batch.
        return own if shares is not None else copied_ahead(own, self._device)

    def _distribute_datasets_from_function(self, dataset_fn, options):
        group = self._parallel.row_group
        context = tf.distribute.InputContext(group.size, group.rank, group.size)
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
    """The outputs of this rank and of the ranks with different rows and tokens."""
    if not isinstance(rows, tf.Tensor):
        raise NotImplementedError(
            "`predict` requires dense output tensors, whose rows it gathers from all ranks. Received: an "
            f"output of type {type(rows).__name__}. Convert it in the model, for example with `.to_tensor()`."
        )
    if rows.shape.rank == 0:
        rows = rows[None]
    tokens = strategy.token_group
    if tokens.size > 1:
        rows = all_gather(rows, tokens, 1, uneven=True, name="predictions/tokens")
        rows = TokenSplit(tokens.size, tokens.rank, tf.shape(rows)[1]).in_order(rows)
    # Keras passes eager batches to `predict`, whose shapes differ between ranks.
    return all_gather(rows, strategy.row_group, uneven=True, name="predictions")
