"""How the gradients of a strategy are sent between ranks."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from tfdist.backend import devices

#: Large enough for bandwidth, rather than latency, to determine the time of a reduction, and small
#: enough to send the first bucket early in the backward pass. `tfdist-bench buckets` measures the best size.
BUCKET_BYTES = 4 << 20
#: On GPUs, whose backward pass takes milliseconds, a bucket costs more by its start than by its bytes.
BUCKET_BYTES_ON_GPUS = 64 << 20


def default_bucket_bytes() -> int:
    """The size of a bucket for the devices of this rank, in bytes."""
    return BUCKET_BYTES_ON_GPUS if devices.has_gpu() else BUCKET_BYTES


@dataclasses.dataclass(frozen=True)
class GradientOptions:
    """How gradients are sent.

    Attributes:
        bucket_bytes: The size at which a bucket is full. Gradients of a bucket are sent as one tensor.
        communication_dtype: The dtype in which gradients of wider dtypes are sent; None for their own.
    """

    bucket_bytes: int = dataclasses.field(default_factory=default_bucket_bytes)
    communication_dtype: tf.DType | None = None
