"""Tensor parallelism for models that know nothing of it: stock Keras and KerasHub, by a plan."""

from tfdist.parallelize.model import parallelize
from tfdist.parallelize.plan import GPT2, LLAMA

__all__ = ["GPT2", "LLAMA", "parallelize"]
