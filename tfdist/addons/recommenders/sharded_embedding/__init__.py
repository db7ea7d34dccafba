"""Embedding tables that are sharded over the ranks with different rows of a batch."""

from tfdist.addons.recommenders.sharded_embedding.config import FeatureConfig, TableConfig
from tfdist.addons.recommenders.sharded_embedding.layer import ShardedEmbedding

__all__ = ["FeatureConfig", "ShardedEmbedding", "TableConfig"]
