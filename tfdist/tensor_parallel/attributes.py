"""Private attributes of Keras' layers and models that splitting and merging them requires.

As in `tfdist.backend.keras.attributes`, each has a name of tfdist and a check.
"""

from __future__ import annotations

import keras

from tfdist.backend.keras.attributes import Attribute, own_non_trainable
from tfdist.backend.keras.private import TensorFlowTrainer

# Set directly: the public setter changes the map of policies that other layers share.
dtype_policy = Attribute("_dtype_policy", keras.Layer)
# Without sublayers, whose variables the public list contains.
own_trainable = Attribute("_trainable_variables", keras.Layer)
# The packing of an int4 kernel, and its reduced dims. Before 3.14 int4 is packed differently, by inputs
# and without blocks; in 3.16 other objects pack.
_PACKING = {"since": (3, 14), "before": (3, 16)}
int4_block_size = Attribute(
    "_int4_block_size", keras.layers.Dense, keras.layers.EinsumDense, **_PACKING
)
int4_inputs = Attribute("_orig_input_dim", keras.layers.Dense, before=(3, 16))
int4_outputs = Attribute("_orig_output_dim", keras.layers.Dense, **_PACKING)
int4_columns = Attribute("_int4_unpacked_column_size", keras.layers.EinsumDense, **_PACKING)
quantization_axes = Attribute("_kernel_reduced_axes", keras.layers.EinsumDense, before=(3, 16))
# A method, from the scales of an int8 kernel to the divisors of the kernel itself.
adjust_scale = Attribute("_adjust_scale_for_dequant", keras.layers.EinsumDense, before=(3, 16))
# Grouped attention has no public ones; only it has a gate, since 3.14.
_BOTH = (keras.layers.GroupQueryAttention, keras.layers.MultiHeadAttention)
projections = {
    part: Attribute(f"_{part}_dense", *_BOTH) for part in ("query", "key", "value", "output")
}
projections["gate"] = Attribute("_gate_dense", _BOTH[0], since=(3, 14))
# Grouped attention stores it for its core; others pass it as an argument.
returns_scores = Attribute("_return_attention_scores", keras.layers.GroupQueryAttention)
# None for a model created outside any scope; `distribute_strategy` is then the current strategy.
made_under = Attribute("_distribute_strategy", TensorFlowTrainer)


def variables_of_layer(layer: keras.Layer) -> list[keras.Variable]:
    """The variables of a layer, without those of its sublayers."""
    return [*own_trainable(layer), *own_non_trainable(layer)]
