"""The parts, the most important first: what each asks, its limit in seconds, and how it is run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Part:
    """A measurement or a check in processes of its own.

    Attributes:
        name: Its name.
        asks: The question that it answers.
        seconds: Its time-out.
        function: "module:function" of this package.
        arguments: Those of the function.
        environment: Variables of its process.
    """

    name: str
    asks: str
    seconds: float
    function: str
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)


_CLUSTERS = {"TF_XLA_FLAGS": "--tf_xla_auto_jit=2"}
_ENGINES = ("tensorflow", "horovod")
#: Meshes and options whose first steps are compared with one process.
LAYOUTS = {
    "data": ({}, {}),
    "tensor": ({"tensor": 2}, {}),
    "zero3": ({}, {"zero_stage": 3}),
    "pipeline": ({"pipeline": 2}, {}),
    "context": ({"context": 2}, {}),
    "expert": ({"expert": 2}, {}),
}


def _step(name: str, asks: str, seconds: float = 90.0, environment=None, **arguments) -> Part:
    return Part(name, asks, seconds, "steps:step", arguments, environment or {})


PARTS = (
    Part("libraries", "Which driver, GPU, NCCL? One NCCL in a process?", 40, "ranks:libraries"),
    *(
        Part(f"sums-{engine}", "Are collectives right, do any hang?", 90, "ranks:conformance", {"engine": engine})
        for engine in _ENGINES
    ),
    *(
        Part(f"parity-{engine}", "Do layouts equal one process?", 150, "ranks:parity", {"engine": engine})
        for engine in _ENGINES
    ),
    _step(
        "gpt-tfdist-xla", "GPT-2 small by tfdist.models.gpt, one rank, compiled", 150, model="tfdist",
        strategy="local", jit=True,
    ),
    _step("gpt-hub-xla", "GPT-2 small by KerasHub, one rank, compiled", 150, model="hub", strategy="local", jit=True),
    _step("gpt-keras", "The same without a strategy, without XLA", model="hub", jit=False),
    _step("gpt-keras-xla", "The same with XLA", 150, model="hub", jit=True),
    _step("gpt-keras-jax", "The same on JAX", 120, environment={"KERAS_BACKEND": "jax"}, model="hub"),
    _step(
        "data-xla", "A data parallel step by loopback, compiled between collectives", 150, model="tfdist",
        strategy="loopback", axes={"data": 2}, jit=True,
    ),
    _step(
        "tensor-xla", "A tensor parallel step by loopback, compiled", 150, model="tfdist", strategy="loopback",
        axes={"tensor": 2}, jit=True,
    ),
    _step("gpt-tfdist", "GPT-2 small by tfdist.models.gpt, not compiled", model="tfdist", strategy="local", jit=False),
    _step("gpt-hub", "GPT-2 small by KerasHub, not compiled", model="hub", strategy="local", jit=False),
    _step("data", "A data parallel step", model="tfdist", strategy="loopback", axes={"data": 2}, jit=False),
    _step("tensor", "A tensor parallel step", model="tfdist", strategy="loopback", axes={"tensor": 2}, jit=False),
    _step(
        "data-gated", "The price of counters that gate", model="tfdist", strategy="loopback", axes={"data": 2},
        gates=True, jit=False,
    ),
    _step(
        "data-small-buckets", "The price of buckets of 4 MiB", model="tfdist", strategy="loopback", axes={"data": 2},
        bucket_mib=4, jit=False,
    ),
    _step(
        "data-clusters", "What TensorFlow's clusters give", 150, environment=_CLUSTERS, model="tfdist",
        strategy="loopback", axes={"data": 2}, jit=False,
    ),
    *(
        Part(
            f"parity-{engine}-xla", "Do compiled steps equal one process?", 240, "ranks:parity",
            {"engine": engine, "jit": True},
        )
        for engine in _ENGINES
    ),
    Part("attention", "Attention at 1,024 and 4,096 tokens: blocks, whole, XLA", 60, "steps:attention"),
    Part("fused-attention", "Does cuDNN's attention run by a StableHLO call? Right, how fast?", 60, "probes:attention"),
    Part("ffi-sum", "Does a handler that calls NCCL on XLA's stream give right sums?", 90, "probes:sums"),
    Part("groups", "What does NCCL allocate for a group?", 60, "ranks:memory_of_groups"),
    Part("deterministic", "Are two deterministic runs equal?", 60, "ranks:deterministic"),
    Part("killed", "Does a job end if a rank is killed inside a sum?", 60, "ranks:killed"),
    Part("checkpoint", "How fast are save and restore?", 60, "ranks:checkpoint"),
    _step("monitored", "The price of a Monitor, beside gpt-tfdist", model="tfdist", strategy="local", monitor=True,
        jit=False),
)  # fmt: skip
