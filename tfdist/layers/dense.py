"""Dense layers whose kernel is split over the tensor axis, by columns or by rows."""

from __future__ import annotations

import keras
import tensorflow as tf

from tfdist.backend.keras.attributes import kernel_of
from tfdist.backend.keras.calls import made_by
from tfdist.collectives import Group
from tfdist.collectives.mappings import (
    column_parallel_matmul,
    gather_from_region,
    linear,
    scatter_to_region,
)
from tfdist.layers.base import SplitStockLayer, TensorParallelLayer, check_divides
from tfdist.layers.initializers import again, initializer
from tfdist.sharding.weights import add_split_weight, value_tensor
from tfdist.utils import checks


class _SplitDense(SplitStockLayer, keras.layers.Dense):
    """A `keras.layers.Dense` whose kernel is split over the tensor axis along one dim."""

    def __init__(self, units: int, *args, **kwargs):
        super().__init__(checks.integer("units", units, minimum=1), *args, **kwargs)
        self._refuse("activity_regularizer")

    def build(self, input_shape):
        """Adds this rank's part of the kernel, and the bias."""
        if self._group is None:
            super().build(input_shape)
            return
        self._add_weights(input_shape[-1], self._group)
        self.input_spec = keras.layers.InputSpec(min_ndim=2, axes={-1: input_shape[-1]})
        self.built = True

    def _add_weights(self, features: int, group: Group) -> None:
        raise NotImplementedError

    def _add(self, name: str, shape: tuple, dim: int, group: Group | None):
        return add_split_weight(self, shape, dim, axis=group, name=name, **self._rules(name))

    def call(self, inputs, training=None):
        """Maps [..., this rank's features] to [..., this rank's units]."""
        if self.lora_enabled or self.quantization_mode:
            return super().call(inputs, training=training)
        bias = None if self.bias is None else value_tensor(self.bias)
        kernel = value_tensor(kernel_of(self))
        if self._group is None:
            outputs = linear(inputs, kernel, bias)
        else:
            outputs = self._split_product(inputs, kernel, bias, self._group)
        return outputs if self.activation is None else self.activation(outputs)

    def _split_product(self, inputs, kernel, bias, group: Group):
        raise NotImplementedError


@keras.saving.register_keras_serializable(package="tfdist")
class ColumnParallelDense(_SplitDense):
    """`keras.layers.Dense` whose units are split over the tensor ranks.

    The input is replicated on the tensor ranks. The output is this rank's share of the last dim, which
    is the input of a `RowParallelDense`, or is joined with `gather_output`. If the tensor axis has one
    rank, or without a strategy, this is `keras.layers.Dense`.

    Args:
        units: The global number of units, a multiple of the size of the tensor axis.
        gather_output: Whether the output has all units on every tensor rank.
        sequence_parallel: Whether the input is this rank's slice of dim 1, of shape
            [batch, time / tensor, features], which is gathered before the product.
        **kwargs: As for `keras.layers.Dense`.

    Raises:
        ValueError: `units` is not divisible by the size of the tensor axis, or the activation needs all
            units and the output is not gathered.

    Source: Shoeybi et al. 2019, "Megatron-LM", section 3.
    """

    _arguments = ("gather_output",)

    def __init__(
        self,
        units: int,
        *args,
        gather_output: bool = False,
        sequence_parallel: bool = False,
        **kwargs,
    ):
        super().__init__(units, *args, sequence_parallel=sequence_parallel, **kwargs)
        self.gather_output = checks.boolean("gather_output", gather_output)
        check_divides("units", self.units, self._group, self)
        needs_all = (keras.activations.softmax, keras.activations.log_softmax)
        if self._group is not None and self.activation in needs_all and not gather_output:
            raise ValueError(
                f"`{self.activation.__name__}` requires all units, of which a rank of the tensor "
                f"axis has {self.units // self._ranks}. Received: activation in `{self.name}` "
                "without gather_output=True."
            )

    def _add_weights(self, features: int, group: Group) -> None:
        kernel_of.set(self, self._add("kernel", (features, self.units), 1, group))
        self.bias = self._add("bias", (self.units,), 0, group) if self.use_bias else None

    def _split_product(self, inputs, kernel, bias, group: Group):
        outputs = column_parallel_matmul(
            inputs, kernel, group, self._sequence_axis, bias=bias, name=self.name
        )
        if self.gather_output:
            outputs = gather_from_region(outputs, group, name=self.name)
        return outputs

    def compute_output_shape(self, input_shape):
        """The shape of this rank's output."""
        units = self.units if self.gather_output else self.units // self._ranks
        return (*self._shape_of_whole(input_shape)[:-1], units)


