"""The floating-point operations of a training step, counted in its graph.

The count includes matrix products and convolutions, a multiplication and an addition as two
operations, forward and backward, as in the published figures of model FLOPs utilization (Chowdhery et
al. 2022, "PaLM", appendix B). Elementwise operations are not counted: they are bound by memory.
Operations that recompute repeats are counted separately: they are work of the machine, not of the model.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable

import tensorflow as tf

#: The prefix that `tfdist.backend.graph.rematerialize` gives to operations that run again.
_AGAIN = "again/"


@dataclasses.dataclass(frozen=True)
class Flops:
    """The floating-point operations of a step on one rank.

    Attributes:
        model: Those of the model.
        again: The additional ones of recompute.
        is_whole: Whether all products were counted. They are not where sizes are unknown, or the number of
            iterations of a loop is only known at run time.
    """

    model: float = 0.0
    again: float = 0.0
    is_whole: bool = True

    def __add__(self, other: Flops) -> Flops:
        return Flops(
            self.model + other.model, self.again + other.again, self.is_whole and other.is_whole
        )


def count_flops(graph: tf.Graph, outputs: Iterable[tf.Tensor] = ()) -> Flops:
    """Counts the operations of a graph, and of the functions that it calls.

    Operations whose results are not used do not count, since they do not run: TensorFlow's gradient of
    a convolution also has the gradient of an input that may not be needed. Of a condition, the branch
    with the most operations counts. A loop whose number of iterations is not in the graph counts once.

    Args:
        graph: The graph.
        outputs: The tensors that are fetched, in addition to the outputs of a finished graph.
    """
    total = Flops()
    for operation in _alive(graph, [*outputs, *getattr(graph, "outputs", ())]):
        counter = _COUNTERS.get(operation.type)
        if counter is not None:
            found = counter(operation)
            if found is None:
                total += Flops(is_whole=False)
            elif operation.name.startswith(_AGAIN) or f"/{_AGAIN}" in operation.name:
                total += Flops(again=found)
            else:
                total += Flops(model=found)
            continue
        inner = _called_graphs(operation)
        if not inner:
            continue
        counts = [count_flops(each) for each in inner.values()]
        if operation.type in ("If", "StatelessIf", "Case", "StatelessCase"):
            total += max(counts, key=lambda each: each.model)
        elif operation.type in ("While", "StatelessWhile"):
            total += _of_loop(operation, sum(counts, Flops()))
        else:
            total += sum(counts, Flops())
    return total


def _called_graphs(operation: tf.Operation) -> dict[str, tf.Graph]:
    """The graphs of the functions that an operation calls, by the names of its attributes."""
    found = {}
    for name, value in operation.node_def.attr.items():
        called = [value.func] if value.HasField("func") else list(value.list.func)
        for place, each in enumerate(called):
            inner = getattr(operation.graph._functions.get(each.name), "graph", None)
            if inner is not None:
                found[f"{name}/{place}"] = inner
    return found


def _alive(graph: tf.Graph, outputs: Iterable[tf.Tensor]) -> list[tf.Operation]:
    """The operations that run: those with an effect, and all on which they and the outputs depend."""
    waiting = [operation for operation in graph.get_operations() if operation.op_def.is_stateful]
    waiting += [tensor.op for tensor in outputs if tf.is_symbolic_tensor(tensor)]
    found: dict[str, tf.Operation] = {}
    while waiting:
        operation = waiting.pop()
        if operation.name not in found and operation.graph is graph:
            found[operation.name] = operation
            waiting += [tensor.op for tensor in operation.inputs]
            waiting += operation.control_inputs
    return list(found.values())


def _of_loop(operation: tf.Operation, once: Flops) -> Flops:
    if not once.model and not once.again:
        return Flops()
    # Keras and TensorFlow pass the limit of a loop as its second input.
    limit = tf.get_static_value(operation.inputs[1]) if len(operation.inputs) > 1 else None
    turns = None if limit is None or limit.ndim or limit.dtype.kind not in "iu" else int(limit)
    if turns is None or turns < 0:
        return Flops(once.model, once.again, is_whole=False)
    return Flops(once.model * turns, once.again * turns, once.is_whole)


def _elements(tensor: tf.Tensor) -> int | None:
    return tensor.shape.num_elements()


def _times(*factors: int | None) -> float | None:
    known = [factor for factor in factors if factor is not None]
    return float(math.prod(known)) if len(known) == len(factors) else None


def _product(transposed: str) -> Callable[[tf.Operation], float | None]:
    def count(operation: tf.Operation) -> float | None:
        one = operation.inputs[0].shape
        if one.rank is None:
            return None
        summed = one[-2] if operation.get_attr(transposed) else one[-1]
        return _times(2, _elements(operation.outputs[0]), summed)

    return count


def _einsum(operation: tf.Operation) -> float | None:
    if len(operation.inputs) < 2:
        return 0.0
    terms = operation.get_attr("equation").decode().replace(" ", "").split("->")[0].split(",")
    sizes: dict[str, int | None] = {}
    for term, tensor in zip(terms, operation.inputs, strict=True):
        if tensor.shape.rank is None:
            return None
        before, dots, behind = term.partition("...")
        spread = tensor.shape.rank - len(before) - len(behind) if dots else 0
        labels = [*before, *(f".{place}" for place in range(-spread, 0)), *behind]
        for label, size in zip(labels, tensor.shape, strict=True):
            known = sizes.get(label)
            sizes[label] = size if known in (None, 1) else known
    return _times(2, *sizes.values())


def _convolution(filters: Callable, result: Callable, *, depthwise: bool = False) -> Callable:
    """Each entry of the result is a product with the part of a filter for one output channel."""

    def count(operation: tf.Operation) -> float | None:
        shape = filters(operation).shape
        if shape.rank is None:
            return None
        taken = shape[:-2] if depthwise else shape[:-1]
        return _times(2, _elements(result(operation)), taken.num_elements())

    return count


def _input(place: int) -> Callable[[tf.Operation], tf.Tensor]:
    return lambda operation: operation.inputs[place]


def _output(operation: tf.Operation) -> tf.Tensor:
    return operation.outputs[0]


_COUNTERS: dict[str, Callable[[tf.Operation], float | None]] = {
    "MatMul": _product("transpose_a"),
    "BatchMatMul": _product("adj_x"),
    "BatchMatMulV2": _product("adj_x"),
    "BatchMatMulV3": _product("adj_x"),
    "Einsum": _einsum,
    "DepthwiseConv2dNative": _convolution(_input(1), _output, depthwise=True),
    "DepthwiseConv2dNativeBackpropInput": _convolution(_input(1), _input(2), depthwise=True),
    "DepthwiseConv2dNativeBackpropFilter": _convolution(_output, _input(2), depthwise=True),
    **{
        f"{name}{suffix}": counter
        for name, suffix, counter in [
            (name, suffix, counter)
            for name, version in (("Conv2D", ""), ("Conv3D", "V2"))
            for suffix, counter in (
                ("", _convolution(_input(1), _output)),
                (f"BackpropInput{version}", _convolution(_input(1), _input(2))),
                (f"BackpropFilter{version}", _convolution(_output, _input(2))),
            )
        ]
    },
}
