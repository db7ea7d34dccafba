"""DLRM: a recommender of dense features and embedded ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from tfdist.addons.recommenders.sharded_embedding import (
    FeatureConfig,
    ShardedEmbedding,
    TableConfig,
)
from tfdist.utils import checks


def dlrm(
    num_dense: int,
    vocabulary_sizes: Sequence[int],
    *,
    embedding_dim: int = 16,
    bottom_widths: Sequence[int] = (64,),
    top_widths: Sequence[int] = (64, 32),
    bag_sizes: Sequence[int] | None = None,
    placement: str = "auto",
    name: str = "dlrm",
) -> keras.Model:
    """Returns a deep learning recommendation model, with one logit.

    A bottom perceptron maps the dense features to a vector of the width of the embeddings; that vector and
    the dot products of all pairs of vectors are the inputs of the top perceptron (Naumov et al.,
    "Deep Learning Recommendation Model for Personalization and Recommendation Systems", 2019). The
    tables are those of a `tfdist.addons.recommenders.ShardedEmbedding`: under a strategy each rank has a
    part.

    Inputs: a dict with "dense" of shape [rows, num_dense], and "id_0", "id_1" and so on, int32 of
    shape [rows, bag size]. In bags of several ids -1 is padding; their vectors are summed. Output: logits
    of shape [rows, 1].

    Args:
        num_dense: The number of dense features.
        vocabulary_sizes: The rows of each table.
        embedding_dim: The width of all tables.
        bottom_widths: The widths of the hidden layers for dense features.
        top_widths: The widths of the hidden layers for the interactions.
        bag_sizes: The number of ids of each feature; None for one each.
        placement: The placement of the tables: see `tfdist.addons.recommenders.TableConfig`.
        name: The model's name.

    Raises:
        ValueError: A size is not positive, or the numbers of bags and tables differ.
    """
    num_dense = checks.integer("num_dense", num_dense, minimum=1)
    vocabulary_sizes = checks.integers("vocabulary_sizes", vocabulary_sizes, minimum=1)
    embedding_dim = checks.integer("embedding_dim", embedding_dim, minimum=1)
    bottom_widths = checks.integers("bottom_widths", bottom_widths, minimum=1, empty=True)
    top_widths = checks.integers("top_widths", top_widths, minimum=1, empty=True)
    bags = checks.integers("bag_sizes", bag_sizes, minimum=1, optional=True)
    bags = (1,) * len(vocabulary_sizes) if bags is None else bags
    if len(bags) != len(vocabulary_sizes):
        raise checks.refuse(
            "bag_sizes", bag_sizes, f"a size for each of {len(vocabulary_sizes)} tables"
        )
    checks.text("name", name)

    dense = x = keras.Input((num_dense,), name="dense")
    for number, width in enumerate((*bottom_widths, embedding_dim)):
        x = keras.layers.Dense(width, activation="relu", name=f"bottom_{number}")(x)
    features, ids = [], {}
    for number, (size, bag) in enumerate(zip(vocabulary_sizes, bags, strict=True)):
        limit = size**-0.5
        table = TableConfig(
            f"table_{number}",
            size,
            embedding_dim,
            initializer=keras.initializers.RandomUniform(-limit, limit),
            combiner="sum",
            placement=placement,
        )
        features.append(FeatureConfig(f"id_{number}", table, None if bag == 1 else -1))
        ids[f"id_{number}"] = keras.Input((bag,), dtype="int32", name=f"id_{number}")
    vectors = ShardedEmbedding(features, name="embeddings")(ids)
    pairs = _DotInteraction(name="interaction")([x, *vectors.values()])
    y = keras.layers.Concatenate(name="joined")([x, pairs])
    for number, width in enumerate(top_widths):
        y = keras.layers.Dense(width, activation="relu", name=f"top_{number}")(y)
    logits = keras.layers.Dense(1, name="logits")(y)
    return keras.Model({"dense": dense, **ids}, logits, name=name)


@keras.saving.register_keras_serializable(package="tfdist")
class _DotInteraction(keras.layers.Layer):
    """The dot products of all pairs of several vectors [rows, width]: [rows, pairs]."""

    def call(self, inputs):
        """Computes the products of a list of vectors."""
        count = len(inputs)
        stacked = keras.ops.stack(inputs, axis=1)
        products = keras.ops.matmul(stacked, keras.ops.transpose(stacked, (0, 2, 1)))
        first, second = np.tril_indices(count, -1)
        flat = keras.ops.reshape(products, (-1, count * count))
        return keras.ops.take(flat, first * count + second, axis=1)

    def compute_output_shape(self, input_shape) -> tuple[Any, ...]:
        """The number of rows and of pairs."""
        count = len(input_shape)
        return input_shape[0][0], count * (count - 1) // 2
