"""What compression of gradients has cost and saved."""

from __future__ import annotations

import keras

from tfdist import checks
from tfdist.compression.meter import CompressionStatistics
from tfdist.gradients.compressed import compression_state_of

__all__ = ["compression_statistics"]


def compression_statistics(model: keras.Model) -> CompressionStatistics | None:
    """Bytes before and after, and times, of the training steps of a model on this rank.

    Its text is one line that says whether compression pays on this link, and by how much. Of the
    first steps, which travel whole, the time is what compression is compared with.

    Args:
        model: A compiled model.

    Returns:
        The statistics; None where its strategy compresses nothing.
    """
    checks.instance("model", model, keras.Model, "a Keras model")
    state = compression_state_of(model)
    return None if state is None else state.meter.read()
