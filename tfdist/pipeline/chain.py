"""A model as a chain: links with one tensor between each and the next."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import keras
import tensorflow as tf

from tfdist import checks
from tfdist.keras_internals.functional import (
    count_flops,
    deferred_weights,
    nodes_in_order,
    trace_graph,
    without_values,
)
from tfdist.keras_internals.private import get_keras_mask

__all__ = ["Chain", "Link"]


@dataclasses.dataclass(frozen=True)
class Link:
    """A part of the chain that is not cut.

    Attributes:
        name: Its layers' names.
        model: From the tensor before it to the one after it.
        layers: Its layers. One that is used twice, as a tied embedding is, may be in two links.
    """

    name: str
    model: keras.Model
    layers: tuple[keras.layers.Layer, ...]

    @property
    def variables(self) -> list[keras.Variable]:
        """The variables of its layers, each once."""
        return list({id(v): v for layer in self.layers for v in layer.variables}.values())

    @property
    def trainable_variables(self) -> list[keras.Variable]:
        """Those of them that are trained."""
        return [variable for variable in self.variables if variable.trainable]

    @property
    def parameters(self) -> int:
        """The number of trainable numbers, this rank's slice of split ones."""
        return sum(
            tf.TensorShape(variable.shape).num_elements() for variable in self.trainable_variables
        )


class Chain:
    """The links of a functional model, in order.

    A functional model can be cut wherever just one tensor leads from what ran before to what runs
    after: between the layers of a plain stack, and around each block with a shortcut. A tensor that
    carries a Keras mask, as that of an `Embedding(mask_zero=True)` does, counts as two.

    Args:
        model: A Sequential or functional model with one input and one output; or a list that
            begins with a `keras.Input`, of layers that are called one after the other.
        input_shape: The shape of one row of its inputs, where the model leaves some of it open.

    Raises:
        ValueError: The model has several inputs or outputs, or is no such model.
    """

    def __init__(self, model: keras.Model | Sequence, input_shape: Sequence[int] | None = None):
        row = checks.integers(
            "input_shape", input_shape, minimum=1, none=True, optional=True, empty=True
        )
        if not isinstance(model, keras.Model):
            model = _stack(model)
        nodes = nodes_in_order(model)
        if len(model.inputs) != 1 or len(model.outputs) != 1:
            raise ValueError(
                "A pipeline takes a model with one input and one output. Received: "
                f"`{model.name}` with {len(model.inputs)} inputs, {len(model.outputs)} outputs."
            )
        open_row = tuple(model.inputs[0].shape[1:])
        if row is not None and not _fits(row, open_row):
            raise checks.refuse("input_shape", input_shape, f"the shape of a row, {open_row}")
        self.model = model
        self.links = _links(nodes, model.inputs[0], model.outputs[0])
        self._row = open_row if row is None else row
        self._flops: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return len(self.links)

    def as_outputs(self, tensor):
        """The output in the form in which the model returns it: alone, or in a dict."""
        if isinstance(self.model, keras.Sequential) or isinstance(self.model.output, list | tuple):
            return tensor  # Keras returns a list of one tensor as the tensor.
        return keras.tree.pack_sequence_as(self.model.output, [tensor])

    def specs(
        self, rows: int | None = None, row_shape: Sequence[int | None] | None = None, dtype=None
    ) -> list[tf.TensorSpec]:
        """What each link begins with, and what the last one ends with.

        Args:
            rows: How many rows.
            row_shape: The shape of a row of the inputs, in place of that of the chain.
            dtype: Their dtype, likewise.
        """
        shape = self._row if row_shape is None else tuple(row_shape)
        tensor = keras.KerasTensor((rows, *shape), dtype or self.model.inputs[0].dtype)
        found = [tf.TensorSpec(tensor.shape, tensor.dtype)]
        for link in self.links:
            tensor = link.model.compute_output_spec(tensor)
            found.append(tf.TensorSpec(tensor.shape, tensor.dtype))
        return found

    @functools.cached_property
    def has_known_shapes(self) -> bool:
        """Whether only the number of rows of the tensors between the links is open."""
        return None not in self._row and not any(None in s.shape[1:] for s in self.specs())

    def flops(self, rows: int = 1) -> list[int]:
        """The floating-point operations of each link's forward pass.

        Args:
            rows: For how many rows.

        Raises:
            ValueError: A link's input has a dim of unknown size.
        """
        if rows not in self._flops:
            self.check_known_shapes("FLOPs can be counted")
            specs = self.specs(rows)
            self._flops[rows] = [
                count_flops(_forward_graph(link, spec))
                for link, spec in zip(self.links, specs, strict=False)
            ]
        return self._flops[rows]

    def check_known_shapes(self, what: str) -> None:
        """Raises where more than the number of rows is open.

        Args:
            what: What cannot be done then.

        Raises:
            ValueError: It is.
        """
        if self.has_known_shapes:
            return
        name, spec = next(
            (link.name, spec)
            for link, spec in zip(self.links, self.specs(), strict=False)
            if None in spec.shape[1:]
        )
        raise ValueError(
            f"The input of `{name}` has the shape {tuple(spec.shape)}: {what} where only the "
            "number of rows is open. Give `input_shape` or the model's Input all other sizes, or "
            "share out the layers by cost='parameters'."
        )


