"""Tensor parallelism for stock Keras and KerasHub models, by a plan."""

from tfdist.tensor_parallel.finding import find_plan
from tfdist.tensor_parallel.model import parallelize as parallelize
from tfdist.tensor_parallel.model import report
from tfdist.tensor_parallel.plan import GPT2, LLAMA

#: `parallelize` is public as `tfdist.parallelize`.
__all__ = ["GPT2", "LLAMA", "find_plan", "report"]
