"""The optimizer's step where each rank updates its flat shards of parameters that all hold."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfdist.gradients.buckets import buckets
from tfdist.gradients.throttle import MAX_IN_FLIGHT_SHARDED
from tfdist.sharding.collectives import all_gather_arrays
from tfdist.sharding.parts import FlatShard
from tfdist.step.gradient_options import GradientOptions


class LocalShard:
    """This rank's flat shard of a parameter, as an optimizer looks at a `tf.Variable`.

    What is assigned stays here until `all_gather_parameters` gives it to the parameter.

    Args:
        variable: The parameter.
        shard: How it is cut.

    Attributes:
        is_changed: Whether something was assigned.
    """

    def __init__(self, variable: tf.Variable, shard: FlatShard):
        self.variable, self.shard = variable, shard
        self.name, self.dtype, self.device = variable.name, variable.dtype, variable.device
        self.shape = tf.TensorShape([shard.share])
        # What optimizers find their state for a variable by.
        self._unique_id = variable._unique_id
        self._value: tf.Tensor | None = None
        self.is_changed = False

    @property
    def value(self) -> tf.Tensor:
        """The shard: what was assigned last."""
        if self._value is None:
            self._value = self.shard.local_shard(tf.convert_to_tensor(self.variable))
        return self._value

    def assign(self, value) -> None:
        """Sets the shard."""
        self._value, self.is_changed = tf.cast(value, self.dtype), True

    def assign_add(self, value) -> None:
        """Adds to the shard."""
        self.assign(self.value + tf.cast(value, self.dtype))

    def assign_sub(self, value) -> None:
        """Subtracts from the shard."""
        self.assign(self.value - tf.cast(value, self.dtype))

    def scatter_add(self, slices: tf.IndexedSlices) -> None:
        """Adds to some entries of the shard; to one that is named twice both."""
        self.assign_add(tf.convert_to_tensor(slices))

    def scatter_sub(self, slices: tf.IndexedSlices) -> None:
        """Subtracts from some entries of the shard."""
        self.assign_sub(tf.convert_to_tensor(slices))

    def scatter_update(self, slices: tf.IndexedSlices) -> None:
        """Sets some entries of the shard."""
        indices = slices.indices[:, None]
        self.assign(tf.tensor_scatter_nd_update(self.value, indices, slices.values))

    def __tf_tensor__(self, dtype=None, name=None):
        return tf.convert_to_tensor(self.value, dtype=dtype, name=name)

    def __mul__(self, other):
        return self.value * other

    def __sub__(self, other):
        return self.value - other


def all_gather_parameters(views: Sequence[LocalShard], options: GradientOptions) -> None:
    """Gives all ranks what each has assigned to its shards.

    Args:
        views: The shards.
        options: How gradients travel; parameters do in buckets of the same size.
    """
    found: list[Sequence[int]] = []
    for group in dict.fromkeys(view.shard.group for view in views):
        whole = [(p, view.variable) for p, view in enumerate(views) if view.shard.group == group]
        found += buckets(whole, options.bucket_bytes)
    assigned: list[list] = []
    for number, bucket in enumerate(found):
        some = [views[place] for place in bucket]
        # The old parameters of a bucket go before the new ones of the next but one come.
        gone = assigned[-MAX_IN_FLIGHT_SHARDED] if number >= MAX_IN_FLIGHT_SHARDED else []
        with tf.control_dependencies(gone):
            own = [tf.identity(view.value) for view in some]
        arrays = all_gather_arrays(own, [view.shard for view in some], f"parameters/bucket{number}")
        assigned.append(
            [
                view.variable.assign(array, read_value=False)
                for view, array in zip(some, arrays, strict=True)
            ]
        )
