"""Recommender models: sharded embedding tables, DLRM, and synthetic clicks."""

from tfdist.addons.recommenders.clicks import make_clicks
from tfdist.addons.recommenders.dlrm import dlrm
from tfdist.addons.recommenders.sharded_embedding import (
    FeatureConfig,
    ShardedEmbedding,
    TableConfig,
)

__all__ = ["FeatureConfig", "ShardedEmbedding", "TableConfig", "dlrm", "make_clicks"]
