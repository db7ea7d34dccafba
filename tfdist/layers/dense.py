"""Dense layers whose kernel is split over the tensor axis, by columns or by rows."""

from __future__ import annotations

import keras
import tensorflow as tf

from tfdist.backend.keras.attributes import kernel_of
from tfdist.backend.keras.calls import made_by
from tfdist.collectives.mappings import (
    column_parallel_matmul,
    gather_from_region,
    linear,
    reduce_from_region,
    reduce_scatter_to_sequence_region,
    scatter_to_region,
)
from tfdist.sharding.layout import update_layout
from tfdist.sharding.weights import add_split_weight, tensor_group, value_tensor
from tfdist.utils import checks


def check_divides(what: str, value: int, group, layer) -> None:
    """Raises where a size does not divide by the tensor axis.

    Raises:
        ValueError: It does not.
    """
    if group is not None and value % group.size:
        raise ValueError(
            f"{what} divides by the tensor axis. Received: {what}={value} in `{layer.name}` with "
            f"tensor={group.size}."
        )


@keras.saving.register_keras_serializable(package="tfdist")
class ColumnParallelDense(keras.layers.Dense):
    """`keras.layers.Dense` of which each tensor rank computes its share of the units.

    The input is whole on every tensor rank; the output is this rank's share of the last dim, to
    be taken up by a `RowParallelDense`, or joined with `gather_output`. Where the tensor axis is
    1 or there is no strategy, this is `keras.layers.Dense`.

    Args:
        units: The global number of units; it divides by the tensor axis.
        gather_output: Whether the output is joined to all units on every tensor rank.
        sequence_parallel: Whether the input is this rank's slice of dim 1, of shape
            [batch, time / tensor, features], joined before the product.
        **kwargs: As for `keras.layers.Dense`.

    Raises:
        ValueError: `units` does not divide, or the activation looks at all units at once and the
            output is not gathered.

    Source: Shoeybi et al. 2019, "Megatron-LM", section 3.
    """

    splits_tokens = True

    def __init__(
        self,
        units: int,
        *args,
        gather_output: bool = False,
        sequence_parallel: bool = False,
        **kwargs,
    ):
        units = checks.integer("units", units, minimum=1)
        super().__init__(units, *args, **kwargs)
        self.gather_output = checks.boolean("gather_output", gather_output)
        self.sequence_parallel = checks.boolean("sequence_parallel", sequence_parallel)
        self._group = tensor_group()
        if self._group is None:
            return
        check_divides("units", units, self._group, self)
        refuse_features(self)
        whole = (keras.activations.softmax, keras.activations.log_softmax)
        if self.activation in whole and not gather_output:
            raise ValueError(
                f"`{self.activation.__name__}` looks at all units, of which a rank of the tensor "
                f"axis has {units // self._group.size}. Received: activation in `{self.name}` "
                "without gather_output=True."
            )

    def build(self, input_shape):
        """Adds this rank's columns of the kernel, and its part of the bias."""
        if self._group is None:
            super().build(input_shape)
            return
        kernel_of.set(
            self,
            add_split_weight(
                self,
                (input_shape[-1], self.units),
                1,
                axis=self._group,
                name="kernel",
                initializer=self.kernel_initializer,
                regularizer=self.kernel_regularizer,
                constraint=self.kernel_constraint,
            ),
        )
        self.bias = None
        if self.use_bias:
            self.bias = add_split_weight(
                self,
                (self.units,),
                0,
                axis=self._group,
                name="bias",
                initializer=self.bias_initializer,
                regularizer=self.bias_regularizer,
                constraint=self.bias_constraint,
            )
        self.input_spec = keras.layers.InputSpec(min_ndim=2, axes={-1: input_shape[-1]})
        self.built = True

    def call(self, inputs, training=None):
        """[..., features] to [..., units / tensor]."""
        if has_features(self):
            return super().call(inputs, training=training)
        bias = None if self.bias is None else value_tensor(self.bias)
        if self._group is None:
            outputs = linear(inputs, value_tensor(kernel_of(self)), bias)
        else:
            outputs = column_parallel_matmul(
                inputs,
                value_tensor(kernel_of(self)),
                self._group,
                sequence_axis=1 if self.sequence_parallel else None,
                bias=bias,
                name=self.name,
            )
            if self.gather_output:
                outputs = gather_from_region(outputs, self._group, name=self.name)
        return outputs if self.activation is None else self.activation(outputs)

    def compute_output_shape(self, input_shape):
        """The shape that this rank's output has."""
        shape = list(input_shape)
        shape[-1] = self.units
        if self._group is not None:
            if not self.gather_output:
                shape[-1] //= self._group.size
            if self.sequence_parallel and shape[1] is not None:
                shape[1] *= self._group.size
        return tuple(shape)

    def get_config(self):
        """The configuration, the same on any mesh."""
        return {
            **super().get_config(),
            "gather_output": self.gather_output,
            "sequence_parallel": self.sequence_parallel,
        }


