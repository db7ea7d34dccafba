"""The origins of the gradients that an optimizer receives: global gradients, or gradients of this rank.

A custom training step may do anything between `tape.gradient` and `apply`. The gradients that the tape
returned are marked here, and the graph shows what was computed from them.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence

import tensorflow as tf

from tfdist.backend.graph.dependence import trace_back
from tfdist.collectives.shared import is_sum_over_ranks
from tfdist.step.context import ReplicaContext


class Origin(enum.Enum):
    """Where a gradient comes from."""

    #: The gradient of this rank.
    LOCAL = enum.auto()
    #: The whole gradient of the global batch.
    GLOBAL = enum.auto()
    #: The part of the gradient of the global batch that the optimizer of this rank applies.
    PART = enum.auto()
    #: A handle: returned by the tape, and not to be read.
    HANDLE = enum.auto()
    #: A sum over the replicas, computed by the step.
    SUM = enum.auto()


class Marks:
    """The tensors with a known origin in one call of a step."""

    def __init__(self):
        self._found: dict[tuple, tuple[tf.Tensor, Origin]] = {}

    def put(self, gradients: Iterable, origin: Origin) -> None:
        """Records the origin of gradients: tensors, IndexedSlices or None."""
        for gradient in gradients:
            for part in parts_of_gradient(gradient):
                # Keeping the tensor keeps its id unique.
                self._found[_key(part)] = part, origin

    def of(self, tensor: tf.Tensor) -> Origin | None:
        """The origin of a marked tensor; None for any other."""
        return self._found.get(_key(tensor), (None, None))[1]

    def trace(self, gradient) -> tuple[frozenset[Origin], bool]:
        """Traces what a gradient was computed from.

        Eager tensors have no history. Sparse gradients are also traced by their indices, which most
        computations do not change.

        Returns:
            The origins that it was computed from, and whether all its other inputs, such as constants
            and variables, are the same on all ranks.
        """
        values, *indices = parts_of_gradient(gradient)
        found, is_same = self._origins([values])
        if not found:
            found, _ = self._origins(indices)
        return frozenset(found), is_same

    def global_origin(self, gradient) -> Origin:
        """`GLOBAL` or `PART` for what was computed from such gradients; otherwise `LOCAL`."""
        found = self.trace(gradient)[0] if gradient is not None else ()
        return next((each for each in (Origin.PART, Origin.GLOBAL) if each in found), Origin.LOCAL)

    def _origins(self, tensors: Sequence[tf.Tensor]) -> tuple[set[Origin], bool]:
        def is_end(tensor):
            return self.of(tensor) is not None or is_sum_over_ranks(tensor)

        ends, is_same = trace_back(tensors, is_end)
        found = set()
        for end in ends:
            origin = self.of(end)
            if origin is not None:
                found.add(origin)
            elif self._origins(list(end.op.inputs))[0]:
                found.add(Origin.SUM)
            else:
                is_same = False
        return found, is_same


def parts_of_gradient(gradient) -> Sequence[tf.Tensor]:
    """The tensors of a gradient, its values first; none for None."""
    if gradient is None:
        return ()
    if isinstance(gradient, tf.IndexedSlices):
        return gradient.values, gradient.indices
    return (gradient,)


def _key(tensor) -> tuple:
    return (id(tensor.graph), tensor.name) if tf.is_symbolic_tensor(tensor) else (id(tensor),)


def origins_of(
    gradients: Sequence, variables: Sequence, replica: ReplicaContext
) -> tuple[list, list[Origin]]:
    """The origins of the gradients that an optimizer receives, from a tape or from the step.

    Args:
        gradients: Tensors, IndexedSlices or None.
        variables: Their variables.
        replica: The replica context.

    Returns:
        The gradients, with handles replaced by the gradients that they represent, and their origins.

    Raises:
        ValueError: No reduction of one of them gives the gradient of the global batch.
    """
    reads, marks = replica.gradient_reads, replica.gradient_marks
    given = list(gradients) if reads is None else reads.behind(gradients)
    if reads is not None and not replica.gradients_are_global:
        return given, reads.origins(given, variables)
    if marks is not None and not replica.gradients_are_global:
        return given, [marks.global_origin(gradient) for gradient in given]
    origin = Origin.GLOBAL if replica.gradients_are_global else Origin.LOCAL
    return given, [origin] * len(given)
