"""CPU kernels in C++: layers and optimizers in one pass over memory."""

from pathlib import Path
from typing import TYPE_CHECKING

from tfdist.backend.native import Library
from tfdist.utils.lazy import lazy_names

if TYPE_CHECKING:
    from tfdist.addons.cpu_kernels import updates as updates
    from tfdist.addons.cpu_kernels.updates import PATCHES as PATCHES

LIBRARY = Library(Path(__file__).parent, "kernels")

#: Layers and optimizers find the kernels by `tfdist.backend.kernels`, so no name is public.
__all__: list[str] = []
__getattr__, __dir__ = lazy_names(
    __name__, {"PATCHES": "tfdist.addons.cpu_kernels.updates"}, ("updates",)
)
