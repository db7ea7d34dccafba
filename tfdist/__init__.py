"""tfdist: data, tensor, pipeline and ZeRO parallel training for Keras 3 on TensorFlow."""

from tfdist._version import __version__
from tfdist.mesh import Mesh

__all__ = ["Mesh", "__version__"]
