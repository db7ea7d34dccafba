"""`HogwildStrategy`: threads of one process update shared parameters without locks.

Niu et al. 2011, "Hogwild!: a lock-free approach to parallelizing stochastic gradient descent"
(arXiv:1106.5730). Python threads call one traced function at the same time; TensorFlow releases
Python's lock while it runs. The shared state is what TensorFlow can update without a lock:

- rows of a table: `ResourceScatterSub` updates in place under a shared lock, and `ResourceGather`
  reads rows without a copy;
- dense variables: `ResourceApplyGradientDescent(use_locking=False)`. A variable that another thread
  is reading is copied first, and one of two simultaneous updates may be lost.

The operations that Keras' optimizers use otherwise, `assign_sub` and `assign_add` of dense variables,
lock each variable during the update.

Each thread runs its graph itself, operation by operation. TensorFlow's default executor schedules
operations on a pool that all threads share, with which two threads are slower than one. It is kept for
steps with loops or conditions, which wait for the pool. `function_executor_type` is an API of TensorFlow
without a public name.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
from collections.abc import Iterator

import keras
import tensorflow as tf
from tensorflow.python.eager.context import function_executor_type

from tfdist.addons.asynchronous.strategies import (
    AsynchronousExtended,
    AsynchronousStrategy,
    overridden,
)
from tfdist.addons.asynchronous.table_lookups import looking_up, tables
from tfdist.strategies import keras_patches
from tfdist.utils import checks

_MOST_THREADS = 1024
#: The steps in one call of TensorFlow, if there are enough: each call has overhead and holds Python's lock.
_UNROLLED = 4
#: Operations that run a nested graph: they wait for threads of the pool.
_CONTROL_FLOW = {"Case", "If", "StatelessCase", "StatelessIf", "StatelessWhile", "While"} | {
    "PartitionedCall",
    "StatefulPartitionedCall",
}


class HogwildStrategy(AsynchronousStrategy):
    """Threads of one process that update one set of parameters without locks.

    It is meant for sparse problems, where two steps seldom update the same rows. Each thread repeatedly
    reads a batch and applies an update. Dense models run too, but threads overwrite each other's
    updates; see tfdist/addons/asynchronous/README.md.

    ```python
    tf.config.threading.set_intra_op_parallelism_threads(1)
    strategy = tfdist.addons.asynchronous.HogwildStrategy(threads=4)
    with strategy.scope():
        model = keras.Sequential([keras.layers.Embedding(1_000_000, 1), ...])
        model.compile("sgd", "binary_crossentropy", steps_per_execution=64)
    model.fit(ids, labels, batch_size=256, epochs=3)
    ```

    The threads share the steps of an execution, 64 here, and synchronize after them. `fit` rounds
    `steps_per_execution` up to a multiple of the number of threads.

    Args:
        threads: The number of threads. 1 trains as plain Keras does in a single process.

    Raises:
        ValueError: `threads` is out of range.
    """

    def __init__(self, threads: int = 2):
        self._num_threads = checks.integer("threads", threads, minimum=1, maximum=_MOST_THREADS)
        super().__init__(AsynchronousExtended(self))
        self._has_control_flow = False
        self.thread_pool = concurrent.futures.ThreadPoolExecutor(
            self._num_threads, "tfdist-hogwild"
        )
        keras_patches.install()

    @property
    def threads(self) -> int:
        """The number of threads that run steps."""
        return self._num_threads

    @contextlib.contextmanager
    def around(self, fit):
        """See `FitHook.around`."""
        model = fit.model
        if self.threads == 1 or fit.kind != "fit":
            yield
            return
        _check_model(model)
        steps = model.steps_per_execution
        if not isinstance(model.train_function, _InThreads):
            model.train_function = None

        def make_train_function(force=False):
            if force or model.train_function is None:
                model.train_function = _InThreads(self, model)

        try:
            model.steps_per_execution = -(-steps // self.threads) * self.threads
            with overridden(model, "make_train_function", make_train_function):
                yield
        finally:
            model.steps_per_execution = steps

    def train_step(self, model, step, data):
        """See `AsynchronousStrategy.train_step`."""
        if self.threads == 1:
            with looking_up(tables(model)):
                return step(*data)
        with _without_locks(model.optimizer), _exact_metrics(model), looking_up(tables(model)):
            logs = step(*data)
        if not tf.executing_eagerly():
            operations = tf.compat.v1.get_default_graph().get_operations()
            self._has_control_flow |= any(each.type in _CONTROL_FLOW for each in operations)
        return logs

    def __repr__(self) -> str:
        return f"HogwildStrategy(threads={self.threads})"


class _InThreads:
    """A train function that runs steps in several threads, with batches of one iterator.

    Args:
        strategy: The strategy.
        model: The model.
    """

    def __init__(self, strategy: HogwildStrategy, model: keras.Model):
        self._strategy, self._model = strategy, model
        self._one_step = tf.function(self._step, autograph=False, reduce_retracing=True)
        self._traced: dict = {}

    def __call__(self, iterator):
        if not isinstance(iterator, tf.data.Iterator):  # `train_on_batch`.
            return self._one_step(next(iterator))
        threads = self._strategy.threads
        steps = self._model.steps_per_execution // threads
        functions = self._trace(iterator, min(steps, _UNROLLED))
        before = int(self._model.optimizer.iterations.value)
        pool = self._strategy.thread_pool
        calls = [pool.submit(self._run, iterator, steps, functions) for _ in range(threads)]
        ends = [call.result() for call in calls]
        for logs in ends:
            if logs is not None:
                return logs
        if int(self._model.optimizer.iterations.value) == before:
            raise StopIteration
        return self._model.get_metrics_result()

    def _trace(self, iterator, most: int) -> dict:
        """Functions of one step and of `most` steps, by the number of steps."""
        key = str(iterator.element_spec), most
        if key not in self._traced:
            self._traced[key] = {
                steps: self._steps(steps).get_concrete_function(iterator) for steps in {1, most}
            }
        return self._traced[key]

    def _step(self, batch):
        return self._strategy.run(self._model.train_step, args=(batch,))

    def _steps(self, number: int):
        """A function of `number` steps. If the data ends early, it runs the steps that have a batch."""
        return tf.function(lambda iterator: self._unrolled(iterator, number), autograph=False)

    def _unrolled(self, iterator, number: int):
        graph = tf.compat.v1.get_default_graph()
        logs, last = None, 0
        for _ in range(number):
            made = graph.get_operations()[last:]
            changes = [each for each in made if tf.resource in [x.dtype for x in each.inputs]]
            with tf.control_dependencies(changes):
                batch = iterator.get_next()
            last = len(graph.get_operations())
            with tf.control_dependencies(tf.nest.flatten(batch, expand_composites=True)):
                logs = self._step(batch)
        return logs

    def _run(self, iterator, steps: int, functions: dict):
        """Runs steps while there is data; returns the logs of the last, or None at the end of the data."""
        executor = "" if self._strategy._has_control_flow else "SINGLE_THREADED_EXECUTOR"
        most, logs = max(functions), None
        with function_executor_type(executor):
            try:
                while steps > 0:
                    size = most if steps >= most else 1
                    logs = functions[size](iterator)
                    steps -= size
            except tf.errors.OutOfRangeError:
                return None
        return logs


def _check_model(model: keras.Model) -> None:
    if model.run_eagerly or model.jit_compile:
        raise ValueError(
            "HogwildStrategy requires graph execution without XLA. Received: compile("
            f"run_eagerly={model.run_eagerly}, jit_compile={model.jit_compile}). Remove both."
        )
    if isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer):
        raise NotImplementedError(
            "HogwildStrategy does not support loss scaling. Received: the dtype policy "
            "mixed_float16. Use mixed_bfloat16, which does not need it."
        )


@contextlib.contextmanager
def _without_locks(optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    """Makes the optimizer's additions to floating-point variables lock-free in its context."""

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
        # Keras reads, adds and assigns: threads would lose counts.
        overridden(count, "assign_add", lambda value: count.value.assign_add(value)),
    ):
        yield


@contextlib.contextmanager
def _exact_metrics(model: keras.Model) -> Iterator[None]:
    """Makes metrics add to their variables atomically: by default they read and assign, and lose counts."""

    def adding(metric):
        update = metric.update_state

        def update_state(*args, **kwargs):
            variables = metric.variables
            before = [variable.value.read_value() for variable in variables]
            mapping = list(zip(variables, before, strict=True))
            with keras.StatelessScope(state_mapping=mapping) as scope:
                update(*args, **kwargs)
            for variable, then in mapping:
                now = scope.get_current_value(variable)
                if now is not None and now is not then:
                    variable.value.assign_add(tf.cast(now, then.dtype) - then)

        return update_state

    with contextlib.ExitStack() as stack:
        for metric in model.metrics:
            stack.enter_context(overridden(metric, "update_state", adding(metric)))
        yield
