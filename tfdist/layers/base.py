"""The base classes of layers that split themselves over the tensor axis."""

from __future__ import annotations

import keras

from tfdist.collectives import Group, reduce_scatter
from tfdist.collectives.mappings import reduce_from_region
from tfdist.sharding.weights import sum_gradient_over, tensor_group
from tfdist.utils import checks


def check_divides(what: str, value: int, group, layer) -> None:
    """Checks that a size is divisible by the size of the tensor axis.

    Raises:
        ValueError: The size is not divisible.
    """
    if group is not None and value % group.size:
        raise ValueError(
            f"{what} must be divisible by the size of the tensor axis. Received: {what}={value} in "
            f"`{layer.name}` with tensor={group.size}."
        )


class TensorParallelLayer(keras.layers.Layer):
    """A layer that splits itself over the tensor axis of the strategy in scope.

    A subclass of a Keras layer names this class first.

    Args:
        *args: As for the Keras layer.
        sequence_parallel: Whether activations outside the split region are slices of dim 1, one per
            tensor rank.
        **kwargs: As for the Keras layer.
    """

    splits_tokens = True
    #: The arguments in the configuration, in addition to those of Keras and `sequence_parallel`.
    _arguments: tuple[str, ...] = ()

    def __init__(self, *args, sequence_parallel: bool = False, **kwargs):
        super().__init__(*args, **kwargs)
        self.sequence_parallel = checks.boolean("sequence_parallel", sequence_parallel)
        self._group = tensor_group()
        if self._slices > 1:
            self._refuse("activity_regularizer")

    def _refuse(self, *features: str) -> None:
        """Checks that the layer uses no feature of Keras that requires the whole weight or output.

        Raises:
            ValueError: The layer uses one.
        """
        for feature in features:
            if self._group is not None and getattr(self, feature, None):
                raise ValueError(
                    f"`{feature}` is not supported for a layer that is split over the tensor axis. "
                    f"Received: `{feature}` of `{self.name}` with tensor={self._ranks}. For LoRA and "
                    "quantized weights use the layer of keras.layers, and split it by `parallelize`."
                )

    @property
    def _ranks(self) -> int:
        """The number of ranks that split the layer."""
        return 1 if self._group is None else self._group.size

    @property
    def _slices(self) -> int:
        """The number of slices of dim 1."""
        return self._ranks if self.sequence_parallel else 1

    @property
    def _sequence_axis(self) -> int | None:
        return 1 if self.sequence_parallel else None

    def _shape_of_whole(self, shape) -> list:
        """The shape of an array of which this rank has a slice of a given shape."""
        shape = list(shape)
        if self._slices > 1 and shape[1] is not None:
            shape[1] *= self._slices
        return shape

    def _shape_of_slice(self, shape) -> list:
        """The shape of this rank's slice of an array of a given shape.

        Raises:
            ValueError: The sequence is not divisible by the size of the tensor axis.
        """
        shape = list(shape)
        if self._slices > 1 and shape[1] is not None:
            check_divides("the sequence", shape[1], self._group, self)
            shape[1] //= self._slices
        return shape

    def _rules(self, name: str) -> dict:
        """The arguments of `add_weight` that a layer of Keras has for a weight."""
        rules = ("initializer", "regularizer", "constraint")
        return {rule: getattr(self, f"{name}_{rule}") for rule in rules}

    def _mark_partial(self, *variables) -> None:
        """Records that gradients of weights are partial sums if this rank has a slice of the sequence."""
        if self._slices > 1:
            for variable in variables:
                sum_gradient_over(variable, self._group)

    def _reduce(self, parts, group: Group, name: str | None = None):
        """The sum of the ranks' parts of an output, or this rank's slice of it."""
        if self.sequence_parallel:
            return reduce_scatter(parts, group, axis=1, name=name or self.name)
        return reduce_from_region(parts, group, name=name or self.name)

    def get_config(self):
        """The configuration, which is the same on any mesh."""
        config = {**super().get_config(), "sequence_parallel": self.sequence_parallel}
        for name in self._arguments:
            value = getattr(self, name)
            is_initializer = name.endswith("initializer") and value is not None
            config[name] = keras.initializers.serialize(value) if is_initializer else value
        return config


class SplitStockLayer(TensorParallelLayer):
    """A layer of Keras with a weight of which each rank has a slice; named before the layer of Keras."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._refuse("lora_rank", "quantization_mode")

    def enable_lora(self, *args, **kwargs):
        """Adds LoRA, which Keras computes from the whole weight.

        Raises:
            ValueError: The layer is split.
        """
        self._refuse("enable_lora")
        super().enable_lora(*args, **kwargs)
