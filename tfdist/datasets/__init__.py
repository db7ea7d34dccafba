"""Data sets for training on a mesh: read whole, or each rank its share.

TensorFlow Datasets, for images, is imported by the first call that needs it:
`pip install 'tfdist[data]'`. Text needs nothing.
"""

from typing import TYPE_CHECKING, Any

from tfdist.datasets.loading import load, load_for_rank, rank_split, read_config
from tfdist.datasets.text import Text, language_model_windows, load_text

if TYPE_CHECKING:
    from tfdist.datasets.digits import Digits

__all__ = [
    "Digits",
    "Text",
    "language_model_windows",
    "load",
    "load_for_rank",
    "load_text",
    "rank_split",
    "read_config",
]


def __getattr__(name: str) -> Any:
    # A TFDS builder is a subclass of TFDS' own, so this one waits until somebody asks for it.
    if name == "Digits":
        from tfdist.datasets.digits import Digits

        return Digits
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
