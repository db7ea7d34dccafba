"""What the gradients are made of that an optimizer is given: of global ones, or of this rank's own.

A step of a user's own may do anything between `tape.gradient` and `apply`. What the tape returned is
marked here, and the graph tells what became of it.
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

    #: This rank's.
    LOCAL = enum.auto()
    #: Of the global batch, whole.
    GLOBAL = enum.auto()
    #: Of the global batch, the part of it that the optimizer of this rank applies.
    PART = enum.auto()
    #: A handle: what the tape returned, which nobody is to look at.
    HANDLE = enum.auto()
    #: A sum over the replicas, taken by the step.
    SUM = enum.auto()


class Marks:
    """The tensors whose origin is known, in one call of a step."""

    def __init__(self):
        self._found: dict[tuple, tuple[tf.Tensor, Origin]] = {}

    def put(self, gradients: Iterable, origin: Origin) -> None:
        """Notes where gradients come from: tensors, IndexedSlices or None."""
        for gradient in gradients:
            for part in parts_of_gradient(gradient):
                # The tensor is kept, so that its id stays its own.
                self._found[_key(part)] = part, origin

    def of(self, tensor: tf.Tensor) -> Origin | None:
        """The origin of this very tensor."""
        found = self._found.get(_key(tensor))
        return None if found is None else found[1]

    def trace(self, gradient) -> tuple[frozenset[Origin], bool]:
        """What a gradient is made of.

        Eager tensors do not tell. Of rows the indices do, which most computations leave as they are.

        Returns:
            The origins that it leads back to, and whether it is made of nothing else that may differ
            between ranks: constants and variables beside them.
        """
        values, *indices = parts_of_gradient(gradient)
        found, is_same = self._origins([values])
        if not found:
            found, _ = self._origins(indices)
        return frozenset(found), is_same

    def global_origin(self, gradient) -> Origin:
        """`GLOBAL` or `PART` of what is made of gradients that are; else `LOCAL`."""
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
    """The tensors of a gradient, its values first; none of None."""
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
    """Gradients that an optimizer is given: as a tape returned them, or as the step has made them.

    Args:
        gradients: Tensors, IndexedSlices or None.
        variables: Their variables.
        replica: The replica context.

    Returns:
        What handles among them stand for, and of each whether it is still to be reduced.

    Raises:
        ValueError: One is of a kind that no reduction makes right.
    """
    reads, marks = replica.gradient_reads, replica.gradient_marks
    given = list(gradients) if reads is None else reads.behind(gradients)
    if replica.gradients_are_global:
        return given, [Origin.GLOBAL] * len(given)
    if reads is not None:
        return given, reads.origins(given, variables)
    if marks is not None:
        return given, [marks.global_origin(gradient) for gradient in given]
    return given, [Origin.LOCAL] * len(given)
