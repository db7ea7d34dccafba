"""The update by an optimizer where each rank updates its flat shards of replicated parameters."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfdist.gradients.buckets import buckets
from tfdist.gradients.throttle import max_in_flight
from tfdist.sharding.collectives import all_gather_arrays
from tfdist.sharding.parts import FlatShard
from tfdist.step.gradient_options import GradientOptions
from tfdist.utils.places import places_by


class LocalShard:
    """This rank's flat shard of a parameter, with the interface of a `tf.Variable` for optimizers.

    Assigned values are kept here until `all_gather_parameters` assigns them to the parameter.

    Args:
        variable: The parameter.
        shard: Its flat shard.

    Attributes:
        is_changed: Whether something was assigned.
    """

    def __init__(self, variable: tf.Variable, shard: FlatShard):
        self.variable, self.shard = variable, shard
        self.name, self.dtype, self.device = variable.name, variable.dtype, variable.device
        self.shape = tf.TensorShape([shard.share])
        # Optimizers find the state of a variable by this id.
        self._unique_id = variable._unique_id
        self._value: tf.Tensor | None = None
        self.is_changed = False

    @property
    def value(self) -> tf.Tensor:
        """The shard, with the last assignment."""
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
        """Adds to some entries of the shard; duplicate indices add up."""
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
    """Assigns to each parameter the shards that the ranks have updated.

    Args:
        views: The shards.
        options: How gradients are sent; parameters are sent in buckets of the same size.
    """
    found: list[list[int]] = []
    for places in places_by(view.shard.group for view in views).values():
        found += buckets([(p, views[p].variable) for p in places], options.bucket_bytes)
    assigned: list[list] = []
    most = max_in_flight(sharded=True) or len(found)
    for number, bucket in enumerate(found):
        some = [views[place] for place in bucket]
        # The old parameters of a bucket are freed before those of the next but one are gathered.
        gone = assigned[-most] if number >= most else []
        with tf.control_dependencies(gone):
            own = [tf.identity(view.value) for view in some]
        arrays = all_gather_arrays(own, [view.shard for view in some], f"parameters/bucket{number}")
        pairs = zip(some, arrays, strict=True)
        assigned.append([view.variable.assign(array, read_value=False) for view, array in pairs])
