"""Datasets for training on a mesh: read as a whole, or each rank its share.

TensorFlow Datasets, for images, is imported by the first call that needs it:
`pip install 'tfdist[data]'`. Text needs no other package.
"""

from tfdist.addons.datasets.loading import load, load_for_rank
from tfdist.addons.datasets.rows import row_dataset
from tfdist.addons.datasets.text import language_model_windows, load_text

__all__ = [
    "language_model_windows",
    "load",
    "load_for_rank",
    "load_text",
    "row_dataset",
]
