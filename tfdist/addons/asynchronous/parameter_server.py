"""`ParameterServerStrategy`: asynchronous SGD with parameters on servers.

Keras 3 does not support `tf.distribute.ParameterServerStrategy` and its coordinator. So each worker
runs its own `fit` on its own batches, and each step reads parameters from the servers and sends
gradients to them: Downpour SGD (Dean et al. 2012, "Large scale distributed deep networks"), on
TensorFlow's own runtime; `tfdist.addons.asynchronous.connection` describes the parts used and why.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import sys
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from tfdist.addons.asynchronous.batches import PATCHES, shard_whole_batches, shard_whole_steps
from tfdist.addons.asynchronous.cluster import cluster_from_environment, local_cluster
from tfdist.addons.asynchronous.hosted_model import HostedModel
from tfdist.addons.asynchronous.parameter_server_checks import check_backup, check_model
from tfdist.addons.asynchronous.parameter_server_fit import First, Last, catching_up
from tfdist.addons.asynchronous.serving import serve
from tfdist.addons.asynchronous.store import ParameterStore
from tfdist.addons.asynchronous.strategies import (
    AsynchronousExtended,
    AsynchronousStrategy,
    overridden,
)
from tfdist.addons.asynchronous.table_lookups import looking_up, tables
from tfdist.backend.keras.patching import apply_patches
from tfdist.backend.keras.private import all_layers
from tfdist.callbacks import Checkpointer
from tfdist.data.sharding import mark_per_rank
from tfdist.strategies import keras_patches
from tfdist.utils import checks

_MOST_SERVERS = 1024
_WATCHDOG_SECONDS = 600.0

#: Callbacks that only write, which the chief does.
_WRITERS = (
    keras.callbacks.BackupAndRestore,
    keras.callbacks.CSVLogger,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.ProgbarLogger,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
)


class ParameterServerStrategy(AsynchronousStrategy):
    """Workers that do not wait for each other, and servers that hold parameters and optimizer state.

    Each worker runs this script. Worker 0 is the chief: all workers start from its initial parameters,
    and only the chief writes files.

    ```python
    strategy = tfdist.addons.asynchronous.ParameterServerStrategy(max_staleness=4)
    with strategy.scope():
        model = keras.Sequential([...])
        model.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy"])
    model.fit(x, y, batch_size=64, epochs=3)  # 64 is the batch of one worker's update
    ```

    Of the batches of an epoch each worker reads every W-th, W being the number of workers. The logs
    of `fit` are those of this worker's batches, with `staleness_mean` and `staleness_max` of its
    updates and with the steps of each worker. See tfdist/addons/asynchronous/README.md.

    In a process that TF_CONFIG lists as a `ps` task, creating the strategy runs the server, and ends
    the process when the workers have ended.

    Args:
        servers: The number of servers in a process that was started without a launcher and is their
            only worker. None for the servers of the launcher, or else one.
        max_staleness: The number of steps that a worker may be ahead of the slowest before it waits.
            None for no bound: fully asynchronous. 0 for lockstep.
        delay_compensation: lambda of DC-ASGD, which corrects a gradient g for the updates since its
            parameters were read: g + lambda g g (w_now - w_then); 0 for none. The servers then keep a
            copy of the parameters for each worker.
        backup_ranks: b of synchronous training with backup workers: a step uses the first W - b of the
            W workers' gradients, and applies their mean as one update. A later gradient is dropped, and
            its worker skips the batches of the steps that were made without it. This changes the
            results: the gradients used depend on the speed of the workers. None for asynchronous
            updates.
        speculative: With `backup_ranks=b`: whether the last b workers have no batches, but redo those
            of workers that are slow or have ended. A step uses a gradient of each batch of the
            first W - b workers, whichever comes first. The results are those of these workers alone.
        worker_timeout_seconds: The time without a heartbeat after which the others continue without a
            worker.
        watchdog_seconds: The time that a server has to respond, and workers have to start.

    Raises:
        ValueError: An argument is out of range, or contradicts TF_CONFIG or another argument.
        ParameterServerError: The servers or the chief cannot be reached.
    """

    def __init__(
        self,
        servers: int | None = None,
        max_staleness: int | None = None,
        *,
        delay_compensation: float = 0.0,
        backup_ranks: int | None = None,
        speculative: bool = False,
        worker_timeout_seconds: float = 30.0,
        watchdog_seconds: float = _WATCHDOG_SECONDS,
    ):
        checks.integer("servers", servers, minimum=1, maximum=_MOST_SERVERS, optional=True)
        checks.integer("max_staleness", max_staleness, minimum=0, optional=True)
        checks.number("delay_compensation", delay_compensation, minimum=0)
        checks.integer("backup_ranks", backup_ranks, minimum=0, optional=True)
        checks.boolean("speculative", speculative)
        checks.number(
            "worker_timeout_seconds", worker_timeout_seconds, minimum=2, maximum=checks.YEAR_SECONDS
        )
        checks.number("watchdog_seconds", watchdog_seconds, above=0, maximum=checks.YEAR_SECONDS)
        cluster = cluster_from_environment()
        if cluster is not None and servers not in (None, len(cluster.servers)):
            raise ValueError(
                "`servers` must be the number of servers of TF_CONFIG. Received: "
                f"servers={servers}, and {len(cluster.servers)} server(s) in TF_CONFIG. Remove "
                "`servers`, or start the same number of servers with `tfdist-run --ps=`."
            )
        if cluster is not None and cluster.job == "ps":
            serve(cluster, watchdog_seconds, worker_timeout_seconds)
            sys.exit(0)
        num_workers = 1 if cluster is None else cluster.num_workers
        check_backup(backup_ranks, speculative, num_workers, max_staleness, delay_compensation)
        super().__init__(_ParameterServerExtended(self))
        self._cluster = cluster
        self._num_servers = (servers or 1) if cluster is None else len(cluster.servers)
        self._open_store = functools.partial(
            ParameterStore,
            max_staleness=max_staleness,
            delay_compensation=float(delay_compensation),
            silent_seconds=worker_timeout_seconds,
            watchdog_seconds=watchdog_seconds,
            backup_ranks=backup_ranks,
            speculative=speculative,
        )
        #: The number of workers that have batches, where the others redo those.
        self._shards = num_workers - (backup_ranks or 0) if speculative else None
        self._own_servers: list[tf.distribute.Server] = []
        self._hosted: HostedModel | None = None
        self._wants_own_batches = False
        keras_patches.install()
        apply_patches(PATCHES)
        logging.info(
            "tfdist: worker %d of %d, with %d parameter server(s).",
            self.worker_index,
            self.num_workers,
            self._num_servers,
        )
        if cluster is not None:
            # The other workers wait for this one, so it joins now.
            _ = self._store

    @functools.cached_property
    def _store(self) -> ParameterStore:
        """The servers and their state. A single process starts its servers here, in the first `fit`."""
        cluster = self._cluster
        if cluster is None:
            cluster, self._own_servers = local_cluster(self._num_servers)
        store = self._open_store(cluster)
        atexit.register(store.close)
        return store

    @property
    def is_chief(self) -> bool:
        """Whether this worker initializes the parameters and writes files."""
        return self.worker_index == 0

    @property
    def num_workers(self) -> int:
        """The number of workers that were started."""
        return 1 if self._cluster is None else self._cluster.num_workers

    @property
    def worker_index(self) -> int:
        """The index of this worker."""
        return 0 if self._cluster is None else self._cluster.index

    def applied_updates(self) -> np.ndarray:
        """The number of updates that each server has applied from each worker: [servers, workers].

        The counts are of the model that was trained last, since its `fit` began. With `backup_ranks`
        they are the gradients that arrived in time.

        Raises:
            RuntimeError: No model has been trained yet.
        """
        return self._trained().updates()

    def dropped_gradients(self) -> np.ndarray:
        """The number of gradients of each worker that each server dropped: [servers, workers].

        With `backup_ranks`, a gradient that arrives too late is dropped. As for `applied_updates`, the
        counts are of the model that was trained last.

        Raises:
            RuntimeError: No model has been trained yet.
        """
        return self._trained().dropped()

    def redone_gradients(self) -> np.ndarray:
        """The number of gradients of each worker's batches from a backup: [servers, workers].

        With `speculative=True`. As for `applied_updates`, the counts are of the model that was trained
        last.

        Raises:
            RuntimeError: No model has been trained yet.
        """
        return self._trained().redone()

    def _trained(self) -> HostedModel:
        if self._hosted is None:
            raise RuntimeError(
                "The counts require a trained model. Received: a strategy without one. Call `fit` first."
            )
        return self._hosted

    # -- fit --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def around(self, fit):
        """See `FitHook.around`."""
        model, callbacks = fit.model, fit.callbacks
        if fit.kind != "fit":
            self.before_reading(model)
            yield
            return
        check_model(model, self._num_servers, speculative=self._shards is not None)
        if any(isinstance(each, Checkpointer) for each in callbacks):
            raise ValueError(
                "Checkpointer is not supported with ParameterServerStrategy: workers are not at the "
                "same step. Received: a Checkpointer. Use keras.callbacks.BackupAndRestore."
            )
        if not self.is_chief:
            callbacks = [each for each in callbacks if not isinstance(each, _WRITERS)]
            fit.arguments["verbose"] = 0
        self._store.begin_fit()
        fit.arguments["callbacks"] = [First(self), *callbacks, Last(self)]
        self._wants_own_batches = True
        try:
            with catching_up(model, self._store):
                yield
        finally:
            self._wants_own_batches = False
            self._store.stop_fit()

    def train_step(self, model, step, data):
        """See `AsynchronousStrategy.train_step`."""
        if not self._store.is_fitting:
            raise NotImplementedError(
                "Parameter servers require `fit`, which sends them a model's parameters. Received: a "
                f"step of {model.name!r} outside `fit`. Use `fit` in place of `train_on_batch`."
            )
        hosted = self._host(model)
        layers = _only_looked_up(model, step, data)
        looked_up = {id(layer.embeddings) for layer in layers}
        places = {id(variable): place for place, variable in enumerate(hosted.parameters)}
        whole = [i for i, v in enumerate(hosted.variables) if id(v) not in looked_up]
        self._store.read_op(hosted, whole)

        def read_rows(table, ids):
            self._store.read_rows_op(hosted, places[id(table)], ids)

        def apply(grads, trainable_variables=None):
            variables = hosted.parameters if trainable_variables is None else trainable_variables
            self._store.write_op(hosted, list(grads), list(variables))

        with overridden(model.optimizer, "apply", apply), looking_up(layers, read_rows):
            return step(*data)

    def explain(self, fit, error):
        """See `FitHook.explain`: the error that ended the connection to the servers."""
        return self._store.failure if isinstance(error, tf.errors.OpError) else None

    def before_reading(self, model):
        """Copies the servers' values to the model before it is evaluated or predicts."""
        if self._hosted is not None and self._hosted.model is model and self._store.is_fitting:
            self._store.refresh(self._hosted, with_optimizer=False)

    def _host(self, model) -> HostedModel:
        unbuilt = [layer.path for layer in all_layers(model) if not layer.built]
        if unbuilt or not model.optimizer.built:
            raise ValueError(
                "The model must be built before its first step. Received: the model "
                f"{model.name!r}, of which {', '.join(unbuilt[:3]) or 'the optimizer'} has no "
                "variables yet. Call the model on a batch, or give it an `Input`, before `fit`."
            )
        self._hosted = self._store.host(model, _states(model))
        return self._hosted

    def __repr__(self) -> str:
        return (
            f"ParameterServerStrategy({self._num_servers} server(s), worker "
            f"{self.worker_index} of {self.num_workers})"
        )


