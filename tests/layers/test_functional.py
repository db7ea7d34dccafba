"""Layers in functional models, without a strategy."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from tfdist import layers, models


@pytest.mark.parametrize(
    "layer",
    [
        layers.ColumnParallelDense(8),
        layers.RowParallelDense(8),
        layers.ParallelMLP(16),
        layers.ParallelMultiHeadAttention(2, 4),
        layers.PositionEmbedding(6),
        layers.LayerNormalization(),
        layers.RMSNormalization(),
        layers.Dropout(0.5),
        models.TransformerDecoderBlock(2, 16),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_layers_stand_in_functional_models(layer):
    inputs = keras.Input((6, 8))
    model = keras.Model(inputs, layer(inputs))
    assert model(np.ones((2, 6, 8), "float32")).shape == (2, 6, 8)
    assert model.output_shape == (None, 6, 8)
