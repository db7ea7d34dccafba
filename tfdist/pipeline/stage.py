"""A stage of a pipeline as functions: forward, backward, gradients of weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from tfdist.graph.dependence import is_independent_of_batch
from tfdist.graph.provenance import with_provenance
from tfdist.graph.split import Part, ancestors, carve
from tfdist.keras_internals.functional import trace_graph

__all__ = ["StageProgram"]


@dataclasses.dataclass(frozen=True)
class StageProgram:
    """What a rank runs of one stage for each micro-batch.

    Tensors go from part to part by name. A stage's forward takes `x` and, on the last stage, what
    belongs to the micro-batch; its backward takes `dy` too, but on the last stage.

    Attributes:
        forward: The outputs, and what the backward needs of the forward.
        backward: The gradient of the inputs; of the weights too where the two are not split.
        weights: The gradients of the weights; None where they are not split off.
        x: The name of the inputs.
        batch: The names of the tensors of the micro-batch: targets and weights.
        y: The name of the outputs; None on the last stage, which returns nothing.
        dy: The name of the gradient of the outputs; None on the last stage.
        dx: The name of the gradient of the inputs; None on the first stage.
        gradients: For each variable the names of its gradient's components: one, three of an
            IndexedSlices, or none.
        same_rows: For each variable whether its gradient is an IndexedSlices whose indices are those
            of every micro-batch, as the ids of positions are.
    """

    forward: Part
    backward: Part
    weights: Part | None
    x: str
    batch: tuple[str, ...]
    y: str | None
    dy: str | None
    dx: str | None
    gradients: tuple[tuple[str, ...], ...]
    same_rows: tuple[bool, ...]


def trace_stage(
    links: Sequence[keras.Model],
    variables: Sequence[keras.Variable],
    x: tf.TensorSpec,
    y: tf.TensorSpec | None,
    *,
    first: bool,
    extra_loss: Callable[[tf.Tensor], tf.Tensor | None],
    loss: Callable | None = None,
    batch: Sequence[tf.TensorSpec] = (),
    splits_backward: bool = False,
) -> StageProgram:
    """Traces a stage, and carves it.

    Args:
        links: The models of its links.
        variables: What is trained in it.
        x: What its inputs are like.
        y: What its outputs are like, and so the gradient for them; None for the last stage, which
            has a loss instead.
        first: Whether it is the first stage, whose inputs have no gradient.
        extra_loss: Called after the links with the number of rows; returns what the links add to
            the loss, scaled as `loss` is, or None.
        loss: On the last stage: from the outputs and the tensors of the micro-batch to the scalar
            whose gradient is taken.
        batch: On the last stage: what the tensors of the micro-batch are like.
        splits_backward: Whether gradients of weights become a part of their own.
    """
    marks: dict = {}

    def step(x, *rest):
        graph = tf.compat.v1.get_default_graph()
        values = [variable.value for variable in variables]
        with tf.GradientTape() as tape:
            # A tape knows variables by itself, but not arrays that stand for them.
            tape.watch(values)
            y = x
            if x.dtype.is_floating and not first:
                tape.watch(x)
            source = None if first else x
            for link in links:
                y = link(y, training=True)
                if source is None and y.dtype.is_floating:
                    # The first stage has no gradient to send on; what leads back to its first
                    # outputs is to the schedule what that gradient is elsewhere.
                    tape.watch(y)
                    source = y
            # An operation of this graph, also where the links hand on what they got.
            y = with_provenance(tf.identity, y)
            extra = extra_loss(tf.shape(x)[0])
            if loss is not None:
                total = loss(y, *rest)
                targets = [total if extra is None else total + extra]
                seeds = [tf.ones_like(targets[0])]
            else:
                targets = [y] + ([] if extra is None else [extra])
                seeds = [rest[0]] + ([] if extra is None else [tf.ones_like(extra)])
        marks["forward"] = set(graph.get_operations())
        dx, *gradients = tape.gradient(targets, [source, *values], output_gradients=seeds)
        # Operations of the backward pass, also where TensorFlow hands on what was there before.
        dx = None if dx is None else tf.identity(dx)
        marks["gradients"] = [
            [tf.identity(part) for part in tf.nest.flatten(each, expand_composites=True)]
            if each is not None
            else []
            for each in gradients
        ]
        marks["same_rows"] = tuple(
            isinstance(each, tf.IndexedSlices) and is_independent_of_batch(each.indices)
            for each in gradients
        )
        marks["all"] = set(graph.get_operations())
        marks.update(x=x, rest=rest, y=y, dx=dx)

    dy = () if y is None else (y,)
    graph = trace_graph(step, [x, *dy, *batch])
    inputs = {tensor.op for tensor in graph.inputs}
    forward = marks["forward"] - inputs
    backward = marks["all"] - marks["forward"] - inputs
    # The gradient of a loop, as an LSTM has one, adds to the loop where it is to keep its activations.
    late = ancestors([tensor for each in forward for tensor in each.inputs], backward)
    forward, backward = forward | late, backward - late
    leads_back = ancestors([] if marks["dx"] is None else [marks["dx"]], backward)
    components = marks["gradients"]
    flat = [tensor for some in components for tensor in some]
    to_weights = ancestors(flat, backward)
    sent = [] if first or marks["dx"] is None else [marks["dx"]]
    kept = [] if y is None else [marks["y"]]
    groups: list[set]
    outputs: list[list[tf.Tensor]]
    if splits_backward:
        groups = [forward, leads_back, to_weights - leads_back]
        outputs = [kept, sent, flat]
    else:
        groups = [forward, leads_back | to_weights]
        outputs = [kept, sent + flat]
    parts = carve(graph, groups, outputs)
    return StageProgram(
        forward=parts[0],
        backward=parts[1],
        weights=parts[2] if splits_backward else None,
        x=marks["x"].name,
        batch=tuple(t.name for t in marks["rest"][len(dy) :]),
        y=kept[0].name if kept else None,
        dy=marks["rest"][0].name if dy else None,
        dx=sent[0].name if sent else None,
        gradients=tuple(tuple(t.name for t in some) for some in components),
        same_rows=marks["same_rows"],
    )
