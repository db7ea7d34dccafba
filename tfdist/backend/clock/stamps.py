"""What takes the time of a training step: stamps in its graph, and timers in the program.

`tfdist.callbacks.Monitor` asks for them and reads them. A step that nobody watches is traced without
any stamp, and a timer that nobody listens to does nothing.

Stamps are seconds since the epoch, by the system's clock: the one clock that operations of a graph
(`tf.timestamp`) and Python have in common.
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

from tfdist.utils import checks

_serial_numbers = itertools.count()


@dataclasses.dataclass(frozen=True)
class Column:
    """What a number of a step's row is.

    Attributes:
        kind: "begin", "start", "gradients", "reduced", "updated" or "end": stamps of the step, the
            n-th of "gradients", "reduced" and "updated" belonging together; "call" and "done": those
            of a collective; "rows", "tokens", "norm": numbers.
        name: Of a collective its name.
        lane: Of a collective what carries it.
        size: Of a collective the bytes of what this rank gives or gets; None where only the run knows.
        ranks: Of a collective the ranks that take part.
        in_background: Whether a collective runs beside the computation: one of gradients.
    """

    kind: str
    name: str = ""
    lane: str = ""
    size: int | None = None
    ranks: tuple[int, ...] = ()
    in_background: bool = False


class Cell:
    """A number that a graph writes, and that another graph, or any thread, reads.

    A bare resource, since a `tf.Variable` cannot be made while a `tf.function` is traced.
    """

    def __init__(self, value: float = 0.0, shape: Sequence[int] = (), dtype: tf.DType = tf.float64):
        self.dtype = dtype
        with tf.init_scope(), tf.device("/CPU:0"):
            self.handle = tf.raw_ops.VarHandleOp(
                dtype=dtype, shape=list(shape), shared_name=f"tfdist-clock-{next(_serial_numbers)}"
            )
            first = tf.fill(list(shape), tf.constant(value, dtype))
            tf.raw_ops.AssignVariableOp(resource=self.handle, value=first)

    def write(self, value: tf.Tensor) -> None:
        """Sets it."""
        tf.raw_ops.AssignVariableOp(resource=self.handle, value=value)

    def read(self) -> tf.Tensor:
        """Its value."""
        return tf.raw_ops.ReadVariableOp(resource=self.handle, dtype=self.dtype)


class Stamps:
    """The stamps of one step, while it is traced or runs eagerly.

    Args:
        wants_norm: Whether the step computes the norm of its gradients, which costs a pass over them:
            a cell that is not 0 in steps that do.
    """

    def __init__(self, wants_norm: Cell | None = None):
        self.wants_norm = wants_norm
        self.columns: list[Column] = []
        self._values: list[tf.Tensor | Cell] = []
        self._first: tf.Tensor | None = None
        self._graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        self.in_background = False
        #: How many calls of `apply` are around what is traced now.
        self.depth = 0
        #: How many norms were noted.
        self.num_norms = 0

    def note(self, column: Column, value) -> None:
        """Takes a number in: a tensor, or a cell that something else writes."""
        if not isinstance(value, Cell):
            value = tf.cast(value, tf.float64)
            eagerly = tf.executing_eagerly()
            if not eagerly and tf.compat.v1.get_default_graph() is not self._graph:
                # What an inner graph computes, as that of a branch, is not to be had outside.
                cell = Cell()
                cell.write(value)
                value = cell
        self.columns.append(column)
        self._values.append(value)

    def row(self) -> tf.Tensor:
        """All numbers, in the order of `columns`; a number that a branch did not reach is an old one."""
        each = [value.read() if isinstance(value, Cell) else value for value in self._values]
        return tf.stack(each)

    def stamp(self, column: Column, after: Sequence) -> tf.Tensor:
        """Notes when the last of some tensors is there; no stamp is older than the first."""
        now = time_after(after if self._first is None else [*after, self._first])
        if self._first is None:
            self._first = now
        self.note(column, now)
        return now

    def call(self, column: Column, tensor: tf.Tensor) -> tuple[tf.Tensor, Callable]:
        """Notes that a collective begins.

        Returns:
            When; and what is called with all that has come of it.
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
        """Notes the squared norm of gradients, in steps that are to compute it."""
        if self.wants_norm is None:
            return
        self.num_norms += 1
        unknown = tf.constant(-1.0, tf.float64)
        self.note(Column("norm"), tf.cond(self.wants_norm.read() > 0, square, lambda: unknown))

    @contextlib.contextmanager
    def background(self) -> Iterator[None]:
        """Inside, collectives run beside the computation."""
        before, self.in_background = self.in_background, True
        try:
            yield
        finally:
            self.in_background = before