@keras.saving.register_keras_serializable(package="tfdist")
class RowParallelDense(keras.layers.Dense):
    """`keras.layers.Dense` of which each tensor rank takes its share of the inputs.

    The input is this rank's share of the last dim, as a `ColumnParallelDense` yields it; the
    ranks' products are summed, and the output is whole on every tensor rank. Where the tensor
    axis is 1 or there is no strategy, this is `keras.layers.Dense`.

    Args:
        units: The number of units.
        input_is_parallel: Whether the input is this rank's share already; if not it is split.
        sequence_parallel: Whether the output is this rank's slice of dim 1, of shape
            [batch, time / tensor, units].
        **kwargs: As for `keras.layers.Dense`.

    Raises:
        ValueError: The global number of inputs does not divide by the tensor axis, or the input is taken
            for a share and a functional or Sequential model shows that it is whole. In a model with a
            `call` of its own that cannot be seen: there a whole input makes a layer that is
            wider by the size of the tensor axis.

    Source: Shoeybi et al. 2019, "Megatron-LM", section 3.
    """

    splits_tokens = True

    def __init__(
        self,
        units: int,
        *args,
        input_is_parallel: bool = True,
        sequence_parallel: bool = False,
        **kwargs,
    ):
        super().__init__(checks.integer("units", units, minimum=1), *args, **kwargs)
        self.input_is_parallel = checks.boolean("input_is_parallel", input_is_parallel)
        self.sequence_parallel = checks.boolean("sequence_parallel", sequence_parallel)
        self._group = tensor_group()
        if self._group is not None:
            refuse_features(self)

    def build(self, input_shape):
        """Adds this rank's rows of the kernel, and the bias."""
        if self._group is None:
            super().build(input_shape)
            return
        features = input_shape[-1]
        if self.input_is_parallel:
            features *= self._group.size
        check_divides("features", features, self._group, self)
        kernel_of.set(
            self,
            add_split_weight(
                self,
                (features, self.units),
                0,
                axis=self._group,
                name="kernel",
                initializer=self.kernel_initializer,
                regularizer=self.kernel_regularizer,
                constraint=self.kernel_constraint,
            ),
        )
        self.bias = None
        if self.use_bias:
            self.bias = self.add_weight(
                name="bias",
                shape=(self.units,),
                initializer=self.bias_initializer,
                regularizer=self.bias_regularizer,
                constraint=self.bias_constraint,
            )
            if self.sequence_parallel:
                update_layout(self.bias, partial_over=self._group)
        self.input_spec = keras.layers.InputSpec(min_ndim=2, axes={-1: input_shape[-1]})
        self.built = True

    def compute_output_spec(self, inputs, *args, **kwargs):
        """The shape and dtype of the output, for a symbolic input of which it is known what it is."""
        if self._group is not None and self._group.size > 1 and self.input_is_parallel:
            maker = _maker_of_whole(inputs)
            if maker is not None:
                raise ValueError(
                    f"`{self.name}` takes each rank's share of the features, as a ColumnParallelDense "
                    f"yields it. Received: {maker}, which has all {inputs.shape[-1]} features on every "
                    "rank. Pass input_is_parallel=False, or put a ColumnParallelDense before it."
                )
        return super().compute_output_spec(inputs, *args, **kwargs)

    def call(self, inputs, training=None):
        """[..., features / tensor] to [..., units]."""
        if has_features(self):
            return super().call(inputs, training=training)
        if self._group is not None and not self.input_is_parallel:
            inputs = scatter_to_region(inputs, self._group, name=self.name)
        bias = None if self.bias is None else value_tensor(self.bias)
        if self._group is None:
            outputs = linear(inputs, value_tensor(kernel_of(self)), bias)
        else:
            outputs = linear(inputs, value_tensor(kernel_of(self)))
            leave = reduce_from_region
            if self.sequence_parallel:
                leave = reduce_scatter_to_sequence_region
            outputs = leave(outputs, self._group, name=self.name)
            outputs = outputs if bias is None else tf.nn.bias_add(outputs, bias)
        return outputs if self.activation is None else self.activation(outputs)

    def compute_output_shape(self, input_shape):
        """The shape that this rank's output has."""
        shape = list(input_shape)
        shape[-1] = self.units
        if self._group is not None and self.sequence_parallel and shape[1] is not None:
            check_divides("the sequence", shape[1], self._group, self)
            shape[1] //= self._group.size
        return tuple(shape)

    def get_config(self):
        """The configuration, the same on any mesh."""
        return {
            **super().get_config(),
            "input_is_parallel": self.input_is_parallel,
            "sequence_parallel": self.sequence_parallel,
        }


#: Layers of which each rank has the whole output, if they do not split it themselves.
_WHOLE = (
    keras.layers.InputLayer,
    keras.layers.Dense,
    keras.layers.Embedding,
    keras.layers.Conv1D,
    keras.layers.Conv2D,
    keras.layers.Conv3D,
)


def _maker_of_whole(tensor) -> str | None:
    """The layer that made a symbolic tensor whose features are known to be whole, in words; else None.

    Operations and layers of Keras and of tfdist that read one tensor and keep its features are looked behind.
    """
    while (made := made_by(tensor)) is not None:
        maker, read = made
        if isinstance(maker, ColumnParallelDense):
            return f"the output of `{maker.name}`" if maker.gather_output else None
        if isinstance(maker, _WHOLE):
            is_input = isinstance(maker, keras.layers.InputLayer)
            return f"the input `{maker.name}`" if is_input else f"the output of `{maker.name}`"
        if len(read) != 1 or not type(maker).__module__.startswith(("keras.", "tfdist.layers.")):
            return None
        if not isinstance(maker, keras.layers.Flatten) and read[0].shape[-1:] != tensor.shape[-1:]:
            return None
        (tensor,) = read
    return None


def has_features(layer) -> bool:
    """Whether a Dense computes with more than its kernel and bias."""
    return bool(layer.lora_enabled or layer.quantization_mode)


def refuse_features(layer) -> None:
    """Raises for features of Keras' own layers that work on the whole kernel or output.

    Raises:
        ValueError: There is one.
    """
    for feature in ("lora_rank", "quantization_mode", "activity_regularizer"):
        if getattr(layer, feature, None):
            raise ValueError(
                f"`{feature}` works on a kernel or output that one rank holds whole. Received: "
                f"{feature}={getattr(layer, feature)!r} in `{layer.name}`, which is split over "
                "the tensor axis."
            )
