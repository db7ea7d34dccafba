"""A part of a chain that is not cut."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.backend.keras.attributes import own_losses
from tfdist.backend.keras.functional import count_flops, trace_graph, without_values
from tfdist.backend.keras.private import all_layers


@dataclasses.dataclass(frozen=True)
class Link:
    """A part of the chain that is not cut.

    Tensors go by the chain's numbers for them.

    Attributes:
        name: Its layers' names.
        model: From the tensors that it reads to those that it makes.
        layers: Its layers. One that is used twice, as a tied embedding is, may be in two links.
        reads: The tensors that it takes.
        inputs: Those of them that are inputs of the model; links before it make the others.
        makes: Those of its tensors that lead on.
        after: All tensors that lead on behind it, but the inputs of the model.
        why_whole: Why it is not cut further, of several layers; "" for a single one.
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
        """Those of them that are trained."""
        return [variable for variable in self.variables if variable.trainable]

    @property
    def parameters(self) -> int:
        """The number of trainable numbers, this rank's slice of split ones."""
        return sum(
            tf.TensorShape(variable.shape).num_elements() for variable in self.trainable_variables
        )

    def arguments(self, of: Mapping[int, Any]) -> list:
        """What the link reads, of tensors or of something else by the tensors' numbers."""
        return [of[number] for number in self.reads]

    def __call__(
        self, tensors: Mapping[int, tf.Tensor], training: bool, losses: list | None = None
    ) -> dict[int, tf.Tensor]:
        """Runs the link.

        Args:
            tensors: What leads up to it, and the inputs of the model.
            training: Whether it runs as in training.
            losses: Gets what its layers add to the loss; their regularizers of weights are left out.

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
        """Compares the shape of a tensor that the link reads with what it is said to be.

        Raises:
            ValueError: It is another.
        """
        if not tensor.shape.is_compatible_with(shape):
            raise ValueError(
                f"`{self.name}` gets a tensor of shape {tuple(tensor.shape)}, of which the layer that "
                f"makes it says that it has the shape {tuple(shape)}: a pipeline relies on that. Mend "
                "its `compute_output_shape`, or put it into one layer with those that read it."
            )

    def flops(self, specs: Mapping[int, tf.TensorSpec]) -> int:
        """The floating-point operations of a forward pass, for what the tensors are like."""

        def forward(*tensors):
            lacking = [variable for variable in self.variables if without_values(variable)]
            zeros = [(variable, tf.zeros(variable.shape, variable.dtype)) for variable in lacking]
            with keras.StatelessScope(zeros, initialize_variables=False):
                return self.model(list(tensors), training=False)

        return count_flops(trace_graph(forward, self.arguments(specs)))