def _fits(shape: Sequence[int | None], row: Sequence[int | None]) -> bool:
    """Whether a shape says nothing else than another does, in which dims may be open."""
    return len(shape) == len(row) and all(
        size == known or known is None for size, known in zip(shape, row, strict=True)
    )


def _stack(layers: Sequence) -> keras.Model:
    layers = list(checks.sequence("model", layers, "layers, or a Keras model"))
    if not layers or not isinstance(layers[0], keras.KerasTensor | keras.layers.InputLayer):
        found = type(layers[0]).__name__ if layers else "an empty list"
        raise ValueError(
            "A `model` that is a list of layers begins with the `keras.Input` that the first of "
            f"them gets. Received: {checks.shown(layers)}, with {found} first."
        )
    first = layers[0]
    tensor = inputs = first if isinstance(first, keras.KerasTensor) else first.output
    with deferred_weights():
        for layer in layers[1:]:
            tensor = layer(tensor)
        return keras.Model(inputs, tensor)


def _links(nodes: list, begin: keras.KerasTensor, end: keras.KerasTensor) -> list[Link]:
    last_use = {
        id(tensor): place for place, node in enumerate(nodes) for tensor in node.input_tensors
    }
    links: list[Link] = []
    waiting: list = []
    live: dict[int, keras.KerasTensor] = {id(begin): begin}
    before = begin
    for place, node in enumerate(nodes):
        waiting.append(node.operation)
        live |= {id(tensor): tensor for tensor in node.outputs}
        live = {
            key: tensor
            for key, tensor in live.items()
            if last_use.get(key, -1) > place or tensor is end
        }
        if len(live) == 1:
            (after,) = live.values()
            if after is not end and get_keras_mask(after) is not None:
                continue  # A mask is a second tensor that leads on.
            links.append(_link(waiting, before, after))
            waiting, before = [], after
    return links


def _link(operations: list, before: keras.KerasTensor, after: keras.KerasTensor) -> Link:
    layers = [part for part in operations if isinstance(part, keras.layers.Layer)]
    with deferred_weights():
        model = keras.Model(before, after)
    names = dict.fromkeys(part.name for part in operations)
    return Link(" + ".join(names), model, tuple(dict.fromkeys(layers)))


def _forward_graph(link: Link, spec: tf.TensorSpec) -> tf.Graph:
    def forward(x):
        lacking = [variable for variable in link.variables if without_values(variable)]
        zeros = [(variable, tf.zeros(variable.shape, variable.dtype)) for variable in lacking]
        with keras.StatelessScope(zeros, initialize_variables=False):
            return link.model(x, training=False)

    return trace_graph(forward, [spec])
