"""Has the backward pass recompute tensors of the forward pass.

TensorFlow's gradients use the tensors of the forward pass, which are stored until then. A `Region` is a
sequence of operations that a forward pass adds to a graph. After the backward pass through it has been
added, its inputs from inside the region are replaced by those of copies of the operations, which wait for
the first gradient to arrive.

`Operation._update_input` is internal to TensorFlow, and the only way to change the inputs of an operation;
`tests/recompute/test_recompute.py` fails if it changes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2

from tfdist.backend.graph.compiling import AGAIN
from tfdist.backend.graph.custom_gradient import custom_gradient
from tfdist.backend.graph.provenance import with_provenance
from tfdist.backend.graph.tapes import current_pass

#: Operations on messages of other ranks, which will not be sent again.
_NOT_AGAIN = ("Horovod", "TfdistSum")

#: By graph: the replacements of tensors of the forward pass, by their names.
_copies: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
#: By graph: the names of operations that are not recomputed.
_kept: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


class Region:
    """A sequence of operations of a forward pass, from its creation to the call of `end`.

    Attributes:
        graph: The graph.
        first: The number of operations in the graph at the begin of the region.
        last: Their number at its end; None before.
        outputs: The output tensors of the region.
        arrived: The gradients of its outputs, as far as the backward pass has been added.
        backward: The number of operations in the graph when the first of these was added.
    """

    def __init__(self):
        self.graph: tf.Graph = tf.compat.v1.get_default_graph()
        self.first = len(self.graph.get_operations())
        self.last: int | None = None
        self.outputs: list[tf.Tensor] = []
        self.arrived: list[tf.Tensor] = []
        self.backward: int | None = None
        self._pass: int | None = None
        self._is_passed_again = False

    @property
    def is_passed_once(self) -> bool:
        """Whether all gradients were added in the current backward pass.

        A gradient of a gradient uses tensors of an earlier pass, which must not wait for a later one.
        """
        return not self._is_passed_again and self._pass == current_pass()

    def end(self, outputs):
        """Ends the region.

        Args:
            outputs: A nest of its outputs.

        Returns:
            The outputs for further computations.
        """
        self.last = len(self.graph.get_operations())
        return tf.nest.map_structure(self._output, outputs)

    def _output(self, tensor):
        if not tf.is_tensor(tensor) or not tensor.dtype.is_floating:
            return tensor
        return with_provenance(self._watched, tensor, mask=False)

    def _watched(self, tensor: tf.Tensor) -> tf.Tensor:
        @custom_gradient
        def pass_on(y):
            def gradient(dy):
                if self.backward is None:
                    self.backward = len(self.graph.get_operations())
                    self._pass = current_pass()
                self._is_passed_again |= self._pass != current_pass()
                self.arrived.append(dy)
                return dy

            return tf.identity(y), gradient

        self.outputs.append(tensor)
        return pass_on(tensor)

    def operations(self) -> list[tf.Operation]:
        """The operations that may be recomputed, in a topological order.

        Stateful operations are excluded, and messages of other ranks.
        """
        kept = _kept.get(self.graph, ())
        return [
            operation
            for operation in self.graph.get_operations()[self.first : self.last]
            if operation.name not in kept
            and operation.type != "Placeholder"
            and not operation.type.startswith(_NOT_AGAIN)
            and not operation.op_def.is_stateful
        ]

    def repeat(self, operations: Sequence[tf.Operation], begin: Mapping[str, tf.Tensor]) -> None:
        """Has the backward pass use the outputs of copies of some operations.

        Called after the backward pass through the region has been added to the graph.

        Args:
            operations: Operations of the region.
            begin: Replacements of their inputs in the copies, by the names of the tensors. Other inputs
                are the same, and so are stored until then.
        """
        if self.backward is None or self.last is None or not self.is_passed_once:
            return
        copies = _copies.setdefault(self.graph, {})
        copies |= begin
        known = {operation.name for operation in operations}
        kept = {*begin, *[tensor.name for tensor in self.outputs]}
        inside = [t for o in operations for t in o.outputs if t.name not in kept]
        with self.graph.as_default(), tf.control_dependencies(None):
            _replace_uses(inside, self.backward, lambda tensor: _copy(tensor, known, copies))


def keep(tensor: tf.Tensor) -> tf.Tensor:
    """A tensor that is stored until the backward pass, also in a region.

    For tensors computed from large messages of other ranks, which would have to be stored instead.
    """
    kept = tf.identity(tensor)
    if tf.is_symbolic_tensor(kept):
        _kept.setdefault(kept.graph, set()).add(kept.op.name)
    return kept


def replace(tensors: Sequence[tf.Tensor], others: Sequence[tf.Tensor], backward: int) -> None:
    """Replaces some tensors by others in the backward pass, and in all copies that it uses.

    Args:
        tensors: Tensors of one graph.
        others: The replacement of each.
        backward: The number of operations in the graph at the begin of the backward pass.
    """
    names = {tensor.name: other for tensor, other in zip(tensors, others, strict=True)}
    _copies.setdefault(tensors[0].graph, {}).update(names)
    _replace_uses(tensors, backward, lambda tensor: names[tensor.name])


def _replace_uses(tensors: Sequence[tf.Tensor], backward: int, replacement: Callable) -> None:
    if not tensors:
        return
    late = set(tensors[0].graph.get_operations()[backward:])
    uses = [
        (consumer, place, tensor)
        for tensor in tensors
        for consumer in tensor.consumers()
        if consumer in late
        for place, taken in enumerate(consumer.inputs)
        if taken.name == tensor.name
    ]
    for consumer, place, tensor in uses:
        other = replacement(tensor)
        if other is not tensor:
            consumer._update_input(place, other)


def _copy(tensor: tf.Tensor, known: set[str], copies: dict) -> tf.Tensor:
    """A copy of a tensor and of all known operations on which it depends; or the tensor itself."""
    waiting = [tensor]
    while waiting:
        operation = waiting[-1].op
        if _found(waiting[-1], known, copies) is not None:
            waiting.pop()
            continue
        lacking = [t for t in operation.inputs if _found(t, known, copies) is None]
        if lacking:
            waiting += lacking
            continue
        attributes = dict(operation.node_def.attr)
        attributes.pop("_class", None)
        attributes[AGAIN] = attr_value_pb2.AttrValue(b=True)
        copy = operation.graph.create_op(
            operation.type,
            [_found(t, known, copies) for t in operation.inputs],
            [output.dtype for output in operation.outputs],
            attrs=attributes,
            name=f"again/{operation.name}",
        )
        for before, after in zip(operation.outputs, copy.outputs, strict=True):
            after.set_shape(before.shape)
            copies[before.name] = after
    found = _found(tensor, known, copies)
    return tensor if found is None else found


def _found(tensor: tf.Tensor, known: set[str], copies: dict) -> tf.Tensor | None:
    """The replacement of a tensor in a copy; None if it has not been created yet."""
    if tensor.name in copies:
        return copies[tensor.name]
    return None if tensor.op.name in known else tensor