_current: contextvars.ContextVar[Stamps | None] = contextvars.ContextVar("stamps", default=None)


def current_stamps() -> Stamps | None:
    """Those of the step that is traced now, if somebody watches it."""
    return _current.get()


@contextlib.contextmanager
def stamping(stamps: Stamps) -> Iterator[None]:
    """Inside, these are the current stamps."""
    token = _current.set(stamps)
    try:
        yield
    finally:
        _current.reset(token)


@contextlib.contextmanager
def reducing(gradients: Sequence) -> Iterator[Callable]:
    """Inside, gradients are reduced: stamps when they are there, and when they are reduced.

    Args:
        gradients: Those of this rank.

    Returns:
        A context, whose value is called with the reduced gradients, and with what makes their squared
        norm.
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
    """Inside, an optimizer updates: stamps when its gradients are there, and when all is updated.

    Args:
        gradients: What it is given.
        square: Makes their squared norm, which is noted where no path of tfdist's notes another.
    """
    stamps = current_stamps()
    if stamps is None:
        yield
        return
    if stamps.depth == 0:
        stamps.stamp(Column("apply"), gradients)
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
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
    """When the last of some tensors is there: a float64 scalar, in seconds since the epoch."""
    flat = [
        part.values if isinstance(part, tf.IndexedSlices) else part
        for part in tensors
        if part is not None
    ]
    with tf.control_dependencies(flat), tf.device("/CPU:0"):
        now = tf.timestamp()
    if not tf.executing_eagerly():
        _in_any_order(now.op)
    return now


def _in_any_order(op: tf.Operation) -> None:
    """Takes an operation out of the order in which a `tf.function` runs those that have an effect.

    Each would wait for all that were traced before it: a message for the answer to a later one,
    which never comes.

    Raises:
        ImportError: This TensorFlow keeps the order elsewhere.
    """
    try:
        manager = op.graph.experimental_acd_manager
        if manager is not None:  # None in a graph of TensorFlow 1, which keeps no order.
            manager.run_independently(op)
    except AttributeError as error:
        raise ImportError(
            "This version of tfdist knows another TensorFlow: "
            "Graph.experimental_acd_manager.run_independently is not there. Received: TensorFlow "
            f"{tf.__version__}. Install one that tfdist was made for, or a newer tfdist."
        ) from error


@dataclasses.dataclass(frozen=True)
class Timed:
    """What a timer has measured.

    Attributes:
        name: Its name.
        begin: When it began, in seconds since the epoch.
        end: When it ended.
        on_main_thread: Whether the thread that trains waited for it.
    """

    name: str
    begin: float
    end: float
    on_main_thread: bool


#: What is called with each `Timed`, from whatever thread.
_listeners: list[Callable[[Timed], None]] = []


@contextlib.contextmanager
def listen(listener: Callable[[Timed], None]) -> Iterator[None]:
    """Inside, the listener is told what timers measure."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


class timer:
    """Times what is inside, as a section of its own of the steps that a `Monitor` watches.

    ```python
    with tfdist.addons.monitoring.timer("augment"):
        batch = augment(batch)
    ```

    In the thread that trains, as in a callback, it is taken out of the section around it. In other
    threads, as in a generator of data, it runs beside the step, and is told apart. Without a
    `Monitor` it does nothing.

    Args:
        name: The section.

    Raises:
        ValueError: `name` is no text.
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
