"""A part of a chain that is never split."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.backend.keras.attributes import own_losses
from tfdist.backend.keras.functional import count_flops, is_deferred, trace_graph
from tfdist.backend.keras.private import all_layers


@dataclasses.dataclass(frozen=True)
class Segment:
    """A part of a chain that is never split.

    Tensors are identified by their numbers in the chain.

    Attributes:
        name: The names of its layers.
        model: The model from the tensors that it reads to those that it makes.
        layers: Its layers. A layer that is used twice, such as a tied embedding, may be in two segments.
        reads: The tensors that it reads.
        inputs: Those of them that are inputs of the whole model.
        makes: The tensors that it makes and that are read later.
        after: All tensors that are read later, without the inputs of the whole model.
        why_whole: The reason why it cannot be split; "" for a single layer.
    """

    name: str
    model: keras.Model
    layers: tuple[keras.layers.Layer, ...]
    reads: tuple[int, ...]
    inputs: tuple[int, ...]
    makes: tuple[int, ...]
    after: tuple[int, ...]
    why_whole: str

    @property
    def variables(self) -> list[keras.Variable]:
        """The variables of its layers, each once."""
        return list({id(v): v for layer in self.layers for v in layer.variables}.values())

    @property
    def trainable_variables(self) -> list[keras.Variable]:
        """The trainable variables of its layers, each once."""
        return [variable for variable in self.variables if variable.trainable]

    @property
    def deferred_variables(self) -> list[keras.Variable]:
        """The variables without a value, as of `deferred_weights`."""
        return [variable for variable in self.variables if is_deferred(variable)]

    @property
    def parameters(self) -> int:
        """The number of trainable parameters, of split variables those of this rank's slice."""
        return sum(tf.TensorShape(v.shape).num_elements() for v in self.trainable_variables)

    def arguments(self, of: Mapping[int, Any]) -> list:
        """The values of the tensors that it reads, in its model's order."""
        return [of[number] for number in self.reads]

    def __call__(
        self, tensors: Mapping[int, tf.Tensor], training: bool, losses: list | None = None
    ) -> dict[int, tf.Tensor]:
        """Runs the segment.

        Args:
            tensors: The tensors before it, and the inputs of the whole model.
            training: Whether it runs in training mode.
            losses: A list that the losses of its layers are appended to, without regularizers of
                weights.

        Returns:
            The tensors that it makes.
        """
        read = self.arguments(tensors)
        for number, tensor, symbol in zip(self.reads, read, self.model.inputs, strict=True):
            if number not in self.inputs:
                self.check_shape(tensor, symbol.shape)
        made = keras.tree.flatten(self.model(read, training=training))
        if losses is not None:
            layers = {id(part): part for layer in self.layers for part in all_layers(layer)}
            for layer in layers.values():
                losses += own_losses(layer)()
        return dict(zip(self.makes, made, strict=True))

    def check_shape(self, tensor: tf.Tensor, shape: Sequence[int | None]) -> None:
        """Compares the shape of a tensor with the one that its layer has declared.

        Raises:
            ValueError: They differ.
        """
        if not tensor.shape.is_compatible_with(shape):
            raise ValueError(
                f"The declared shape of a tensor does not match in `{self.name}`. Received: a tensor "
                f"of shape {tuple(tensor.shape)}, but the layer that produces it declares shape "
                f"{tuple(shape)}. Fix its `compute_output_shape`, or put it into one layer with the "
                "layers that read it."
            )

    def flops(self, specs: Mapping[int, tf.TensorSpec]) -> int:
        """The floating-point operations of a forward pass on tensors of some specifications."""

        def forward(*tensors):
            zeros = [(v, tf.zeros(v.shape, v.dtype)) for v in self.deferred_variables]
            with keras.StatelessScope(zeros, initialize_variables=False):
                return self.model(list(tensors), training=False)

        return count_flops(trace_graph(forward, self.arguments(specs)))
