"""Statistics of the cost and benefit of gradient compression."""

from __future__ import annotations

import keras

from tfdist.addons.slow_links.compressor import Compressor
from tfdist.addons.slow_links.meter import CompressionStatistics
from tfdist.addons.slow_links.state import CompressionState, state_of
from tfdist.step.context import strategy_of
from tfdist.utils import checks


def compression_state_of(model: keras.Model) -> CompressionState | None:
    """The state of a compiled model's compression; None if its strategy does not compress."""
    strategy = strategy_of(model)
    stages = [] if strategy is None else strategy.gradient_stages
    for stage in stages:
        if isinstance(stage, Compressor):
            return state_of(model, stage)
    return None


def compression_statistics(model: keras.Model) -> CompressionStatistics | None:
    """Sizes and times of the gradients of a model's training steps on this rank.

    The text of the result is one line that states whether compression pays on this link, and by how
    much, compared with the time of the first steps, which are not compressed.

    Args:
        model: A compiled model.

    Returns:
        The statistics; None if its strategy does not compress.
    """
    checks.instance("model", model, keras.Model, "a Keras model")
    state = compression_state_of(model)
    return None if state is None else state.meter.read()
