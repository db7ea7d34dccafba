"""Kernels for CPUs, in C++: layers and optimizers in one pass over memory."""

from pathlib import Path
from typing import TYPE_CHECKING

from tfdist.backend.native import Library
from tfdist.utils.lazy import lazy_names

if TYPE_CHECKING:
    from tfdist.addons.cpu_kernels.updates import PATCHES as PATCHES

LIBRARY = Library(Path(__file__).parent, "kernels")

#: Layers and optimizers find them by `tfdist.backend.kernels`; programs need no name of it.
__all__: list[str] = []
__getattr__, __dir__ = lazy_names(__name__, {"PATCHES": "tfdist.addons.cpu_kernels.updates"})
