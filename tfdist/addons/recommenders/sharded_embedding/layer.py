"""`ShardedEmbedding`: the tables of a recommender, sharded over ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.addons.recommenders.sharded_embedding.bags import Bags, bags_of
from tfdist.addons.recommenders.sharded_embedding.config import (
    FeatureConfig,
    TableConfig,
    tables_of,
)
from tfdist.addons.recommenders.sharded_embedding.draws import SliceDrawn
from tfdist.addons.recommenders.sharded_embedding.errors import error_of, raise_errors
from tfdist.addons.recommenders.sharded_embedding.exchange import Lookup, look_up
from tfdist.addons.recommenders.sharded_embedding.placement import place_tables, placement_report
from tfdist.backend import devices
from tfdist.backend.graph.compiling import check_sizes_may_change
from tfdist.collectives import Group
from tfdist.sharding.updates import needs_rows
from tfdist.sharding.weights import add_split_weight
from tfdist.step.context import ReplicaContext, current_replica, current_strategy
from tfdist.step.keras_step import with_global_gradient
from tfdist.utils import checks


@keras.saving.register_keras_serializable(package="tfdist")
class ShardedEmbedding(keras.layers.Layer):
    """Embedding tables that are sharded over the ranks with different rows of a batch.

    No rank has a whole table, unless it is placed so. In a step each rank sends the ids of its rows to
    the ranks that have these rows of the tables, and receives the vectors; gradients are sent in the
    opposite direction. All tables and features share the communication: one exchange of ids, one of
    vectors, one of gradients. A rank updates its own part, and has the optimizer's state of that part
    only. The result is that of `keras.layers.Embedding` in one process.

    Tables are placed by `TableConfig.placement`. With "auto" a table is placed whole on one rank if it is
    at most half of a rank's share of all tables; larger ones are split by rows, or by columns if they
    have fewer rows than there are ranks. Without a strategy, and on one rank, all tables are whole.

    An id outside its vocabulary is an error on every rank (`tf.errors.InvalidArgumentError`), which
    names the feature and the id.

    ```python
    users = tfdist.addons.recommenders.TableConfig("users", 10_000_000, 64)
    words = tfdist.addons.recommenders.TableConfig("words", 50_000, 64, combiner="sum")
    layer = tfdist.addons.recommenders.ShardedEmbedding(
        [
            tfdist.addons.recommenders.FeatureConfig("user", users),
            tfdist.addons.recommenders.FeatureConfig("title", words, padding_id=-1),
            tfdist.addons.recommenders.FeatureConfig("query", words, padding_id=-1),
        ]
    )
    vectors = layer({"user": user, "title": title, "query": query})  # [rows, 64] each
    ```

    Args:
        features: The features, with their tables.
        **kwargs: As for `keras.layers.Layer`.

    Call arguments:
        inputs: A dict from the names of the features to their ids: dense, of shape [rows] or
            [rows, ..., ids], ragged or sparse, of shape [rows, (ids)].
        weights: A dict from names of features to the weights of their ids, in the form of the ids.

    Raises:
        ValueError: Two features, or two tables, have the same name.
        TypeError: `features` is not a list of features.
    """

    def __init__(self, features: Sequence[FeatureConfig], **kwargs):
        super().__init__(**kwargs)
        # As in `keras.layers.Embedding`: vectors are cast, not tables.
        self.autocast = False
        # XLA ignores assertions.
        self.supports_jit = False
        is_list = isinstance(features, Sequence) and len(features) > 0
        if not is_list or not all(isinstance(each, FeatureConfig) for each in features):
            meaning = "a non-empty list of tfdist.addons.recommenders.FeatureConfig"
            raise checks.refuse("features", features, meaning, TypeError)
        self.features = tuple(features)
        self._tables = tuple(tables_of(self.features))
        strategy = current_strategy()
        group = None if strategy is None else strategy.row_group
        self._group: Group | None = None if group is None or group.size == 1 else group
        self._placements = tuple(place_tables(self._tables, self._group))

    def build(self, input_shape=None):
        """Adds this rank's parts of the tables."""
        self._weights_of = {
            table.name: self._add_table(table, placement.part)
            for table, placement in zip(self._tables, self._placements, strict=True)
        }
        self.built = True

    def _add_table(self, table: TableConfig, part):
        return add_split_weight(
            self,
            table.shape,
            0 if part is None else part.dim,
            axis=self._group,
            name=table.name,
            initializer=SliceDrawn(table.initializer),
            regularizer=table.regularizer,
            constraint=table.constraint,
            sizes=None if part is None else part.sizes,
        )

    @property
    def tables(self) -> dict[str, keras.Variable]:
        """This rank's parts of the tables, by their names."""
        if not self.built:
            self.build()
        return dict(self._weights_of)

    def report(self) -> str:
        """A report of the placement of each embedding table, and its MiB on the ranks."""
        itemsize = tf.as_dtype(self.variable_dtype).size
        return placement_report(self._tables, self._placements, self._group, itemsize)

    def call(self, inputs, weights=None, training=None):
        """Maps dicts of ids, and optionally of weights, to a dict of vectors [..., embedding_dim]."""
        self._check_inputs(inputs, weights)
        replica = current_replica()
        is_absent = None if replica is None else replica.has_padding
        # Ids, and the sizes that depend on them, are the host's.
        with devices.on_host():
            bags = [
                bags_of(feature, inputs[feature.name], (weights or {}).get(feature.name), is_absent)
                for feature in self.features
            ]
        vectors = self._vectors(bags, replica, training)
        dtype = tf.as_dtype(self.compute_dtype)
        return {
            feature.name: bag.combine(found, dtype)
            for feature, bag, found in zip(self.features, bags, vectors, strict=True)
        }

    def _vectors(self, bags: Sequence[Bags], replica: ReplicaContext | None, training) -> list:
        """The vectors of the ids of each feature."""
        dtype = tf.as_dtype(self.compute_dtype)
        with devices.on_host():
            error, ids = error_of(self.features, [bag.ids for bag in bags])
        if self._group is None:
            raise_errors(self, error[None], None)
            return [
                tf.cast(tf.gather(self._weights_of[feature.table.name].value, some), dtype)
                for feature, some in zip(self.features, ids, strict=True)
            ]
        check_sizes_may_change(f"the tables of `{self.name}`")
        places = [
            [place for place, feature in enumerate(self.features) if feature.table is table]
            for table in self._tables
        ]
        step = None if replica is None else replica.step
        adds_up = _adds_up(step, training)
        lookups, expand = [], []
        for table, placement, some in zip(self._tables, self._placements, places, strict=True):
            with devices.on_host():
                joined = tf.concat([ids[place] for place in some], axis=0)
                if adds_up:
                    joined, index = tf.unique(joined)
                    expand.append(index)
            variable = self._weights_of[table.name].value
            lookups.append(Lookup(variable, placement, joined, table.embedding_dim))
        # Gradients are sent in the dtype of the variables: one process would not round them.
        is_trained = training is not False and (step is None or step.kind == "train")
        wire = tf.as_dtype(self.variable_dtype) if is_trained else dtype
        if step is not None and not step.is_even:
            # A rank that ends for an error must not leave another waiting in the next collective.
            with tf.control_dependencies([step.share]):
                error = tf.identity(error)
        found = look_up(
            lookups,
            error,
            self._group,
            wire,
            self.name,
            lambda errors: raise_errors(self, errors, self._group),
        )
        vectors: list = [None] * len(bags)
        for number, some in enumerate(places):
            rows = with_global_gradient(found[number], step)
            if adds_up:
                rows = tf.gather(rows, expand[number])
            parts = tf.split(rows, [tf.size(ids[place]) for place in some], num=len(some))
            for place, part in zip(some, parts, strict=True):
                part.set_shape([None, self.features[place].table.embedding_dim])
                vectors[place] = tf.cast(part, dtype)
        return vectors

    def _check_inputs(self, inputs, weights) -> None:
        names = {feature.name for feature in self.features}
        for what, given in (("inputs", inputs), ("weights", weights)):
            if given is None and what == "weights":
                continue
            found = set(given) if isinstance(given, Mapping) else None
            if found is None or not (names == found if what == "inputs" else found <= names):
                raise ValueError(
                    f"The `{what}` of `{self.name}` must be a dict with the names of its features: "
                    f"{sorted(names)}. Received: "
                    f"{sorted(found) if found is not None else checks.shown(given)}."
                )

    def compute_output_spec(self, inputs, weights=None, training=None):
        """The shapes of the vectors."""
        self._check_inputs(inputs, weights)
        found = {}
        for feature in self.features:
            shape, table = tuple(inputs[feature.name].shape), feature.table
            bags = shape if table.combiner is None or len(shape) == 1 else shape[:-1]
            found[feature.name] = keras.KerasTensor(
                (*bags, table.embedding_dim), self.compute_dtype
            )
        return found

    def get_config(self) -> dict[str, Any]:
        """The configuration, which is the same on any mesh."""
        return {
            **super().get_config(),
            "tables": [table.get_config() for table in self._tables],
            "features": [
                {
                    "name": feature.name,
                    "table": feature.table.name,
                    "padding_id": feature.padding_id,
                }
                for feature in self.features
            ],
        }

    @classmethod
    def from_config(cls, config):
        """Makes a layer from a configuration."""
        config = dict(config)
        tables = {table["name"]: TableConfig.from_config(table) for table in config.pop("tables")}
        features = [
            FeatureConfig(**{**feature, "table": tables[feature["table"]]})
            for feature in config.pop("features")
        ]
        return cls(features, **config)


def _adds_up(step, training) -> bool:
    """Whether an id that a rank looks up several times is sent once.

    Its gradients are then sent as their sum, so an update must not use the rows separately.
    """
    if step is None:
        return training is False
    if step.kind != "train":
        return True
    model = step.model
    # A custom step may use other optimizers.
    is_keras = type(model).train_step is keras.Model.train_step
    return is_keras and model.optimizer is not None and not needs_rows(model.optimizer)
