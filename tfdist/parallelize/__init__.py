"""Tensor parallelism for models that know nothing of it: stock Keras and KerasHub, by a plan."""

from tfdist.parallelize.finding import find_plan
from tfdist.parallelize.model import parallelize, report
from tfdist.parallelize.plan import GPT2, LLAMA

__all__ = ["GPT2", "LLAMA", "find_plan", "parallelize", "report"]
