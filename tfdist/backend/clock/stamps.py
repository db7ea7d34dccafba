"""Measurements of a training step: time stamps in its graph, and timers in the program.

`tfdist.callbacks.Monitor` enables and reads them. A step that is not monitored is traced without stamps,
and a timer without a listener does nothing.

Stamps are seconds since the epoch, by the system's clock: the only clock that is available to operations
of a graph (`tf.timestamp`) and to Python.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf

from tfdist.backend import devices
from tfdist.backend.graph.compiling import excluded
from tfdist.backend.graph.order import in_any_order
from tfdist.utils import checks
from tfdist.utils.temporary import attributes_set

_serial_numbers = itertools.count()


@dataclasses.dataclass(frozen=True)
class Column:
    """The meaning of a number in a step's row.

    Attributes:
        kind: "begin", "start", "gradients", "reduced", "apply", "updated" or "end": stamps of the step,
            of which the n-th "gradients", "reduced" and "updated" belong together; "call" and "done":
            stamps of a collective; "size": its bytes; "rows", "tokens", "norm": numbers.
        name: The name of a collective.
        lane: The transport of a collective.
        size: The bytes of this rank's input of a collective; None if unknown in the graph.
        ranks: The ranks of a collective.
        in_background: Whether a collective runs concurrently with the computation: one of gradients.
    """

    kind: str
    name: str = ""
    lane: str = ""
    size: int | None = None
    ranks: tuple[int, ...] = ()
    in_background: bool = False


class Cell:
    """A number that a graph writes, and that another graph, or any thread, reads.

    A bare resource, since a `tf.Variable` cannot be created while a `tf.function` is traced.
    """

    def __init__(self, value: float = 0.0, shape: Sequence[int] = (), dtype: tf.DType = tf.float64):
        self.dtype = dtype
        name = f"tfdist-clock-{next(_serial_numbers)}"
        with tf.init_scope(), tf.device("/CPU:0"):
            self.handle = tf.raw_ops.VarHandleOp(dtype=dtype, shape=list(shape), shared_name=name)
            first = tf.fill(list(shape), tf.constant(value, dtype))
            tf.raw_ops.AssignVariableOp(resource=self.handle, value=first)

    def write(self, value: tf.Tensor) -> None:
        """Sets the number."""
        with excluded():
            tf.raw_ops.AssignVariableOp(resource=self.handle, value=value)

    def read(self) -> tf.Tensor:
        """The number."""
        with excluded():
            return tf.raw_ops.ReadVariableOp(resource=self.handle, dtype=self.dtype)


class Stamps:
    """The stamps of one step, during its trace or its eager execution.

    Args:
        wants_norm: A cell that is not 0 in steps that compute the norm of their gradients, which costs
            a pass over them.
    """

    def __init__(self, wants_norm: Cell | None = None):
        self.wants_norm = wants_norm
        self.columns: list[Column] = []
        self._values: list[tf.Tensor | Cell] = []
        self._first: tf.Tensor | None = None
        self._graph = _current_graph()
        self.in_background = False
        #: The nesting depth of calls of `apply`.
        self.depth = 0
        #: The number of recorded norms.
        self.num_norms = 0

    def note(self, column: Column, value) -> None:
        """Adds a number: a tensor, or a cell that is written elsewhere."""
        if not isinstance(value, Cell):
            with devices.on_host():
                value = tf.cast(value, tf.float64)
            if _current_graph() not in (None, self._graph):
                # A tensor of an inner graph, such as that of a branch, is not available outside.
                cell = Cell()
                cell.write(value)
                value = cell
        self.columns.append(column)
        self._values.append(value)

    def row(self) -> tf.Tensor:
        """All numbers, in the order of `columns`; those of branches that did not run are old ones."""
        with devices.on_host():
            each = [value.read() if isinstance(value, Cell) else value for value in self._values]
            return tf.stack(each)

    def stamp(self, column: Column, after: Sequence) -> tf.Tensor:
        """Records when the last of some tensors is computed; no stamp is older than the first."""
        now = time_after(after if self._first is None else [*after, self._first])
        if self._first is None:
            self._first = now
        self.note(column, now)
        return now

    def call(self, column: Column, tensor: tf.Tensor) -> tuple[tf.Tensor, Callable]:
        """Records the begin of a collective.

        Returns:
            The time, and a function to be called with the results of the collective.
        """
        elements = tensor.shape.num_elements()
        size = None if elements is None else elements * tensor.dtype.size
        column = dataclasses.replace(column, size=size, in_background=self.in_background)
        begun = self.stamp(column, [tensor])

        def end(results: Sequence) -> None:
            self.stamp(dataclasses.replace(column, kind="done"), results)
            if size is None:
                found = tf.size(tensor, tf.int64) * tensor.dtype.size
                self.note(dataclasses.replace(column, kind="size"), found)

        return begun, end

    def norm(self, square: Callable[[], tf.Tensor]) -> None:
        """Records the squared norm of gradients, in steps that compute it."""
        if self.wants_norm is None:
            return
        self.num_norms += 1
        unknown = tf.constant(-1.0, tf.float64)
        self.note(Column("norm"), tf.cond(self.wants_norm.read() > 0, square, lambda: unknown))

    def background(self) -> contextlib.AbstractContextManager[None]:
        """Marks collectives inside as running concurrently with the computation."""
        return attributes_set(self, in_background=True)


_current: contextvars.ContextVar[Stamps | None] = contextvars.ContextVar("stamps", default=None)


def current_stamps() -> Stamps | None:
    """The stamps of the step that is traced now, or None if it is not monitored."""
    return _current.get()


@contextlib.contextmanager
def stamping(stamps: Stamps) -> Iterator[None]:
    """Makes these the current stamps inside."""
    token = _current.set(stamps)
    try:
        yield
    finally:
        _current.reset(token)


@contextlib.contextmanager
def reducing(gradients: Sequence) -> Iterator[Callable]:
    """Records when gradients are computed, and when the reduction inside has ended.

    Args:
        gradients: Those of this rank.

    Returns:
        A context, whose value is to be called with the reduced gradients, and with a function that
        computes their squared norm.
    """
    stamps = current_stamps()
    if stamps is None:
        yield lambda found, square: None
        return
    results: list[tuple[Sequence, Callable]] = []
    stamps.stamp(Column("gradients"), gradients)
    with stamps.background():
        yield lambda found, square: results.append((found, square))
    for found, square in results:
        stamps.stamp(Column("reduced"), found)
        stamps.norm(square)


@contextlib.contextmanager
def updating(gradients: Sequence, square: Callable[[Sequence], tf.Tensor]) -> Iterator[None]:
    """Records when an optimizer's gradients are computed, and when its update inside has ended.

    Args:
        gradients: The optimizer's gradients.
        square: Computes their squared norm, which is recorded unless a reduction records one.
    """
    stamps = current_stamps()
    if stamps is None:
        yield
        return
    if stamps.depth == 0:
        stamps.stamp(Column("apply"), gradients)
    graph = _current_graph()
    first = 0 if graph is None else len(graph.get_operations())
    stamps.depth += 1
    norms = stamps.num_norms
    try:
        yield
    finally:
        stamps.depth -= 1
    if stamps.num_norms == norms:
        stamps.norm(lambda: square(gradients))
    if stamps.depth == 0:
        made = [] if graph is None else graph.get_operations()[first:]
        stamps.stamp(Column("updated"), [op for op in made if op.op_def.is_stateful])


def time_after(tensors: Sequence) -> tf.Tensor:
    """When the last of some tensors is computed: a float64 scalar, in seconds since the epoch."""
    flat = [
        part.values if isinstance(part, tf.IndexedSlices) else part
        for part in tensors
        if part is not None
    ]
    with tf.control_dependencies(flat), tf.device("/CPU:0"), excluded():
        now = tf.timestamp()
    if not tf.executing_eagerly():
        in_any_order(now.op)
    return now


def _current_graph() -> tf.Graph | None:
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


@dataclasses.dataclass(frozen=True)
class Timed:
    """The measurement of a timer.

    Attributes:
        name: The timer's name.
        begin: The begin, in seconds since the epoch.
        end: The end, in seconds since the epoch.
        on_main_thread: Whether it ran in the thread that trains.
    """

    name: str
    begin: float
    end: float
    on_main_thread: bool


#: The functions that are called with each `Timed`, from any thread.
_listeners: list[Callable[[Timed], None]] = []


@contextlib.contextmanager
def listen(listener: Callable[[Timed], None]) -> Iterator[None]:
    """Calls the listener with the measurements of timers inside."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


class timer:
    """Measures the code inside as a separate section of the steps that a `Monitor` measures.

    ```python
    with tfdist.addons.monitoring.timer("augment"):
        batch = augment(batch)
    ```

    In the thread that trains, for example in a callback, it is subtracted from the enclosing section. In
    other threads, such as a generator of data, it runs concurrently with the step, and is reported
    separately. Without a `Monitor` it does nothing.

    Args:
        name: The name of the section.

    Raises:
        ValueError: `name` is not a non-empty string.
    """

    def __init__(self, name: str):
        self._name = checks.text("name", name)
        self._begins: list[float] = []

    def __enter__(self) -> None:
        self._begins.append(time.time())

    def __exit__(self, *_) -> None:
        begin = self._begins.pop()
        if not _listeners:
            return
        on_main = threading.current_thread() is threading.main_thread()
        timed = Timed(self._name, begin, time.time(), on_main)
        for listener in list(_listeners):
            listener(timed)
