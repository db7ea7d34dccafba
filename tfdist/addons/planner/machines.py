"""Machines: compute rate and memory of ranks, and the links between them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tfdist.addons.planner.quantities import read_bytes
from tfdist.utils import checks

_MOST_RANKS = 1 << 24
#: Bytes of a bucket of gradients on CPUs.
BUCKET_BYTES = 4 << 20
#: NCCL's memory for a group that was used: 0.3 to 1.6 GB were reported (NVIDIA/nccl issues 864, 986 and 1685).
#: Not measured here.
_OF_GPUS = {"group_bytes": 0.4e9, "bucket_bytes": 64 << 20}
#: The shares that steps reach on a GPU of what `Machine` assumes for long-tuned programs, which is what
#: Megatron-LM publishes for large models. Measured with GPT-2 small on an H100, mixed_bfloat16, 8 x 1,024 tokens:
#: 196 ms without XLA, 50 ms with XLA, 29 ms with XLA and fused attention (Keras on JAX), for 26 ms.
STEPS = {
    "uncompiled": (0.13, "steps without XLA"),
    "compiled": (0.52, "steps compiled by XLA"),
    "fused": (0.89, "compiled steps with fused attention"),
}


@dataclasses.dataclass(frozen=True)
class Link:
    """A network link between two ranks.

    Attributes:
        latency: Seconds for a small message to arrive.
        bandwidth: Bytes per second and rank, in one direction.

    Raises:
        ValueError: The latency is negative, or the bandwidth is not positive.
    """

    latency: float
    bandwidth: float

    def __post_init__(self):
        checks.number("latency", self.latency, minimum=0)
        checks.number("bandwidth", self.bandwidth, above=0)


@dataclasses.dataclass(frozen=True)
class Device:
    """An accelerator, by its data sheet.

    Attributes:
        name: Name of the device.
        flops: Dense FLOP/s by dtype, without sparsity.
        memory: Bytes of memory.
        bandwidth: Memory bandwidth, in bytes per second.
        link: Bytes per second to devices of the same host, in one direction.
        network: Bytes per second and device to other hosts, in one direction, of a typical host.
        per_host: Devices of a typical host.
        watts: Power at full load; None if the manufacturer does not publish it.
        source: Source of the figures.
    """

    name: str
    flops: Mapping[str, float]
    memory: int
    bandwidth: float
    link: float
    network: float
    per_host: int
    watts: float | None
    source: str


def _device(
    name: str,
    half: float,
    float32: float,
    gigabytes: float,
    bandwidth: float,
    link: float,
    network: float,
    per_host: int,
    watts: float | None,
    source: str,
    dtypes: tuple[str, ...],
) -> Device:
    """A device in units of data sheets: TFLOP/s, GB, GB/s and W."""
    rates = {"float32": float32 * 1e12, **dict.fromkeys(dtypes, half * 1e12)}
    return Device(
        name, rates, int(gigabytes * 1e9), bandwidth * 1e9, link * 1e9, network * 1e9,
        per_host, watts, source,
    )  # fmt: skip


#: Half-precision dtypes of NVIDIA GPUs since Ampere, and of AMD GPUs.
_BOTH = ("float16", "bfloat16")
_FLOAT16, _BFLOAT16 = ("float16",), ("bfloat16",)
#: By name. Memory is in decimal GB: a data sheet's GB is a GiB on most cards, as the driver reports.
#: float32 is the precision that TensorFlow uses for products of float32: TF32 since Ampere, bfloat16 on a
#: TPU. No rate is that of sparse products. If a data sheet names no network, that of a typical host is used.
DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        _device(
            "v100", 125, 15.7, 34.36, 900, 150, 6.25, 8, 300, "NVIDIA V100 data sheet (SXM2, 32 GB); "
            "DGX-1: 4 x 100 Gb/s for 8", _FLOAT16,
        ),
        _device(
            "t4", 65, 8.1, 17.18, 320, 16, 1.5625, 8, 70, "NVIDIA T4 data sheet; AWS g4dn.metal: "
            "100 Gb/s for 8", _FLOAT16,
        ),
        _device(
            "a10", 125, 62.5, 25.77, 600, 32, 1.5625, 8, 150, "NVIDIA A10 data sheet; AWS g5.48xlarge: "
            "100 Gb/s for 8", _BOTH,
        ),
        _device(
            "l4", 121, 60, 25.77, 300, 32, 1.5625, 8, 72, "NVIDIA L4 data sheet, half of the sparse "
            "rates; AWS g6.48xlarge: 100 Gb/s for 8", _BOTH,
        ),
        _device(
            "l40s", 362, 183, 51.54, 864, 32, 6.25, 8, 350, "NVIDIA L40S data sheet; AWS "
            "g6e.48xlarge: 400 Gb/s for 8", _BOTH,
        ),
        _device(
            "a100-40", 312, 156, 42.95, 1555, 300, 25, 8, 400, "NVIDIA A100 data sheet (SXM4, 40 GB); "
            "DGX A100: 8 x 200 Gb/s", _BOTH,
        ),
        _device(
            "a100", 312, 156, 85.90, 2039, 300, 25, 8, 400, "NVIDIA A100 data sheet (SXM4, 80 GB); "
            "DGX A100: 8 x 200 Gb/s", _BOTH,
        ),
        _device(
            "h100", 989.4, 494.7, 85.90, 3350, 450, 50, 8, 700, "NVIDIA H100 data sheet (SXM5), half of "
            "the sparse rates; DGX H100: 8 x 400 Gb/s", _BOTH,
        ),
        _device(
            "h200", 989.4, 494.7, 151.4, 4800, 450, 50, 8, 700, "NVIDIA H200 data sheet (SXM), half of "
            "the sparse rates; DGX H200: 8 x 400 Gb/s", _BOTH,
        ),
        # 8 stacks have 192 GB, of which the data sheet of the host lists 180; the others are spare.
        _device(
            "b200", 2250, 1125, 180, 8000, 900, 50, 8, 1000, "NVIDIA DGX B200 data sheet: 1,440 GB, "
            "64 TB/s, 14.4 TB/s of NVLink and 8 x 400 Gb/s for 8; half of the sparse rates", _BOTH,
        ),
        _device(
            "mi250x", 383, 95.7, 137.4, 3277, 100, 25, 4, 560, "AMD Instinct MI250X data sheet, matrix "
            "rates; HPE Cray EX235a: 4 x 200 Gb/s", _BOTH,
        ),
        _device(
            "mi300x", 1307.4, 163.4, 206.2, 5300, 448, 50, 8, 750, "AMD Instinct MI300X data sheet, 7 "
            "links of 64 GB/s; 8 x 400 Gb/s", _BOTH,
        ),
        # Links of a torus, of which a ring uses one in each direction; they also connect hosts.
        _device(
            "tpu-v4", 275, 275, 34.36, 1200, 50, 50, 4, 192, "Google Cloud TPU v4 documentation; power: "
            "Jouppi et al. 2023 (arXiv:2304.01433)", _BFLOAT16,
        ),
        _device(
            "tpu-v5e", 197, 197, 17.18, 819, 50, 50, 8, None, "Google Cloud TPU v5e documentation: "
            "1,600 Gb/s over 4 links", _BFLOAT16,
        ),
        _device(
            "tpu-v5p", 459, 459, 102.0, 2765, 100, 100, 4, None, "Google Cloud TPU v5p documentation: "
            "95 GiB; 4,800 Gb/s over 6 links", _BFLOAT16,
        ),
    )
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Machine:
    """Compute rate, memory and network of the ranks of a cluster.

    Attributes:
        flops: Peak FLOP/s of a rank, by dtype.
        memory: Bytes that a rank may use.
        memory_bandwidth: Memory bandwidth of a rank, in bytes per second.
        inside: The link between ranks of a host.
        between: The link between ranks of two hosts, for one port; None for a single host.
        bulk: The link for gradients within a host, as `calibrate` measures it; None for `inside`.
            Its latency is that of a whole all-reduce.
        ranks_per_host: Ranks per host.
        ports: Network ports of a host; None for one per rank.
        processors: Ranks of a host that can compute at full speed at the same time; None for all.
        crowding: The exponent c: n ranks that share a processor take n^(1 + c) times as long as one
            alone. 0 for sharing without overhead.
        efficiency: The share of the peak that large matrix products reach.
        memory_efficiency: The share of the memory bandwidth that other operations reach.
        overlap: The share of the communication of gradients that can overlap with the backward pass
            without slowing it: 1 hides all of the shorter of both, 0 nothing.
        rails: Whether collectives of one group use all ports of a host.
        algorithm: All-reduce algorithm: "ring", "tree", "two-level", or "best" of the three.
        layer_seconds: Overhead of a layer in each direction, in seconds.
        step_seconds: Overhead of a step, in seconds.
        base_bytes: Bytes of a rank's process before a model is built.
        group_bytes: Bytes that the library of collectives allocates for each group of ranks.
        bucket_bytes: Bytes of a bucket of gradients; see `bucket_mib` of the strategies.
        fragmentation: Bytes that the allocator reserves, relative to the bytes requested.
        memory_margin: The share of its bytes by which a layout must stay below the limit to fit.
        watts: Power of a rank at full load; None if unknown.
        price: Price of a rank per hour, in any currency; None if unknown.
        calibrated: The largest measured "ranks", "layer FLOPs" and "message bytes"; estimates more
            than 4 times beyond are marked as extrapolated. Empty for a data sheet.
        name: Name of the machine.
        source: Source of the figures.

    Raises:
        ValueError: A figure is negative, or is zero and must be positive.
    """

    flops: Mapping[str, float]
    memory: float
    memory_bandwidth: float
    inside: Link
    between: Link | None = None
    bulk: Link | None = None
    ranks_per_host: int = 8
    ports: int | None = None
    processors: int | None = None
    crowding: float = 0.0
    efficiency: float = 0.7
    memory_efficiency: float = 0.8
    overlap: float = 0.8
    rails: bool = True
    algorithm: str = "best"
    layer_seconds: float = 0.0
    step_seconds: float = 0.0
    base_bytes: float = 0.0
    group_bytes: float = 0.0
    bucket_bytes: float = BUCKET_BYTES
    fragmentation: float = 1.0
    memory_margin: float = 0.0
    watts: float | None = None
    price: float | None = None
    calibrated: Mapping[str, float] = dataclasses.field(default_factory=dict)
    name: str = "a machine"
    source: str = "given by hand"

    def __post_init__(self):
        checks.instance("flops", self.flops, Mapping, "a dict of FLOP/s by dtype")
        if not self.flops:
            raise checks.refuse("flops", self.flops, "a dict of FLOP/s by dtype, not empty")
        for dtype, rate in self.flops.items():
            checks.number(f"flops[{dtype!r}]", rate, above=0)
        for name in ("memory", "memory_bandwidth", "bucket_bytes"):
            checks.number(name, getattr(self, name), above=0)
        checks.instance("inside", self.inside, Link, "a tfdist.addons.planner.Link")
        for name in ("between", "bulk"):
            checks.instance(
                name, getattr(self, name), Link, "a tfdist.addons.planner.Link", optional=True
            )
        checks.integer("ranks_per_host", self.ranks_per_host, minimum=1, maximum=_MOST_RANKS)
        for name in ("ports", "processors"):
            checks.integer(name, getattr(self, name), minimum=1, maximum=_MOST_RANKS, optional=True)
        for name in ("efficiency", "memory_efficiency"):
            checks.number(name, getattr(self, name), above=0, maximum=1)
        checks.number("overlap", self.overlap, minimum=0, maximum=1)
        checks.one_of("algorithm", self.algorithm, ("best", "ring", "tree", "two-level"))
        for name in ("crowding", "layer_seconds", "step_seconds", "base_bytes", "group_bytes"):
            checks.number(name, getattr(self, name), minimum=0)
        checks.number("fragmentation", self.fragmentation, minimum=1)
        checks.number("memory_margin", self.memory_margin, minimum=0)
        checks.instance("calibrated", self.calibrated, Mapping, "a dict of measured maxima")
        for name, most in self.calibrated.items():
            checks.number(f"calibrated[{name!r}]", most, minimum=0)
        checks.text("name", self.name)
        checks.text("source", self.source)
        for name in ("watts", "price"):
            checks.number(name, getattr(self, name), minimum=0, optional=True)

    @property
    def host_ports(self) -> int:
        """Network ports of a host."""
        return self.ports or self.ranks_per_host

    def rate(self, dtype: str) -> float:
        """FLOP/s that large products reach in a dtype.

        Raises:
            ValueError: `flops` has no rate for the dtype.
        """
        if dtype not in self.flops:
            raise ValueError(
                f"`flops` of {self.name} does not have a rate for {dtype}. Received: "
                f"{', '.join(self.flops)}."
            )
        return self.flops[dtype] * self.efficiency

    def replace(self, **changes: Any) -> Machine:
        """A copy with some figures replaced."""
        return dataclasses.replace(self, **changes)


def machine(device: str, *, steps: str = "compiled", **changes: Any) -> Machine:
    """A machine of typical hosts of a known device.

    Args:
        device: A name of `DEVICES`.
        steps: How a GPU's steps run, which determines the share of its peak that they reach: "uncompiled",
            "compiled" by XLA, or "fused": compiled, with fused attention.
        **changes: Attributes of `Machine` to replace; `memory` may be a string such as "80GiB".

    Raises:
        ValueError: The device is unknown, or a figure is invalid.
        TypeError: `Machine` has no attribute of that name.
    """
    checks.one_of("device", device, DEVICES)
    checks.one_of("steps", steps, STEPS)
    found = DEVICES[device]
    if isinstance(changes.get("memory"), str):
        changes["memory"] = read_bytes(changes["memory"])
    figures: dict[str, Any] = {
        "flops": dict(found.flops),
        "memory": float(found.memory),
        "memory_bandwidth": found.bandwidth,
        # Rounded latencies that NCCL's tuning model assumes for its ring over NVLink and InfiniBand
        # (nccl/src/graph/tuning.cc: 3.4 us and 14 us with its simple protocol).
        "inside": Link(3.4e-6, found.link),
        "between": Link(14e-6, found.network),
        "ranks_per_host": found.per_host,
        **({} if found.name.startswith("tpu") else _OF_GPUS),
        "watts": found.watts,
        "name": found.name,
        "source": found.source,
    }
    if not found.name.startswith("tpu") and not {"efficiency", "memory_efficiency"} & {*changes}:
        share, words = STEPS[steps]
        figures["efficiency"] = share * Machine.efficiency
        figures["memory_efficiency"] = share * Machine.memory_efficiency
        reached = f"{words}, which reach {figures['efficiency']:.0%} of the peak FLOP/s"
        figures["source"] = f"{found.source}; {reached}, as measured with GPT-2 small"
    return Machine(**(figures | changes))
