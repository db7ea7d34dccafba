"""How the gradients of a strategy travel between ranks."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

#: Large enough that a sum is mostly bytes and not messages, small enough that the first bucket
#: leaves early in the backward pass. `tfdist-bench buckets` measures what suits a network.
BUCKET_BYTES = 4 << 20


@dataclasses.dataclass(frozen=True)
class GradientOptions:
    """How gradients travel; read where they are reduced, and nowhere else.

    Attributes:
        bucket_bytes: The size at which a bucket is full: gradients of a bucket travel as one tensor.
        communication_dtype: What gradients of wider dtypes travel in; None for their own.
    """

    bucket_bytes: int = BUCKET_BYTES
    communication_dtype: tf.DType | None = None
