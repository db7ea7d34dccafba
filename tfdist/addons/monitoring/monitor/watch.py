"""A model whose training steps are stamped while `fit` runs, and the rows that the stamps yield.

Under a strategy of tfdist the steps of a `fit` are stamped by a hook (`Monitor.around_step`). Elsewhere
`Watch` replaces the model's `train_step` and its optimizers' `apply` during a `fit` by wrappers that
call them and add stamps.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import time
import types
import weakref
from collections.abc import Callable, Iterator

import keras
import tensorflow as tf

from tfdist.addons.monitoring.monitor.flops import Flops, count_flops
from tfdist.addons.monitoring.monitor.input_waits import note_waits, watch_iterators
from tfdist.addons.monitoring.monitor.train_calls import watch_calls
from tfdist.backend.clock.rows import Columns, Row, RowBuffer
from tfdist.backend.clock.stamps import Cell, Column, Stamps, current_stamps, stamping, updating
from tfdist.gradients.norms import square_of
from tfdist.step.context import strategy_of


@dataclasses.dataclass
class Execution:
    """A call of the training function: `steps_per_execution` steps.

    Attributes:
        begin: When it was called, in seconds since the epoch.
        end: When it returned.
        close: When the next one began, or the epoch ended; None before that.
        traced: Whether a graph was traced inside, which takes seconds.
        rows: The rows that its steps have recorded, in order.
    """

    begin: float
    end: float
    close: float | None = None
    traced: bool = False
    rows: list[Row] = dataclasses.field(default_factory=list)


#: The installed watch of each model.
_installed: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


class _Program(RowBuffer):
    """A graph of the training step: the buffer of its rows, and its number of operations."""

    def __init__(self, columns: Columns, flops: Flops | None):
        super().__init__(columns)
        self.flops = flops


class Watch:
    """Watches the training steps of a model.

    Args:
        model: A compiled model.

    Attributes:
        executions: The calls since the last `take`.
        in_graph: Whether steps are stamped inside. They are not under XLA, nor under a strategy that is
            neither TensorFlow's default nor one of tfdist's ranks.
    """

    def __init__(self, model: keras.Model):
        self.model = model
        self._between: Callable[[], None] = lambda: None
        strategy = model.distribute_strategy
        known = strategy_of(model) is not None or not tf.distribute.has_strategy()
        plain = type(strategy) is type(tf.distribute.get_strategy()) or strategy_of(model)
        self.in_graph = bool(known and plain and not model.jit_compile)
        self._wants_norm, self._begin = Cell(), Cell()
        self._programs: list[_Program] = []
        self._eager_rows: list[Row] = []
        self.executions: list[Execution] = []
        self._plain: Callable | None = None
        self._stamped: Callable | None = None
        self._made = self._made_before = 0
        self._begun = 0.0
        self._is_stamped = False
        self._flops: dict[tuple, Flops] = {}
        self._spec: list | None = None
        self._removals: list[Callable[[], None]] = []

    def restart(self) -> None:
        """Discards the calls that were not taken."""
        self.executions = []
        self._eager_rows = []
        for program in self._programs:
            program.take()

    # -- installing and removing -----------------------------------------------------------------

    def install(self, between: Callable[[], None]) -> None:
        """Installs the watch, when `fit` has made its training function.

        Args:
            between: Called by the training thread before each call of the training function.
        """
        model = self.model
        left = _installed.get(model)
        if left is not None:
            left.remove()  # Of a `fit` that failed without a call of its callbacks.
        _installed[model] = self
        self.restart()
        self._between = between
        self._removals.append(watch_calls(model, self._begin_call, self._end_call))
        if self.in_graph:
            watch_iterators()
            if strategy_of(model) is None:
                self._install_stamps()

    def _install_stamps(self) -> None:
        """Puts stamps into a model without a strategy of tfdist, for which no hook is called."""
        model = self.model
        plain = model.train_function
        self._removals.append(_replaced(model, "train_step", self._stamped_step()))
        for optimizer in _optimizers(model):
            self._removals.append(_replaced(optimizer, "apply", _stamped_apply(optimizer)))
        if self._stamped is None or plain is not self._plain:
            # A step that was traced before has no stamps.
            model.make_train_function(force=True)
            self._stamped, self._plain = model.train_function, plain
        model.train_function = self._stamped

        def put_back() -> None:
            model.train_function = plain

        self._removals.append(put_back)

    def remove(self) -> None:
        """Restores the model."""
        note_waits(None)
        while self._removals:
            self._removals.pop()()
        if _installed.get(self.model) is self:
            del _installed[self.model]

    def _begin_call(self) -> None:
        self._between()
        self._begun, self._made_before = time.time(), self._made
        self.close(self._begun)
        note_waits(self._begin)

    def _end_call(self) -> None:
        note_waits(None)
        traced = self._made > self._made_before and not self.model.run_eagerly
        self.executions.append(Execution(self._begun, time.time(), traced=traced))

    def close(self, now: float) -> None:
        """Ends the time of the last call."""
        note_waits(None)
        if self.executions and self.executions[-1].close is None:
            self.executions[-1].close = now

    @property
    def num_closed(self) -> int:
        """The number of closed calls that were not taken."""
        is_open = bool(self.executions) and self.executions[-1].close is None
        return len(self.executions) - is_open

    def ask_norm(self, wanted: bool) -> None:
        """Sets whether the steps from now on compute the norm of their gradients."""
        tf.raw_ops.AssignVariableOp(
            resource=self._wants_norm.handle, value=tf.constant(float(wanted), tf.float64)
        )

    def take(self) -> list[Execution]:
        """The closed calls, with their rows."""
        done = [each for each in self.executions if each.close is not None]
        self.executions = [each for each in self.executions if each.close is None]
        rows = self._eager_rows + [row for program in self._programs for row in program.take()]
        rows.sort(key=lambda row: row.first("start"))
        self._eager_rows = []
        for each in done:
            while rows and rows[0].first("start") < each.begin:
                rows.pop(0)  # Of a call that failed.
            while rows and rows[0].first("start") <= each.end:
                each.rows.append(rows.pop(0))
        if self.executions:
            self._eager_rows = rows  # Of the call that is not closed yet.
        return done

    # -- in the graph ----------------------------------------------------------------------------

    def _stamped_step(self) -> Callable:
        original = self.model.train_step
        watch = weakref.proxy(self)

        @functools.wraps(original)
        def train_step(model, data):
            with watch.stamped(data) as finish:
                return finish(original(data))

        return types.MethodType(train_step, self.model)

    @contextlib.contextmanager
    def stamped(self, data) -> Iterator[Callable]:
        """Stamps a training step while it is traced or runs eagerly in the context.

        Args:
            data: The arguments of the step.

        Yields:
            A function that is called with the logs of the step, and returns them.
        """
        if self._is_stamped or _counting.get() or not self.in_graph:
            yield lambda logs: logs
            return
        stamps = current_stamps() or Stamps()
        stamps.wants_norm = self._wants_norm
        stamps.note(Column("begin"), self._begin)
        stamps.stamp(Column("start"), tf.nest.flatten(data, expand_composites=True))
        _note_sizes(stamps, data)

        def finish(logs):
            stamps.stamp(Column("end"), tf.nest.flatten(logs))
            self._finish(stamps, data, logs)
            return logs

        self._is_stamped = True
        try:
            with stamping(stamps):
                yield finish
        finally:
            self._is_stamped = False

    def _finish(self, stamps: Stamps, data, logs) -> None:
        row = stamps.row()
        columns = Columns(stamps.columns)
        if tf.executing_eagerly():
            self._eager_rows.append(Row(columns, row.numpy()))
            self._spec = data
            return
        self._made += 1
        graph = tf.compat.v1.get_default_graph()
        spec = tf.nest.map_structure(tf.type_spec_from_value, data)
        is_known = all(_is_static(part) for part in tf.nest.flatten(spec))
        program = _Program(columns, count_flops(graph, tf.nest.flatten(logs)) if is_known else None)
        self._spec = spec
        program.write(row)
        self._programs.append(program)

    # -- FLOPs -----------------------------------------------------------------------------------

    def flops_of(self, row: Row) -> Flops:
        """The floating-point operations of a step on this rank.

        Where its graph does not determine the sizes of a batch, the step is traced again with those of
        the row; all ranks may do that at any time, since tracing does not communicate.
        """
        for program in self._programs:
            if program.columns is row.columns and program.flops is not None:
                return program.flops
        dims = row.columns.places.get("dim", ())
        sizes = tuple((row.columns[place].name, int(row.numbers[place])) for place in dims)
        if sizes not in self._flops:
            self._flops[sizes] = self._traced_flops(dict(sizes))
        return self._flops[sizes]

    def _traced_flops(self, sizes: dict[str, int]) -> Flops:
        flat = tf.nest.flatten(self._spec)
        concrete = [_with_sizes(part, sizes, place) for place, part in enumerate(flat)]
        spec = tf.nest.pack_sequence_as(self._spec, concrete)
        model, step = self.model, self.model.train_step

        def run(data):
            return model.distribute_strategy.run(step, args=(data,))

        token = _counting.set(True)
        try:
            function = tf.function(run, autograph=False).get_concrete_function(spec)
            return count_flops(function.graph)
        finally:
            _counting.reset(token)


_counting: contextvars.ContextVar[bool] = contextvars.ContextVar("counting", default=False)


def _replaced(owner, name: str, value) -> Callable[[], None]:
    """Sets an attribute of an object; returns a function that restores it."""
    attributes = vars(owner)
    before = attributes.get(name)
    attributes[name] = value

    def put_back() -> None:
        if before is None:
            attributes.pop(name, None)
        else:
            attributes[name] = before

    return put_back


def _optimizers(model: keras.Model) -> list:
    """The optimizers of a model, including those of a custom step, and those inside others."""
    found: list = []
    waiting = [model.optimizer, *vars(model).values()]
    while waiting:
        value = waiting.pop()
        if isinstance(value, keras.optimizers.Optimizer) and value not in found:
            found.append(value)
            waiting.append(getattr(value, "inner_optimizer", None))
    return found


def _stamped_apply(optimizer) -> Callable:
    original = optimizer.apply

    @functools.wraps(original)
    def apply(grads, trainable_variables=None):
        grads = list(grads)
        with updating(grads, square_of):
            return original(grads, trainable_variables)

    return apply


def _note_sizes(stamps: Stamps, data) -> None:
    """Records the rows, the tokens, and the sizes that the graph does not determine."""
    x = keras.utils.unpack_x_y_sample_weight(data)[0] if isinstance(data, tuple) else data
    parts = [part for part in tf.nest.flatten(x) if isinstance(part, tf.Tensor)]
    if parts and parts[0].shape.rank:
        stamps.note(Column("rows"), tf.shape(parts[0])[0])
    tokens = [part for part in parts if part.dtype.is_integer and part.shape.rank == 2]
    if tokens:
        stamps.note(Column("tokens"), tf.size(tokens[0], tf.int64))
    for place, part in enumerate(tf.nest.flatten(data)):
        if isinstance(part, tf.Tensor) and part.shape.rank is not None:
            for dim, size in enumerate(part.shape):
                if size is None or tf.executing_eagerly():
                    stamps.note(Column("dim", f"{place}/{dim}"), tf.shape(part)[dim])


def _is_static(spec) -> bool:
    return not isinstance(spec, tf.TensorSpec) or spec.shape.is_fully_defined()


def _with_sizes(part, sizes: dict[str, int], place: int):
    spec = part if isinstance(part, tf.TypeSpec) else tf.type_spec_from_value(part)
    if not isinstance(spec, tf.TensorSpec) or spec.shape.rank is None:
        return spec
    shape = [
        sizes.get(f"{place}/{dim}", size) if size is None else size
        for dim, size in enumerate(spec.shape)
    ]
    return tf.TensorSpec(shape, spec.dtype)
