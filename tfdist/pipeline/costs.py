"""What the links of a chain cost, by the clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from tfdist.backend.keras.functional import trace_graph, without_values
from tfdist.collectives import Group
from tfdist.collectives.objects import all_gather_object
from tfdist.pipeline.chain import Chain
from tfdist.pipeline.link import Link
from tfdist.utils import checks

#: Far more than a micro-batch has, or a median needs.
_MOST_ROWS = 1 << 20
_MOST_REPEATS = 10_000
#: Operations whose result is their first input, or that of its number, in another shape.
_ALIASES = (
    "ExpandDims", "Identity", "IdentityN", "PreventGradient", "Reshape", "Squeeze", "StopGradient",
)  # fmt: skip


def link_costs(
    chain: Chain, name: str, given: str | Sequence[float], kinds: Sequence[str]
) -> tuple[float, ...]:
    """What each link costs.

    Args:
        chain: The chain.
        name: The argument that says so, for messages.
        given: Its value: a number for each link, or one of `kinds`.
        kinds: Those of "flops", "parameters" and "seconds" (`measure_seconds`, on this rank alone)
            that have a meaning there.

    Raises:
        ValueError: It is something else.
    """
    meaning = (
        f"{', '.join(map(repr, kinds))}, or a number of at least 0 for each of the {len(chain)} parts "
        "of the chain"
    )
    if not isinstance(given, str):
        try:
            numbers = checks.numbers_of(name, given, minimum=0)
        except ValueError:
            raise checks.refuse(name, given, meaning) from None
        if len(numbers) != len(chain):
            raise checks.refuse(name, given, meaning)
        return tuple(float(each) for each in numbers)
    ways: dict[str, Callable[[], Sequence[float]]] = {
        "flops": chain.flops,
        "parameters": lambda: [link.parameters for link in chain.links],
        "seconds": lambda: measure_seconds(chain),
    }
    if given not in kinds:
        raise checks.refuse(name, given, meaning)
    return tuple(float(each) for each in ways[given]())


def measure_seconds(
    chain: Chain, group: Group | None = None, *, rows: int = 8, repeats: int = 5
) -> list[float]:
    """The seconds that a forward and a backward pass of each link take.

    Weights that have no values yet count as zeros for it: no link but the one that is measured
    takes memory.

    Args:
        chain: The chain; of its links' inputs only the number of rows is open.
        group: The ranks that have to agree, which all call this: each gets the mean of all.
        rows: The rows of the inputs: like those of a micro-batch, if it is to be exact.
        repeats: How often each link runs; the median counts.

    Returns:
        Seconds, for each link.

    Raises:
        ValueError: A link's input has a dim of unknown size.
    """
    checks.instance("chain", chain, Chain, "a Chain")
    checks.instance("group", group, Group, "a Group, as of `strategy.group()`", optional=True)
    rows = checks.integer("rows", rows, minimum=1, maximum=_MOST_ROWS)
    repeats = checks.integer("repeats", repeats, minimum=1, maximum=_MOST_REPEATS)
    chain.check_known_shapes("links can be timed")
    specs = chain.specs(rows)
    found = [_seconds(link, link.arguments(specs), repeats) for link in chain.links]
    if group is None or group.size == 1:
        return found
    every = all_gather_object(found, group, name="pipeline/costs")
    return [statistics.fmean(seconds) for seconds in zip(*every, strict=True)]


def training_graph(
    link: Link, specs: Sequence[tf.TensorSpec]
) -> tuple[tf.Graph, list[tf.Tensor], int]:
    """The graph of a forward and a backward pass through a link, which nothing runs.

    Args:
        link: The link.
        specs: What it reads.

    Returns:
        The graph, what the link reads, and how many operations the forward pass has.
    """
    marks: dict = {}

    def step(*tensors):
        read, values = tensors[: len(specs)], tensors[len(specs) :]
        gradients = _forward_and_backward(link, read, values, marks)
        marks["read"] = list(read)
        return gradients

    values = [tf.TensorSpec(v.shape, v.dtype) for v in _lacking(link)]
    graph = trace_graph(step, [*specs, *values])
    return graph, marks["read"], marks["forward"]


def kept_bytes(graph: tf.Graph, backward: int) -> int:
    """The bytes of what the backward pass takes of the forward pass: activations.

    Args:
        graph: Of a forward and a backward pass.
        backward: How many operations the forward pass has.
    """
    late = set(graph.get_operations()[backward:])
    kept = {}
    for operation in late:
        for tensor in operation.inputs:
            if tensor.op not in late:
                tensor = _buffer_of(tensor)
                kept[tensor.name] = tensor
    # Weights and constants take no memory of their own in a step.
    free = ("ReadVariableOp", "Const", "Placeholder")
    return sum(bytes_of(tensor) for tensor in kept.values() if tensor.op.type not in free)


def _buffer_of(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor whose memory this one has: what only renames or reshapes moves nothing."""
    while tensor.op.type in _ALIASES:
        place = tensor.value_index if tensor.op.type == "IdentityN" else 0
        tensor = tensor.op.inputs[place]
    return tensor


def bytes_of(tensor: tf.Tensor) -> int:
    """The bytes of a tensor, as far as its shape is known."""
    return (tensor.shape.num_elements() or 0) * tensor.dtype.size


def _lacking(link: Link) -> list[keras.Variable]:
    return [variable for variable in link.variables if without_values(variable)]


def _forward_and_backward(link: Link, x: Sequence, values: Sequence, marks: dict) -> list:
    """The gradients of a link's inputs and weights; `values` are of those weights without."""
    with tf.GradientTape() as tape:
        sources = [source for source in (*x, *values) if source.dtype.is_floating]
        tape.watch(sources)
        # What the link changes, as moving averages, stays as it was.
        with keras.StatelessScope(
            list(zip(_lacking(link), values, strict=True)), initialize_variables=False
        ):
            y = link.model(list(x), training=True)
    there = [v.value for v in link.trainable_variables if not without_values(v)]
    marks["forward"] = len(tf.compat.v1.get_default_graph().get_operations())
    # Of an integer nothing has a gradient.
    made = [tensor for tensor in keras.tree.flatten(y) if tensor.dtype.is_floating]
    gradients = tape.gradient(made, [*sources, *there]) if made else []
    return [gradient for gradient in gradients if gradient is not None]


def _seconds(link: Link, specs: Sequence[tf.TensorSpec], repeats: int) -> float:
    x = [
        (tf.random.normal if spec.dtype.is_floating else tf.zeros)(spec.shape, dtype=spec.dtype)
        for spec in specs
    ]
    values = [tf.zeros(variable.shape, variable.dtype) for variable in _lacking(link)]
    step = tf.function(lambda x, values: _forward_and_backward(link, x, values, {}))
    times = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        step(x, values)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])
