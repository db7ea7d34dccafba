"""The configuration of tables, and of the features that are looked up in them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras

from tfdist.layers.initializers import initializer
from tfdist.utils import checks

COMBINERS = ("sum", "mean")
PLACEMENTS = ("auto", "rows", "columns", "table")


@dataclasses.dataclass(frozen=True, eq=False)
class TableConfig:
    """An embedding table.

    Args:
        name: Its name, which is also that of its weight.
        vocabulary_size: The number of rows; ids are in [0, vocabulary_size).
        embedding_dim: The width of a row.
        initializer: The initializer of the table, of shape [vocabulary_size, embedding_dim].
        combiner: How the vectors of a bag of ids are combined: "sum" or "mean", by the weights if
            there are any; None keeps a vector for each id.
        placement: "rows" assigns each rank a range of the rows, "columns" a range of the width, and
            "table" the whole table to one rank. "auto" chooses by size: see `ShardedEmbedding`.
        regularizer: A sum over entries, as L1 and L2 are.
        constraint: An elementwise constraint, such as NonNeg.

    Raises:
        ValueError: An argument is out of range.
    """

    name: str
    vocabulary_size: int
    embedding_dim: int
    initializer: Any = "uniform"
    combiner: str | None = "mean"
    placement: str = "auto"
    regularizer: Any = None
    constraint: Any = None

    def __post_init__(self):
        checks.text("name", self.name)
        if "/" in self.name:
            raise checks.refuse("name", self.name, "a string without `/`, as a name of a weight")
        checks.integer("vocabulary_size", self.vocabulary_size, minimum=1)
        checks.integer("embedding_dim", self.embedding_dim, minimum=1)
        checks.one_of("combiner", self.combiner, COMBINERS, optional=True)
        checks.one_of("placement", self.placement, PLACEMENTS)
        found = {
            "initializer": initializer("initializer", self.initializer),
            "regularizer": keras.regularizers.get(self.regularizer),
            "constraint": keras.constraints.get(self.constraint),
        }
        for name, value in found.items():
            object.__setattr__(self, name, value)

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the table."""
        return self.vocabulary_size, self.embedding_dim

    def get_config(self) -> dict[str, Any]:
        """The configuration, from which `from_config` makes the same table."""
        found = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {
            **found,
            "initializer": keras.initializers.serialize(self.initializer),
            "regularizer": keras.regularizers.serialize(self.regularizer),
            "constraint": keras.constraints.serialize(self.constraint),
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> TableConfig:
        """Makes a table from a configuration."""
        return cls(**config)


@dataclasses.dataclass(frozen=True, eq=False)
class FeatureConfig:
    """A feature: an input of ids, which are looked up in a table.

    Args:
        name: Its name in inputs and outputs.
        table: The table; several features may share one.
        padding_id: The id that pads rows of dense inputs and is ignored. It may be outside the
            vocabulary, as -1 is. None: each id counts.

    Raises:
        ValueError: An argument is out of range.
        TypeError: `table` is not a `TableConfig`.
    """

    name: str
    table: TableConfig
    padding_id: int | None = None

    def __post_init__(self):
        checks.text("name", self.name)
        checks.instance(
            "table", self.table, TableConfig, "a tfdist.addons.recommenders.TableConfig"
        )
        checks.integer("padding_id", self.padding_id, optional=True)


def tables_of(features: Sequence[FeatureConfig]) -> list[TableConfig]:
    """The tables of features, in the order of their first features.

    Raises:
        ValueError: Two tables, or two features, have the same name.
    """
    tables = list(dict.fromkeys(feature.table for feature in features))
    for what, names in (
        ("features", [feature.name for feature in features]),
        ("tables", [table.name for table in tables]),
    ):
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"The {what} must have different names. Received twice: {twice}.")
    return tables
