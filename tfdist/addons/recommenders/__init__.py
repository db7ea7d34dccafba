"""Recommender models: embedding tables in parts on the ranks, DLRM, and made-up clicks."""

from tfdist.addons.recommenders.clicks import make_clicks
from tfdist.addons.recommenders.dlrm import dlrm
from tfdist.addons.recommenders.sharded_embedding import (
    FeatureConfig,
    ShardedEmbedding,
    TableConfig,
)

__all__ = ["FeatureConfig", "ShardedEmbedding", "TableConfig", "dlrm", "make_clicks"]