@keras.saving.register_keras_serializable(package="tfdist")
class RowParallelDense(_SplitDense):
    """`keras.layers.Dense` whose inputs are split over the tensor ranks.

    The input is this rank's share of the last dim, as a `ColumnParallelDense` returns it. The ranks'
    products are summed, and the output is replicated on the tensor ranks. If the tensor axis has one
    rank, or without a strategy, this is `keras.layers.Dense`.

    Args:
        units: The number of units.
        input_is_parallel: Whether the input is this rank's share already; otherwise it is split.
        sequence_parallel: Whether the output is this rank's slice of dim 1, of shape
            [batch, time / tensor, units].
        **kwargs: As for `keras.layers.Dense`.

    Raises:
        ValueError: The global number of inputs is not divisible by the size of the tensor axis; or
            `input_is_parallel` is set, and a functional or Sequential model shows that the input has all
            features. In a model with a custom `call` this is not detected: there an input with all
            features makes a layer that is wider by the size of the tensor axis.

    Source: Shoeybi et al. 2019, "Megatron-LM", section 3.
    """

    _arguments = ("input_is_parallel",)

    def __init__(
        self,
        units: int,
        *args,
        input_is_parallel: bool = True,
        sequence_parallel: bool = False,
        **kwargs,
    ):
        super().__init__(units, *args, sequence_parallel=sequence_parallel, **kwargs)
        self.input_is_parallel = checks.boolean("input_is_parallel", input_is_parallel)

    def _add_weights(self, features: int, group: Group) -> None:
        if self.input_is_parallel:
            features *= group.size
        check_divides("features", features, group, self)
        kernel_of.set(self, self._add("kernel", (features, self.units), 0, group))
        self.bias = None
        if self.use_bias:
            self.bias = self._add("bias", (self.units,), 0, None)
            self._mark_partial(self.bias)

    def compute_output_spec(self, inputs, *args, **kwargs):
        """The shape and dtype of the output, after a check of the input's features."""
        maker = _maker_of_whole(inputs) if self._ranks > 1 and self.input_is_parallel else None
        if maker is not None:
            raise ValueError(
                f"`{self.name}` requires each rank's share of the features, as a ColumnParallelDense "
                f"returns it. Received: {maker}, which has all {inputs.shape[-1]} features on every "
                "rank. Pass input_is_parallel=False, or put a ColumnParallelDense before it."
            )
        return super().compute_output_spec(inputs, *args, **kwargs)

    def _split_product(self, inputs, kernel, bias, group: Group):
        if not self.input_is_parallel:
            inputs = scatter_to_region(inputs, group, name=self.name)
        outputs = self._reduce(linear(inputs, kernel), group)
        return outputs if bias is None else tf.nn.bias_add(outputs, bias)

    def compute_output_shape(self, input_shape):
        """The shape of this rank's output."""
        return (*self._shape_of_slice(input_shape)[:-1], self.units)


class TwoProducts(TensorParallelLayer):
    """The arguments of a layer of a product split by columns, and of one split by rows.

    Args:
        use_bias: Whether the products have a bias.
        kernel_initializer: For the first kernels.
        output_initializer: For the kernel of the second product; None for the same.
        **kwargs: As for `TensorParallelLayer`.
    """

    _arguments: tuple[str, ...] = ("use_bias", "kernel_initializer", "output_initializer")

    def __init__(self, *, use_bias: bool, kernel_initializer, output_initializer, **kwargs):
        super().__init__(**kwargs)
        self.use_bias = checks.boolean("use_bias", use_bias)
        self.kernel_initializer = initializer("kernel_initializer", kernel_initializer)
        self.output_initializer = initializer(
            "output_initializer", output_initializer, optional=True
        )

    def _product(self, layer, units: int, kernel_initializer, name: str, **kwargs):
        return layer(
            units,
            use_bias=self.use_bias,
            sequence_parallel=self.sequence_parallel,
            kernel_initializer=kernel_initializer,
            dtype=self.dtype_policy,
            name=name,
            **kwargs,
        )

    def _output_product(self, units: int, name: str):
        kernel_initializer = self.output_initializer or again(self.kernel_initializer)
        return self._product(RowParallelDense, units, kernel_initializer, name)

    def compute_output_shape(self, input_shape):
        """The shape of the input."""
        return input_shape


#: Layers whose output is replicated on all ranks, unless they split it themselves.
_WHOLE = (
    keras.layers.InputLayer,
    keras.layers.Dense,
    keras.layers.Embedding,
    keras.layers.Conv1D,
    keras.layers.Conv2D,
    keras.layers.Conv3D,
)


def _maker_of_whole(tensor) -> str | None:
    """A description of the layer that produced a symbolic tensor, if it has all features; else None.

    Operations and layers of Keras and of tfdist with one input whose features they keep are skipped.
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
