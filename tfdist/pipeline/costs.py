"""The costs of a chain's segments."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import tensorflow as tf

from tfdist.backend.keras.functional import is_deferred, trace_graph
from tfdist.pipeline.chain import Chain
from tfdist.pipeline.segment import Segment
from tfdist.utils import checks
from tfdist.utils.lazy import require_addon

#: Operations whose result is their first input, or the one of the same index, in another shape.
_ALIASES = (
    "ExpandDims", "Identity", "IdentityN", "PreventGradient", "Reshape", "Squeeze", "StopGradient",
)  # fmt: skip
#: Weights and constants take no additional memory in a step.
_FREE = ("ReadVariableOp", "Const", "Placeholder")


def segment_costs(
    chain: Chain, name: str, given: str | Sequence[float], kinds: Sequence[str]
) -> tuple[float, ...]:
    """The cost of each segment.

    Args:
        chain: The chain.
        name: The name of the argument, for messages.
        given: Its value: a number for each segment, or one of `kinds`.
        kinds: The supported ones of "flops", "parameters" and "seconds" (`measure_seconds`, on this rank
            alone).

    Raises:
        ValueError: The value is neither.
    """
    numbers = check_costs(name, given, kinds, len(chain))
    if numbers is not None:
        return numbers
    if given == "flops":
        return tuple(map(float, chain.flops()))
    if given == "seconds":
        monitoring = require_addon("monitoring", 'cost="seconds"')
        return tuple(monitoring.measure_seconds(chain))
    return tuple(float(segment.parameters) for segment in chain.segments)


def check_costs(
    name: str, given: str | Sequence[float], kinds: Sequence[str], count: int | None = None
) -> tuple[float, ...] | None:
    """Checks an argument with costs, as far as this is possible without a chain.

    Args:
        name: The name of the argument, for messages.
        given: Its value.
        kinds: The supported strings.
        count: The number of segments; None if it is not known yet.

    Returns:
        The numbers; None for one of the strings.

    Raises:
        ValueError: The value is neither.
    """
    if isinstance(given, str) and given in kinds:
        return None
    try:
        numbers = checks.numbers_of(name, given, minimum=0)
    except ValueError:
        numbers = ()
    if not numbers or count not in (None, len(numbers)):
        each = "each part" if count is None else f"each of the {count} parts of the chain"
        meaning = f"{', '.join(map(repr, kinds))}, or a number of at least 0 for {each}"
        raise checks.refuse(name, given, meaning)
    return tuple(map(float, numbers))


def training_graph(
    segment: Segment, specs: Sequence[tf.TensorSpec]
) -> tuple[tf.Graph, list[tf.Tensor], int]:
    """The graph of a forward and a backward pass through a segment, which is not run.

    Args:
        segment: The segment.
        specs: The specifications of the tensors that it reads.

    Returns:
        The graph, the tensors that the segment reads, and the number of operations of the forward pass.
    """
    marks: dict = {}

    def step(*tensors):
        marks["read"] = list(tensors[: len(specs)])
        return forward_and_backward(segment, marks["read"], tensors[len(specs) :], marks)

    values = [tf.TensorSpec(v.shape, v.dtype) for v in segment.deferred_variables]
    graph = trace_graph(step, [*specs, *values])
    return graph, marks["read"], marks["forward"]


def kept_bytes(graph: tf.Graph, backward: int) -> int:
    """The bytes of the activations, which the backward pass reads from the forward pass.

    Args:
        graph: The graph of a forward and a backward pass.
        backward: The number of operations of the forward pass.
    """
    late = set(graph.get_operations()[backward:])
    inputs = [tensor for operation in late for tensor in operation.inputs if tensor.op not in late]
    kept = {tensor.name: tensor for tensor in map(_buffer_of, inputs)}
    return sum(bytes_of(tensor) for tensor in kept.values() if tensor.op.type not in _FREE)


def _buffer_of(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor with the same memory before it was renamed or reshaped."""
    while tensor.op.type in _ALIASES:
        place = tensor.value_index if tensor.op.type == "IdentityN" else 0
        tensor = tensor.op.inputs[place]
    return tensor


def bytes_of(tensor: tf.Tensor) -> int:
    """The bytes of a tensor; 0 if its shape is unknown."""
    return (tensor.shape.num_elements() or 0) * tensor.dtype.size


def forward_and_backward(segment: Segment, x: Sequence, values: Sequence, marks: dict) -> list:
    """The gradients of a segment's inputs and weights; `values` are those of deferred weights."""
    with tf.GradientTape() as tape:
        sources = [source for source in (*x, *values) if source.dtype.is_floating]
        tape.watch(sources)
        # Changes of state, such as moving averages, are discarded.
        with keras.StatelessScope(
            list(zip(segment.deferred_variables, values, strict=True)), initialize_variables=False
        ):
            y = segment.model(list(x), training=True)
    sources += [v.value for v in segment.trainable_variables if not is_deferred(v)]
    marks["forward"] = len(tf.compat.v1.get_default_graph().get_operations())
    # Integers have no gradient.
    made = [tensor for tensor in keras.tree.flatten(y) if tensor.dtype.is_floating]
    gradients = tape.gradient(made, sources) if made else []
    return [gradient for gradient in gradients if gradient is not None]
