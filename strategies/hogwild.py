"""`HogwildStrategy`: threads of one process update shared parameters without locks.

Niu et al. 2011, "Hogwild!: a lock-free approach to parallelizing stochastic gradient descent"
(arXiv:1106.5730). Python threads call one traced function at the same time; TensorFlow lets go of
Python's lock while it runs. What is shared is what TensorFlow has without a lock:

- rows of a table: `ResourceScatterSub` updates in place under a lock that all share, and
  `ResourceGather` reads rows without a copy;
- dense variables: `ResourceApplyGradientDescent(use_locking=False)`. A variable that another thread
  reads at this moment is copied first, and two updates at one time may lose one of both.

What Keras' optimizers do otherwise, `assign_sub` and `assign_add` of dense variables, locks each
variable for the time of the update.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
from collections.abc import Iterator

import keras
import tensorflow as tf

from tfdist import checks
from tfdist.strategies import keras_patches
from tfdist.strategies.asynchronous import (
    AsynchronousExtended,
    AsynchronousStrategy,
    overridden,
)
from tfdist.strategies.table_lookups import looking_up, tables

__all__ = ["HogwildStrategy"]

_MOST_THREADS = 1024
_sections = itertools.count()


class HogwildStrategy(AsynchronousStrategy):
    """One process, some threads, one set of parameters, no locks.

    For sparse problems, where two steps seldom touch the same rows. Each thread takes the next batch
    and makes an update with it. On dense models it runs, but threads overwrite each other's updates;
    see docs/asynchronous.md.

    ```python
    tf.config.threading.set_intra_op_parallelism_threads(1)
    strategy = tfdist.strategies.HogwildStrategy(threads=4)
    with strategy.scope():
        model = keras.Sequential([keras.layers.Embedding(1_000_000, 1), ...])
        model.compile("sgd", "binary_crossentropy", steps_per_execution=64)
    model.fit(ids, labels, batch_size=256, epochs=3)
    ```

    The threads share the steps of an execution, 64 here, and wait for each other after these. A number
    that they do not divide is rounded up in `fit`.

    Args:
        threads: How many threads. 1 is a single process of plain Keras.

    Raises:
        ValueError: The number is out of its range.
    """

    def __init__(self, threads: int = 2):
        self._num_threads = checks.integer("threads", threads, minimum=1, maximum=_MOST_THREADS)
        super().__init__(AsynchronousExtended(self))
        keras_patches.install()

    @property
    def threads(self) -> int:
        """How many threads make steps."""
        return self._num_threads

    def fit(self, call, arguments):
        """See `AsynchronousStrategy.fit`."""
        model = arguments["self"]
        if self.threads == 1:
            return call(arguments)
        _check_model(model)
        function, steps = model.train_function, model.steps_per_execution
        make = type(model).make_train_function
        with concurrent.futures.ThreadPoolExecutor(self.threads, "tfdist-hogwild") as pool:

            def make_train_function(force=False):
                make(model, force=True)
                model.train_function = _InThreads(model, self.threads, pool)

            try:
                model.steps_per_execution = -(-steps // self.threads) * self.threads
                with overridden(model, "make_train_function", make_train_function):
                    return call(arguments)
            finally:
                model.train_function, model.steps_per_execution = function, steps

    def train_step(self, model, step, data):
        """See `AsynchronousStrategy.train_step`."""
        if self.threads == 1:
            with looking_up(tables(model)):
                return step(*data)
        with _without_locks(model.optimizer), _exact_metrics(model), looking_up(tables(model)):
            return step(*data)

    def __repr__(self) -> str:
        return f"HogwildStrategy(threads={self.threads})"


class _InThreads:
    """A model's train function, that threads call at the same time on one iterator.

    Args:
        model: The model, which has its train function.
        threads: How many threads.
        pool: The threads.
    """

    def __init__(self, model: keras.Model, threads: int, pool: concurrent.futures.Executor):
        self._model, self._threads, self._pool = model, threads, pool
        self._function = model.train_function
        self._is_traced = False

    def __call__(self, iterator):
        steps = self._model.steps_per_execution
        # Keras' function asks the model when it is traced.
        self._model.steps_per_execution = steps // self._threads
        try:
            if self._is_traced:
                calls = [self._pool.submit(self._run, iterator) for _ in range(self._threads)]
                ends = [call.result() for call in calls]
            else:
                # One at a time, so that it is traced once.
                ends = [self._run(iterator) for _ in range(self._threads)]
                self._is_traced = True
        finally:
            self._model.steps_per_execution = steps
        logs = [end for end in ends if end is not None]
        if not logs:
            raise StopIteration
        return logs[-1]

    def _run(self, iterator):
        """What a call returned; None where the data has ended."""
        if self._model.steps_per_execution == 1:
            # A graph that draws a batch where there is none has counted its update by then.
            batch = iterator.get_next_as_optional()
            return self._function([batch.get_value()]) if batch.has_value() else None
        try:
            return self._function(iterator)
        except StopIteration:
            return None


def _check_model(model: keras.Model) -> None:
    if model.run_eagerly or model.jit_compile:
        raise ValueError(
            "Threads share the operations of a graph, not of Python or XLA. Received: compile("
            f"run_eagerly={model.run_eagerly}, jit_compile={model.jit_compile}). Leave both out."
        )
    if isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer):
        raise NotImplementedError(
            "Threads without locks do not agree on a loss scale. Received: the dtype policy "
            "mixed_float16. Take mixed_bfloat16, which needs none."
        )


@contextlib.contextmanager
def _without_locks(optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    """Inside, what the optimizer adds to floating-point variables takes no lock."""

    def adding(name: str, sign: float):
        original = getattr(optimizer, name)

        def add(variable, value):
            held = variable.value if isinstance(variable, keras.Variable) else variable
            if not held.dtype.is_floating or isinstance(value, tf.IndexedSlices):
                return original(variable, value)
            tf.raw_ops.ResourceApplyGradientDescent(
                var=held.handle,
                alpha=tf.constant(-sign, held.dtype),
                delta=tf.broadcast_to(tf.cast(value, held.dtype), held.shape),
                use_locking=False,
            )
            return None

        return add

    count = optimizer.iterations
    with (
        overridden(optimizer, "assign_add", adding("assign_add", 1.0)),
        overridden(optimizer, "assign_sub", adding("assign_sub", -1.0)),
        # Keras' own reads, adds, and assigns: threads would lose count.
        overridden(count, "assign_add", lambda value: count.value.assign_add(value)),
    ):
        yield


@contextlib.contextmanager
def _exact_metrics(model: keras.Model) -> Iterator[None]:
    """Inside, metrics are updated by one thread at a time: they read and then assign."""
    with tf.init_scope():
        mutex = tf.raw_ops.MutexV2(container="", shared_name=f"tfdist/metrics/{next(_sections)}")

    def one_at_a_time(metric):
        update = metric.update_state

        def update_state(*args, **kwargs):
            lock = tf.raw_ops.MutexLock(mutex=mutex)
            with tf.control_dependencies([lock]):
                update(*args, **kwargs)
                # Reads after the update, which the end of the lock can wait for.
                ends = [variable.value.read_value() for variable in metric.variables]
            with tf.control_dependencies(ends):
                tf.raw_ops.ConsumeMutexLock(mutex_lock=lock)

        return update_state

    with contextlib.ExitStack() as stack:
        for metric in model.metrics:
            stack.enter_context(overridden(metric, "update_state", one_at_a_time(metric)))
        yield
