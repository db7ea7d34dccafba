"""A model as a chain: links with one tensor between each and the next."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import keras
import tensorflow as tf

from tfdist.pipeline.keras_graph import (
    count_flops,
    deferred_weights,
    nodes_in_order,
    trace_graph,
    without_values,
)

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
    after: between the layers of a plain stack, and around each block with a shortcut.

    Args:
        model: A Sequential or functional model with one input and one output; or a list that
            begins with a `keras.Input`, of layers that are called one after the other.

    Raises:
        ValueError: The model has several inputs or outputs, or is no such model.
    """

    def __init__(self, model: keras.Model | Sequence):
        if not isinstance(model, keras.Model):
            model = _stack(model)
        nodes = nodes_in_order(model)
        if len(model.inputs) != 1 or len(model.outputs) != 1:
            raise ValueError(
                "A pipeline takes a model with one input and one output. Received: "
                f"`{model.name}` with {len(model.inputs)} inputs, {len(model.outputs)} outputs."
            )
        self.model = model
        self.links = _links(nodes, model.inputs[0], model.outputs[0])
        self._flops: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return len(self.links)

    @property
    def has_known_shapes(self) -> bool:
        """Whether only the number of rows of the tensors between the links is open."""
        return not any(None in link.model.inputs[0].shape[1:] for link in self.links)

    def flops(self, rows: int = 1) -> list[int]:
        """The floating-point operations of each link's forward pass.

        Args:
            rows: For how many rows.

        Raises:
            ValueError: A link's input has a dim of unknown size.
        """
        if rows in self._flops:
            return self._flops[rows]
        counts = []
        for link in self.links:
            tensor = link.model.inputs[0]
            if None in tensor.shape[1:]:
                raise ValueError(
                    f"The input of `{link.name}` has the shape {tensor.shape}: FLOPs can be "
                    "counted where only the number of rows is open. Give the model's Input its "
                    "whole shape, or share out the layers by cost='parameters'."
                )
            spec = tf.TensorSpec((rows, *tensor.shape[1:]), tensor.dtype)
            counts.append(count_flops(_forward_graph(link, spec)))
        self._flops[rows] = counts
        return counts

    @property
    def shared_variables(self) -> dict[int, list[int]]:
        """By the id of each variable that several links have, the places of those links."""
        places: dict[int, list[int]] = {}
        for place, link in enumerate(self.links):
            for variable in link.variables:
                places.setdefault(id(variable), []).append(place)
        return {key: some for key, some in places.items() if len(some) > 1}


def _stack(layers: Sequence) -> keras.Model:
    layers = list(layers)
    if not layers or not isinstance(layers[0], keras.KerasTensor | keras.layers.InputLayer):
        found = type(layers[0]).__name__ if layers else "an empty list"
        raise ValueError(
            "A list of layers begins with the `keras.Input` that the first of them gets. "
            f"Received: {found} first."
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
