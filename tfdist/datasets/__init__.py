"""Data sets for training on a mesh: read whole, or each rank its share.

TensorFlow Datasets, for images, is imported by the first call that needs it:
`pip install 'tfdist[data]'`. Text needs nothing.
"""

from tfdist.data.dynamic import DynamicSharding
from tfdist.datasets.clicks import make_clicks
from tfdist.datasets.loading import load, load_for_rank
from tfdist.datasets.text import language_model_windows, load_text

__all__ = [
    "DynamicSharding",
    "language_model_windows",
    "load",
    "load_for_rank",
    "load_text",
    "make_clicks",
]