def _only_looked_up(model: keras.Model, step: Callable, data: tuple) -> list:
    """The Embedding layers of whose tables a step reads only rows, as its gradients show."""
    layers = tables(model)
    if not layers or tf.executing_eagerly():
        return []
    sparse: set[int] = set()

    def apply(grads, trainable_variables=None):
        variables = (
            model.trainable_variables if trainable_variables is None else trainable_variables
        )
        for gradient, variable in zip(grads, variables, strict=True):
            if isinstance(gradient, tf.IndexedSlices):
                sparse.add(id(variable))

    # This trace is discarded.
    with overridden(model.optimizer, "apply", apply), looking_up(layers):
        tf.function(step, autograph=False).get_concrete_function(*data)
    return [layer for layer in layers if id(layer.embeddings) in sparse]


def _states(model: keras.Model) -> list[keras.Variable]:
    """Variables that the forward pass changes, such as moving averages; not those of frozen layers."""
    frozen = {
        id(variable)
        for layer in all_layers(model)
        if not layer.trainable
        for variable in layer.variables
    }
    return [
        variable
        for variable in model.non_trainable_variables
        if tf.as_dtype(variable.dtype).is_floating and id(variable) not in frozen
    ]


class _ParameterServerExtended(AsynchronousExtended):
    """Keeps variables as this worker's copies, and shards datasets of `fit` by whole batches."""

    def __init__(self, strategy: ParameterServerStrategy):
        super().__init__(strategy)
        self._parameter_servers = strategy

    def _in_multi_worker_mode(self):
        return self._parameter_servers.num_workers > 1

    @property
    def should_checkpoint(self):
        return self._parameter_servers.is_chief

    @property
    def should_save_summary(self):
        return self._parameter_servers.is_chief

    def _experimental_distribute_dataset(self, dataset, options):
        del options
        strategy = self._parameter_servers
        if not strategy._wants_own_batches:
            return dataset
        strategy._wants_own_batches = False
        if strategy._shards is None:
            return shard_whole_batches(dataset, strategy.num_workers, strategy.worker_index)
        has_own = strategy.worker_index < strategy._shards
        return shard_whole_steps(
            dataset, strategy._shards, strategy.worker_index if has_own else None
        )

    def _distribute_datasets_from_function(self, dataset_fn, options):
        del options
        strategy = self._parameter_servers
        context = tf.distribute.InputContext(
            num_input_pipelines=strategy.num_workers,
            input_pipeline_id=strategy.worker_index,
            num_replicas_in_sync=1,
        )
        return mark_per_rank(dataset_fn(context))
