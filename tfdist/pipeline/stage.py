"""A stage of a pipeline as functions: forward, backward, gradients of weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence

import keras
import tensorflow as tf

from tfdist.backend.graph.dependence import is_independent_of_batch
from tfdist.backend.graph.split import Part, ancestors, carve
from tfdist.backend.keras.functional import trace_graph
from tfdist.pipeline.chain import Chain
from tfdist.pipeline.link import Link


@dataclasses.dataclass(frozen=True)
class StageProgram:
    """What a rank runs of one stage for each micro-batch.

    Tensors go from part to part by name, and from stage to stage by the chain's numbers for them.

    Attributes:
        forward: The outputs, and what the backward needs of the forward.
        backward: The gradients of the inputs; of the weights too where the two are not split.
        weights: The gradients of the weights; None where they are not split off.
        x: By number the names of what the stage before sends.
        inputs: By number the names of the inputs of the model that the stage reads.
        batch: The names of the tensors of the micro-batch: targets and weights.
        y: By number the names of what the next stage gets; none on the last stage.
        dy: By number the names of the gradients that come back for it.
        dx: By number the names of the gradients that go back to the stage before.
        gradients: For each variable the names of its gradient's components: one, three of an
            IndexedSlices, or none.
        same_rows: For each variable whether its gradient is an IndexedSlices whose indices are those
            of every micro-batch, as the ids of positions are.
    """

    forward: Part
    backward: Part
    weights: Part | None
    x: dict[int, str]
    inputs: dict[int, str]
    batch: tuple[str, ...]
    y: dict[int, str]
    dy: dict[int, str]
    dx: dict[int, str]
    gradients: tuple[tuple[str, ...], ...]
    same_rows: tuple[bool, ...]


def trace_stage(
    chain: Chain,
    links: Sequence[Link],
    variables: Sequence[keras.Variable],
    x: Mapping[int, tf.TensorSpec],
    inputs: Mapping[int, tf.TensorSpec],
    y: Mapping[int, tf.TensorSpec],
    *,
    with_gradient: Collection[int],
    rows_of: int,
    extra_loss: Callable[[list, tf.Tensor], tf.Tensor | None],
    loss: Callable | None = None,
    batch: Sequence[tf.TensorSpec] = (),
    splits_backward: bool = False,
) -> StageProgram:
    """Traces a stage, and carves it.

    Args:
        chain: The chain.
        links: The links of the stage.
        variables: What is trained in it.
        x: What the tensors are like that the stage before sends, by number.
        inputs: The same of the inputs of the model that it reads.
        y: The same of what it sends to the next stage; none for the last stage, which has a loss.
        with_gradient: Those of all these for which a gradient comes back.
        rows_of: That of `x` and `inputs` that has a row for each of the micro-batch.
        extra_loss: Called with what the layers have added to the loss, and the number of rows;
            returns what the stage adds, scaled as `loss` is, or None.
        loss: On the last stage: from all tensors by number and the tensors of the micro-batch to the
            scalar whose gradient is taken.
        batch: On the last stage: what the tensors of the micro-batch are like.
        splits_backward: Whether gradients of weights become a part of their own.
    """
    marks: dict = {}
    taken = [number for number in x if number in with_gradient]
    returned = [number for number in y if number in with_gradient]

    def step(*given):
        graph = tf.compat.v1.get_default_graph()
        left = iter(given)
        tensors = {number: next(left) for number in (*x, *inputs)}
        arrived = dict(tensors)
        dy = {number: next(left) for number in returned}
        rest = list(left)
        values = [variable.value for variable in variables]
        with tf.GradientTape() as tape:
            # A tape knows variables by itself, but not arrays that stand for them.
            tape.watch(values)
            losses: list = []
            sources = [tensors[number] for number in taken]
            tape.watch(sources)
            tensors = chain.unpacked(tensors)
            for link in links:
                made = link(tensors, True, losses)
                tensors |= made
                if not sources:
                    # This stage has no gradient to send on; what leads back to its first outputs is
                    # to the schedule what that gradient is elsewhere.
                    sources = [tensor for tensor in made.values() if tensor.dtype.is_floating]
                    tape.watch(sources)
            # Operations of this graph, also where the links hand on what they got.
            sent = {n: tf.identity(tensor) for n, tensor in chain.packed(tensors, y).items()}
            extra = extra_loss(losses, tf.shape(arrived[rows_of])[0])
            targets = [sent[number] for number in returned]
            seeds = list(dy.values())
            if loss is not None:
                total = loss(tensors, *rest)
                targets = [total if extra is None else total + extra]
                seeds = [tf.ones_like(targets[0])]
            elif extra is not None:
                targets, seeds = [*targets, extra], [*seeds, tf.ones_like(extra)]
        marks["forward"] = set(graph.get_operations())
        found = [None] * (len(sources) + len(values))
        if targets:
            found = tape.gradient(targets, [*sources, *values], output_gradients=seeds)
        back, gradients = found[: len(sources)], found[len(sources) :]
        # Operations of the backward pass, also where TensorFlow hands on what was there before. The
        # stage before waits for each gradient, also where nothing leads to it.
        back = [
            tf.zeros_like(source) if each is None and taken else each
            for source, each in zip(sources, back, strict=True)
        ]
        back = [tf.identity(tf.convert_to_tensor(each)) for each in back if each is not None]
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
        marks.update(arrived=arrived, sent=sent, dy=dy, rest=rest, back=back)

    likes = [*x.values(), *inputs.values(), *(y[number] for number in returned), *batch]
    graph = trace_graph(step, likes)
    given = {tensor.op for tensor in graph.inputs}
    forward = marks["forward"] - given
    backward = marks["all"] - marks["forward"] - given
    # The gradient of a loop, as an LSTM has one, adds to the loop where it is to keep its activations.
    late = ancestors([tensor for each in forward for tensor in each.inputs], backward)
    forward, backward = forward | late, backward - late
    leads_back = ancestors(marks["back"], backward)
    components = marks["gradients"]
    flat = [tensor for some in components for tensor in some]
    to_weights = ancestors(flat, backward)
    dx = dict(zip(taken, marks["back"], strict=True)) if taken else {}
    kept = list(marks["sent"].values())
    groups: list[set]
    outputs: list[list[tf.Tensor]]
    if splits_backward:
        groups = [forward, leads_back, to_weights - leads_back]
        outputs = [kept, list(dx.values()), flat]
    else:
        groups = [forward, leads_back | to_weights]
        outputs = [kept, [*dx.values(), *flat]]
    parts = carve(graph, groups, outputs)
    arrived = marks["arrived"]
    return StageProgram(
        forward=parts[0],
        backward=parts[1],
        weights=parts[2] if splits_backward else None,
        x={number: arrived[number].name for number in x},
        inputs={number: arrived[number].name for number in inputs},
        batch=tuple(tensor.name for tensor in marks["rest"]),
        y={number: tensor.name for number, tensor in marks["sent"].items()},
        dy={number: tensor.name for number, tensor in marks["dy"].items()},
        dx={number: tensor.name for number, tensor in dx.items()},
        gradients=tuple(tuple(t.name for t in some) for some in components),
        same_rows=marks["same_rows"],
    )
