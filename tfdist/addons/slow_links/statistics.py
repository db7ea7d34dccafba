"""What compression of gradients has cost and saved."""

from __future__ import annotations

import keras

from tfdist.addons.slow_links.compressor import Compressor
from tfdist.addons.slow_links.meter import CompressionStatistics
from tfdist.addons.slow_links.state import CompressionState, state_of
from tfdist.step.context import strategy_of
from tfdist.utils import checks


def compression_state_of(model: keras.Model) -> CompressionState | None:
    """The state of a compiled model's compression; None where its strategy compresses nothing."""
    strategy = strategy_of(model)
    stages = [] if strategy is None else strategy.gradient_stages
    for stage in stages:
        if isinstance(stage, Compressor):
            return state_of(model, stage)
    return None


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
