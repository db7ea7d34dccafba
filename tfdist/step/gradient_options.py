"""How the gradients of a strategy are sent between ranks."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

#: Large enough for bandwidth, rather than latency, to determine the time of a reduction, and small
#: enough to send the first bucket early in the backward pass. `tfdist-bench buckets` measures the best size.
BUCKET_BYTES = 4 << 20


@dataclasses.dataclass(frozen=True)
class GradientOptions:
    """How gradients are sent.

    Attributes:
        bucket_bytes: The size at which a bucket is full. Gradients of a bucket are sent as one tensor.
        communication_dtype: The dtype in which gradients of wider dtypes are sent; None for their own.
    """

    bucket_bytes: int = BUCKET_BYTES
    communication_dtype: tf.DType | None = None
