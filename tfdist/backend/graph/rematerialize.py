"""Has the backward pass make again what it would take of the forward pass.

TensorFlow's gradients use the tensors of the forward pass, which stand until then. A `Region` is a
run of operations that a forward pass adds to a graph. Once the backward pass through it is in the
graph too, what that takes from inside of the region is taken from copies of the operations, which
wait for the first gradient to arrive.

`Operation._update_input` is TensorFlow's own, and the one way to change what an operation takes;
`tests/recompute/test_recompute.py` fails where it moves.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf

from tfdist.backend.graph.custom_gradient import custom_gradient
from tfdist.backend.graph.provenance import with_provenance
from tfdist.backend.graph.tapes import current_pass

#: Made of what other ranks sent, which will not be sent again.
_NOT_AGAIN = ("Horovod", "TfdistSum")

#: By graph: for the names of tensors of the forward pass, what stands for them later.
_copies: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
#: By graph: the names of operations that do not run twice.
_kept: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


class Region:
    """A run of operations of a forward pass.

    Made where it begins; `end` is called where it ends.

    Attributes:
        graph: The graph.
        first: How many operations the graph had when it began.
        last: How many when it ended; None before.
        outputs: The tensors that lead out of it.
        arrived: The gradients of its outputs that have come, once the backward pass is there.
        backward: How many operations the graph had when the first came.
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
        """Whether all gradients have come in the backward pass under way.

        A gradient of a gradient takes what an earlier pass has made, which must not wait for a later one.
        """
        return not self._is_passed_again and self._pass == current_pass()

    def end(self, outputs):
        """Ends the region.

        Args:
            outputs: What leads out of it: a nest.

        Returns:
            The same, to go on with.
        """
        self.last = len(self.graph.get_operations())
        return tf.nest.map_structure(
            lambda y: (
                with_provenance(self._watched, y, mask=False)
                if tf.is_tensor(y) and y.dtype.is_floating
                else y
            ),
            outputs,
        )

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
        """Those of its operations that may run twice, in an order in which they can run.

        Not those with an effect, and not what came from other ranks.
        """
        found = self.graph.get_operations()[self.first : self.last]
        kept = _kept.get(self.graph, ())
        return [o for o in found if not _has_effect(o) and o.name not in kept]

    def repeat(self, operations: Sequence[tf.Operation], begin: Mapping[str, tf.Tensor]) -> None:
        """Has the backward pass take copies of what some operations make.

        Called when the backward pass through the region is in the graph.

        Args:
            operations: Some of the region's.
            begin: By names of tensors that they take, what their copies take. What they take
                else is taken by the copies too, and so stands until then.
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
    """A tensor that stands until the backward pass, also in a region.

    For what is made of much that came from other ranks: all of that would have to be kept instead.
    """
    kept = tf.identity(tensor)
    if tf.is_symbolic_tensor(kept):
        _kept.setdefault(kept.graph, set()).add(kept.op.name)
    return kept


def replace(tensors: Sequence[tf.Tensor], others: Sequence[tf.Tensor], backward: int) -> None:
    """Has the backward pass, and all copies that it takes, take others in place of some tensors.

    Args:
        tensors: Tensors of one graph.
        others: What stands for each.
        backward: How many operations the graph had when the backward pass began.
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


def _has_effect(operation: tf.Operation) -> bool:
    """Whether an operation is not to run twice."""
    if operation.type == "Placeholder" or operation.type.startswith(_NOT_AGAIN):
        return True
    return operation.op_def.is_stateful


def _copy(tensor: tf.Tensor, known: set[str], copies: dict) -> tf.Tensor:
    """A tensor made again, with all that it takes of some operations; or itself."""
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
    """What stands for a tensor in a copy; None where that is still to be made."""
    if tensor.name in copies:
        return copies[tensor.name]
    return None if tensor.op.name in known else tensor
