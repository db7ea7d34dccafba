"""A stage of a pipeline as functions: forward, backward, gradients of weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import keras
import tensorflow as tf

from tfdist.backend.graph.dependence import is_independent_of_batch
from tfdist.backend.graph.separate import mark_separate
from tfdist.backend.graph.split import Subgraph, ancestors, split_graph
from tfdist.backend.keras.functional import trace_graph
from tfdist.pipeline.chain import Chain
from tfdist.pipeline.segment import Segment

#: The number of a stage's losses among the sources of its gradients.
LOSS = -1


@dataclasses.dataclass(frozen=True)
class StageProgram:
    """The computations of one stage for each micro-batch.

    Tensors are passed between these functions by name, and between stages by their numbers in the chain.

    Attributes:
        forward: Computes the outputs, and the tensors of the forward that the backward reads.
        backward: Computes the gradients of the inputs; of the weights too unless the two are split.
        weights: Computes the gradients of the weights; None unless the two are split.
        x: The names of the tensors from the previous stage, by number.
        inputs: The names of the inputs of the model that the stage reads, by number.
        batch: The names of the tensors of the micro-batch: targets and weights.
        y: The names of the tensors for the next stage, by number; empty on the last stage.
        dy: The names of their gradients, by number.
        dx: The names of the gradients for the previous stage, by number.
        gradients: For each variable the names of the components of its gradient: one, three for an
            IndexedSlices, or none.
        same_rows: For each variable whether its gradient is an IndexedSlices with the same indices for
            every micro-batch, such as those of positions.
        divisors: Computes from inputs and batch what losses are divided by; None if they are means over samples.
        sources: For each name of a gradient the numbers of those of `dy` that it depends on, and `LOSS` if it
            depends on the losses of the stage.
    """

    forward: Subgraph
    backward: Subgraph
    weights: Subgraph | None
    x: dict[int, str]
    inputs: dict[int, str]
    batch: tuple[str, ...]
    y: dict[int, str]
    dy: dict[int, str]
    dx: dict[int, str]
    gradients: tuple[tuple[str, ...], ...]
    same_rows: tuple[bool, ...]
    divisors: Subgraph | None
    sources: dict[str, frozenset[int]]


def trace_stage(
    chain: Chain,
    segments: Sequence[Segment],
    variables: Sequence[keras.Variable],
    x: Mapping[int, tf.TensorSpec],
    inputs: Mapping[int, tf.TensorSpec],
    y: Mapping[int, tf.TensorSpec],
    *,
    rows_of: int,
    extra_loss: Callable[[list, tf.Tensor], tf.Tensor | None],
    loss: Callable | None = None,
    batch: Sequence[tf.TensorSpec] = (),
    splits_backward: bool = False,
) -> StageProgram:
    """Traces a stage, and splits its graph into functions.

    Args:
        chain: The chain.
        segments: The segments of the stage.
        variables: Its trained variables.
        x: The specifications of the tensors from the previous stage, by number.
        inputs: The specifications of the inputs of the model that it reads, by number.
        y: The specifications of the tensors for the next stage; empty for the last stage, which has a loss.
        rows_of: The number of a tensor of `x` or `inputs` that has a row for each of the micro-batch.
        extra_loss: Called with the losses of layers and the number of rows; returns the stage's addition to
            the loss, scaled as `loss` is, or None.
        loss: On the last stage: from all tensors by number and the tensors of the micro-batch to the
            scalar to differentiate, and the scalars of `StageProgram.divisors`.
        batch: On the last stage: the specifications of the tensors of the micro-batch.
        splits_backward: Whether gradients of weights become a separate function.

    Raises:
        ValueError: What a loss is divided by depends on tensors from the previous stage.
    """
    marks: dict = {}
    with_gradient = chain.with_gradient()
    taken = [number for number in x if number in with_gradient]
    returned = [number for number in y if number in with_gradient]

    def step(*given):
        graph = tf.compat.v1.get_default_graph()
        mark_separate(graph)
        left = iter(given)
        arrived = {number: next(left) for number in (*x, *inputs)}
        dy = {number: next(left) for number in returned}
        rest = list(left)
        values = [variable.value for variable in variables]
        with tf.GradientTape() as tape:
            losses: list = []
            sources = [arrived[number] for number in taken]
            # A tape watches variables automatically, but not arrays that replace them.
            tape.watch([*values, *sources])
            tensors = chain.unpacked(arrived)
            for segment in segments:
                made = segment(tensors, True, losses)
                tensors |= made
                if not sources:
                    # Without a gradient for the previous stage, the gradient of the stage's first
                    # outputs takes its place in the schedule.
                    sources = [tensor for tensor in made.values() if tensor.dtype.is_floating]
                    tape.watch(sources)
            # Operations of this graph, also if a segment returns its input.
            sent = {n: tf.identity(tensor) for n, tensor in chain.packed(tensors, y).items()}
            extra = extra_loss(losses, tf.shape(arrived[rows_of])[0])
            targets, seeds = [sent[number] for number in returned], list(dy.values())
            if loss is not None:
                total, marks["divisors"] = loss(tensors, *rest)
                extra = total if extra is None else total + extra
            if extra is not None:
                targets, seeds = [*targets, extra], [*seeds, tf.ones_like(extra)]
        forward = set(graph.get_operations())
        found = [None] * (len(sources) + len(values))
        if targets:
            found = tape.gradient(targets, [*sources, *values], output_gradients=seeds)
        # Operations of the backward pass, also if TensorFlow returns an earlier tensor. The previous
        # stage waits for each gradient, so it is zero if nothing depends on its tensor.
        back = [
            tf.zeros_like(source) if each is None and taken else each
            for source, each in zip(sources, found, strict=False)
        ]
        back = [tf.identity(tf.convert_to_tensor(each)) for each in back if each is not None]
        gradients = found[len(sources) :]
        components: list[list[tf.Tensor]] = [
            []
            if each is None
            else [tf.identity(part) for part in tf.nest.flatten(each, expand_composites=True)]
            for each in gradients
        ]
        same_rows = tuple(
            isinstance(each, tf.IndexedSlices) and is_independent_of_batch(each.indices)
            for each in gradients
        )
        marks.update(forward=forward, all=set(graph.get_operations()), back=back)
        marks.update(arrived=arrived, inputs=inputs, sent=sent, dy=dy, rest=rest)
        marks.update(components=components, same_rows=same_rows)
        marks.update(seeds=zip([*returned, LOSS], seeds, strict=False))

    likes = [*x.values(), *inputs.values(), *(y[number] for number in returned), *batch]
    graph = trace_graph(step, likes)
    given = {tensor.op for tensor in graph.inputs}
    forward = marks["forward"] - given
    backward = marks["all"] - marks["forward"] - given
    # The gradient of a loop, such as an LSTM's, adds operations to the loop that keep its activations.
    late = ancestors([tensor for each in forward for tensor in each.inputs], backward)
    forward, backward = forward | late, backward - late
    leads_back = ancestors(marks["back"], backward)
    flat = [tensor for some in marks["components"] for tensor in some]
    to_weights = ancestors(flat, backward)
    dx = dict(zip(taken, marks["back"], strict=True)) if taken else {}
    kept = list(marks["sent"].values())
    if splits_backward:
        groups = [forward, leads_back, to_weights - leads_back]
        outputs = [kept, list(dx.values()), flat]
    else:
        groups = [forward, leads_back | to_weights]
        outputs = [kept, [*dx.values(), *flat]]
    parts = split_graph(graph, groups, outputs)

    def names(tensors: Mapping[int, tf.Tensor]) -> dict[int, str]:
        return {number: tensor.name for number, tensor in tensors.items()}

    sources = {seed.op: frozenset([number]) for number, seed in marks["seeds"]}
    for operation in graph.get_operations():  # In topological order, except for what loops keep.
        found = [sources[t.op] for t in operation.inputs if t.op in sources]
        sources.setdefault(operation, frozenset().union(*found))
    arrived = names(marks["arrived"])
    return StageProgram(
        forward=parts[0],
        backward=parts[1],
        weights=parts[2] if splits_backward else None,
        x={number: arrived[number] for number in x},
        inputs={number: arrived[number] for number in inputs},
        batch=tuple(tensor.name for tensor in marks["rest"]),
        y=names(marks["sent"]),
        dy=names(marks["dy"]),
        dx=names(dx),
        gradients=tuple(tuple(t.name for t in some) for some in marks["components"]),
        same_rows=marks["same_rows"],
        divisors=_divisors(graph, forward, marks),
        sources={tensor.name: sources[tensor.op] for tensor in [*dx.values(), *flat]},
    )


def _divisors(graph, forward: set, marks: dict) -> Subgraph | None:
    """What losses are divided by, as a function of what is known before the first micro-batch."""
    wanted = marks.get("divisors")
    if not wanted:
        return None
    (found,) = split_graph(graph, [ancestors(wanted, forward)], [wanted])
    known = {tensor.name for tensor in marks["rest"]} | {
        tensor.name for number, tensor in marks["arrived"].items() if number in marks["inputs"]
    }
    if not known.issuperset(found.inputs):
        raise ValueError(
            "A loss that is divided by a mask or by weights requires, with several micro-batches, that "
            "these follow from inputs, targets and sample weights. Received: a mask that earlier stages "
            "compute. Set the `sample_weight` of other entries to 0 and use reduction='sum_over_batch_size', or use "
            "num_microbatches=1."
        )
    return found
