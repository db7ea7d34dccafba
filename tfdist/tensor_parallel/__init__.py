"""Tensor parallelism for stock Keras and KerasHub models, by a plan."""

from tfdist.tensor_parallel.finding import find_plan
from tfdist.tensor_parallel.model import parallelize, report
from tfdist.tensor_parallel.plan import GPT2, LLAMA

__all__ = ["GPT2", "LLAMA", "find_plan", "parallelize", "report"]
