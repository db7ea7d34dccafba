"""What compression of gradients has cost and saved."""

from __future__ import annotations

import keras

from tfdist import checks
from tfdist.compression.meter import CompressionStatistics
from tfdist.context import strategy_of
from tfdist.gradients.compressed import compression_state
from tfdist.sharding.updates import unwrapped

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
    strategy, optimizer = strategy_of(model), getattr(model, "optimizer", None)
    if strategy is None or optimizer is None or strategy.gradient_options.compression is None:
        return None
    compressor = strategy.gradient_options.compression
    return compression_state(unwrapped(optimizer), compressor).meter.read()
