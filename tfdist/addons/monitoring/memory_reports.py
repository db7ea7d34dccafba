"""A rank's memory in training: as planned by the layout, and as measured."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections.abc import Iterable, Sequence

import keras
import tensorflow as tf
from tabulate import tabulate

from tfdist.addons.monitoring.memory import PeakMemory, driver_bytes
from tfdist.backend.keras.attributes import stored_value
from tfdist.backend.keras.functional import trace_graph
from tfdist.backend.kernels import enabling_kernels
from tfdist.pipeline.costs import kept_bytes
from tfdist.sharding.layout import layout_of, parameter_bytes
from tfdist.step.context import ReplicaContext, strategy_of
from tfdist.step.token_split import TokenSplit
from tfdist.utils import checks

_MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class MemoryRow:
    """One kind of memory.

    Attributes:
        what: Its name.
        whole: Its bytes without sharding; None where that is not known.
        planned: Its bytes on this rank by the layout; None where the layout does not determine them.
        measured: The bytes of live variables, or of a peak; None where nothing can be measured.
    """

    what: str
    whole: int | None
    planned: int | None
    measured: int | None


@dataclasses.dataclass(frozen=True)
class MemoryReport:
    """The memory of one rank."""

    rank: int
    rows: tuple[MemoryRow, ...]

    def row(self, what: str) -> MemoryRow:
        """The row with a name.

        Raises:
            ValueError: There is no such row.
        """
        names = [row.what for row in self.rows]
        checks.one_of("what", what, names)
        return self.rows[names.index(what)]

    def table(self) -> str:
        """The report as a table, in MiB."""
        head = (f"rank {self.rank}, MiB", "whole", "planned", "measured")
        lines = []
        for row in self.rows:
            sizes = (row.whole, row.planned, row.measured)
            cells = ["" if size is None else f"{size / _MIB:,.2f}" for size in sizes]
            lines.append((row.what, *cells))
        sides = ("left", "right", "right", "right")
        return tabulate(
            lines, head, tablefmt="plain", disable_numparse=True, colalign=sides, headersalign=sides
        )

    def to_json(self) -> str:
        """The report as JSON, in bytes."""
        return json.dumps(dataclasses.asdict(self), indent=1)


def memory_report(
    model: keras.Model,
    step_peak: int | None = None,
    *,
    rows: int | None = None,
    input_shape: Sequence[int] | None = None,
) -> MemoryReport:
    """Reports the memory of this rank. It is not a collective: any rank may call it alone.

    Activations are planned from the graph of a forward and a backward pass, which is built and not
    run: the tensors of the forward pass that the backward pass uses, with recompute taken into account.

    Args:
        model: A compiled model. Its optimizer's state is known once it was built, as in `fit`.
        step_peak: The bytes that a training step used on top of the memory in use between steps; see
            `MemoryReporter`.
        rows: The rows of a batch on this rank, for activations. They are planned for models with one
            input whose shape is known.
        input_shape: The shape of a row, with all its tokens, if the model does not specify all of it.

    Returns:
        The report.
    """
    checks.instance("model", model, keras.Model, "a Keras model")
    checks.integer("step_peak", step_peak, minimum=0, maximum=2**63 - 1, optional=True)
    rows = checks.integer("rows", rows, minimum=1, optional=True)
    shape = checks.integers("input_shape", input_shape, minimum=1, optional=True)
    strategy = strategy_of(model)
    stage = 0 if strategy is None else strategy.zero_stage
    optimizer = getattr(model, "optimizer", None)
    trained = {id(variable) for variable in model.trainable_variables}
    others = [variable for variable in model.variables if id(variable) not in trained]
    state = [] if optimizer is None else list(optimizer.variables)
    parameters = _row("parameters", model.trainable_variables)
    accumulates = bool(getattr(optimizer, "gradient_accumulation_steps", None))
    in_parts = stage >= 2 or (stage == 1 and not accumulates)
    shards = strategy.gradient_group.size if strategy is not None and in_parts else 1
    local = parameter_bytes(model)
    found = [
        parameters,
        _row("other weights", others),
        MemoryRow("gradients", parameters.whole, math.ceil(local / shards), None),
        _row("optimizer state", state),
    ]
    activations = None if rows is None else _activations(model, rows, shape)
    if activations is not None:
        found.append(MemoryRow("activations", None, activations, None))
    if step_peak is not None:
        found.append(MemoryRow("additional peak of a step", None, None, step_peak))
    on_gpu = driver_bytes()
    if on_gpu is not None:
        found.append(MemoryRow("GPU, by its driver", None, None, on_gpu))
    return MemoryReport(0 if strategy is None else strategy.mesh.rank, tuple(found))


class MemoryReporter(keras.callbacks.Callback):
    """Measures the peak of a training step, and prints the report after the first epoch.

    Args:
        path: A file for the report as JSON; `{rank}` in it is replaced by the rank. None for no file.
        rows: The rows of a batch on this rank, to plan activations.
        quiet: Whether to print nothing.

    Attributes:
        report: The last report, or None.
    """

    def __init__(self, path: str | None = None, *, rows: int | None = None, quiet: bool = False):
        super().__init__()
        self._path = checks.path("path", path, optional=True)
        self._rows = checks.integer("rows", rows, minimum=1, optional=True)
        self._quiet = checks.boolean("quiet", quiet)
        self._peak: PeakMemory | None = None
        self._beside: int | None = None
        self.report: MemoryReport | None = None

    def on_train_batch_begin(self, batch, logs=None):
        """Begins a measurement. The first step builds the graph, and is skipped."""
        self._peak = PeakMemory().__enter__() if batch else None

    def on_train_batch_end(self, batch, logs=None):
        """Ends the measurement."""
        if self._peak is not None:
            self._peak.__exit__(None, None, None)
            self._beside = max(self._beside or 0, self._peak.bytes)
            self._peak = None

    def on_epoch_end(self, epoch, logs=None):
        """Reports once, after the first epoch."""
        if self.report is not None:
            return
        self.report = memory_report(self.model, self._beside, rows=self._rows)
        if not self._quiet:
            print(self.report.table())
        if self._path is not None:
            with open(self._path.replace("{rank}", str(self.report.rank)), "w") as file:
                file.write(self.report.to_json())


def _activations(model: keras.Model, rows: int, input_shape: tuple[int, ...] | None) -> int | None:
    """The bytes kept from a forward to a backward pass; None where they cannot be planned."""
    inputs = tf.nest.flatten(getattr(model, "inputs", None) or [])
    if len(inputs) != 1:
        return None
    shape = inputs[0].shape[1:] if input_shape is None else input_shape
    if None in shape:
        return None
    marks: dict = {}

    def step(x):
        with tf.GradientTape() as tape:
            y = model(x, training=True)
        marks["forward"] = len(tf.compat.v1.get_default_graph().get_operations())
        gradients = tape.gradient(y, model.trainable_variables)
        return [gradient for gradient in gradients if gradient is not None]

    # The kept tensors depend on the kernels and on the part of the tokens that a step has.
    strategy, inside = strategy_of(model), contextlib.ExitStack()
    with inside:
        if strategy is not None:
            inside.enter_context(enabling_kernels())
            group = strategy.token_group
            if group.size > 1:
                tokens = TokenSplit(group.size, group.rank, shape[0])
                shape = (tokens.count(), *shape[1:])
                inside.enter_context(ReplicaContext(strategy, None, tokens))
        graph = trace_graph(step, [tf.TensorSpec((rows, *shape), inputs[0].dtype)])
    return kept_bytes(graph, marks["forward"])


def _row(what: str, variables: Iterable) -> MemoryRow:
    """Whole, planned and live bytes of some variables."""
    whole = planned = measured = 0
    for variable in variables:
        size = tf.as_dtype(variable.dtype).size
        layout = layout_of(variable)
        elements = math.prod(layout.global_shape(variable.shape))
        whole += elements * size
        parts = (layout.slice, layout.flat)
        num_parts = math.prod(part.group.size for part in parts if part is not None)
        planned += math.ceil(elements / num_parts) * size
        live = stored_value(variable)
        measured += 0 if live is None else live.shape.num_elements() * live.dtype.size
    return MemoryRow(what, whole, planned, measured)
