"""Tensor parallelism for models that know nothing of it: stock Keras and KerasHub, by a plan."""

from tfdist.parallelize.model import parallelize
from tfdist.parallelize.plan import GPT2, LLAMA
from tfdist.parallelize.report import ParallelizeReport, VariableReport

__all__ = ["GPT2", "LLAMA", "ParallelizeReport", "VariableReport", "parallelize"]
