"""The optimizer's step where each rank updates its flat shards of parameters that all hold."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfdist.optimizers.buckets import buckets
from tfdist.optimizers.pacing import UNDER_WAY_SHARDED, Pace
from tfdist.optimizers.rows import reduce_rows, shard_of_rows
from tfdist.optimizers.zero.flat import FlatSharding, gather, scatter

__all__ = ["ShardView", "publish", "scatter_gradients"]


class ShardView:
    """This rank's flat shard of a parameter, as an optimizer looks at a `tf.Variable`.

    What is assigned stays here until `publish` gives it to the parameter.

    Args:
        variable: The parameter.
        sharding: How it is cut.

    Attributes:
        is_changed: Whether something was assigned.
    """

    def __init__(self, variable: tf.Variable, sharding: FlatSharding):
        self.variable, self.sharding = variable, sharding
        self.name, self.dtype, self.device = variable.name, variable.dtype, variable.device
        self.shape = tf.TensorShape([sharding.share])
        # What optimizers find their state for a variable by.
        self._unique_id = variable._unique_id
        self._value: tf.Tensor | None = None
        self.is_changed = False

    @property
    def value(self) -> tf.Tensor:
        """The shard: what was assigned last."""
        if self._value is None:
            self._value = self.sharding.own_of(tf.convert_to_tensor(self.variable))
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


def scatter_gradients(
    gradients: Sequence,
    shardings: Sequence[FlatSharding | None],
    reduction: str,
    bucket_bytes: int,
    *,
    keep_rows: bool = False,
) -> list:
    """Reduces gradients, of which each rank gets its flat shards.

    Args:
        gradients: Tensors, IndexedSlices or None, in the order of the variables.
        shardings: How each is cut; None for those that are left as they are.
        reduction: "sum" or "mean".
        bucket_bytes: The size at which a bucket is full.
        keep_rows: Whether sparse gradients stay sparse, with the rows of all ranks.
    """
    found = list(gradients)
    cuts = {
        place: sharding
        for place, (gradient, sharding) in enumerate(zip(gradients, shardings, strict=True))
        if gradient is not None and sharding is not None
    }
    for place, sharding in list(cuts.items()):
        if keep_rows and isinstance(found[place], tf.IndexedSlices):
            rows = reduce_rows(found[place], sharding.group, reduction, f"gradients/{place}")
            found[place] = shard_of_rows(rows, cuts.pop(place))
        else:
            found[place] = tf.convert_to_tensor(found[place])
    # Last layers first: the backward pass yields theirs first.
    ready = [(place, found[place]) for place in reversed(cuts)]
    pace = Pace(UNDER_WAY_SHARDED)
    for number, bucket in enumerate(buckets(ready, bucket_bytes)):
        pace.begin([found[place] for place in bucket])
        shards = scatter(
            [found[place] for place in bucket],
            [cuts[place] for place in bucket],
            reduction,
            f"gradients/bucket{number}",
        )
        pace.end(shards)
        for place, shard in zip(bucket, shards, strict=True):
            found[place] = shard
    return found


def publish(views: Sequence[ShardView], bucket_bytes: int) -> None:
    """Gives all ranks what each has assigned to its shards.

    Args:
        views: The shards.
        bucket_bytes: The size at which a bucket is full.
    """
    whole = [(place, view.variable) for place, view in enumerate(views)]
    assigned: list[list] = []
    for number, bucket in enumerate(buckets(whole, bucket_bytes)):
        some = [views[place] for place in bucket]
        # The old parameters of a bucket go before the new ones of the next but one come.
        gone = assigned[-UNDER_WAY_SHARDED] if number >= UNDER_WAY_SHARDED else []
        with tf.control_dependencies(gone):
            own = [tf.identity(view.value) for view in some]
        arrays = gather(own, [view.sharding for view in some], f"parameters/bucket{number}")
        assigned.append(
            [
                view.variable.assign(array, read_value=False)
                for view, array in zip(some, arrays, strict=True)
            ]
        )
