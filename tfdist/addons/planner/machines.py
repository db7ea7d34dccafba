"""Machines: what ranks compute and remember, and the links between them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tfdist.utils import checks
from tfdist.utils.quantities import read_bytes

_MOST_RANKS = 1 << 24


@dataclasses.dataclass(frozen=True)
class Link:
    """The way from one rank to another.

    Attributes:
        latency: Seconds until a small message has arrived.
        bandwidth: Bytes a second in one direction, of one rank.

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
    """An accelerator, as its maker describes it.

    Attributes:
        name: How it is called.
        flops: Dense FLOP/s by dtype, without sparsity.
        memory: Bytes of memory.
        bandwidth: Bytes a second from and to memory.
        link: Bytes a second to devices of the same host, in one direction.
        network: Bytes a second to other hosts per device, in one direction, as usually built.
        per_host: Devices of a usual host.
        watts: Power at full load; None where the maker does not say.
        source: Where the figures are from.
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
    """TFLOP/s in half precision and float32, GB, GB/s to memory, link and network, and W."""
    rates = {"float32": float32 * 1e12, **dict.fromkeys(dtypes, half * 1e12)}
    return Device(
        name, rates, int(gigabytes * 1e9), bandwidth * 1e9, link * 1e9, network * 1e9,
        per_host, watts, source,
    )  # fmt: skip


#: Half-precision dtypes of NVIDIA's cards from Ampere on, and of AMD's.
_BOTH = ("float16", "bfloat16")
_FLOAT16, _BFLOAT16 = ("float16",), ("bfloat16",)
#: By name. Memory is in decimal GB: what the makers call GB is GiB on most cards, as these report it
#: themselves. float32 is what TensorFlow takes for products of float32: TF32 from Ampere on, bfloat16 on a
#: TPU; neither is a sparse rate. Where a data sheet tells of no network, that of a usual host stands.
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
        # 8 stacks hold 192 GB, of which the data sheet of the host gives 180: the others are spare.
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
        # Links of a torus, of which a ring takes one in each direction; they also lead to other hosts.
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
    """What a rank has, and how ranks are joined.

    Attributes:
        flops: FLOP/s of a rank at its peak, by dtype.
        memory: Bytes that a rank may use.
        memory_bandwidth: Bytes a second from and to a rank's memory.
        inside: The link between ranks of a host.
        between: The link between ranks of two hosts, of one port.
        bulk: The link as gradients have it inside of a host, as `calibrate` measures it; None for
            `inside`. Its latency is that of an all-reduce as a whole.
        ranks_per_host: Ranks of a host.
        ports: Ports of a host to other hosts; None for one a rank.
        processors: How many ranks of a host compute at full speed at a time; None for all.
        crowding: c, by which n ranks that share a processor take n^(1 + c) times as long as one of
            them alone: 0 for turns that cost nothing.
        efficiency: The share of the peak that large matrix products reach.
        memory_efficiency: The share of the memory's bandwidth that other operations reach.
        overlap: The share of a gradient's way to other ranks that can go on behind the backward pass
            without slowing it: 1 hides all of the shorter of both, 0 nothing.
        rails: Whether collectives of one group use all ports of a host.
        algorithm: How an all-reduce goes: "ring", "tree", "two-level", or "best" of the three.
        layer_seconds: What a layer takes in each direction beside its arithmetic.
        step_seconds: What a step takes beside its layers and messages.
        base_bytes: Bytes of a rank's process before there is a model.
        fragmentation: Bytes that the allocator keeps, over those that are asked of it.
        memory_margin: By which share of its bytes a layout must stay below the limit to fit.
        watts: Power of a rank at full load; None if nobody knows.
        price: Price of a rank and hour, in any currency; None if nobody knows.
        calibrated: The largest that was measured of "ranks", "layer FLOPs" and "message bytes";
            what lies more than 4 times beyond is marked as extrapolated. Empty for a data sheet.
        name: How it is called.
        source: Where the figures are from.

    Raises:
        ValueError: A figure is negative, or zero where that makes no machine.
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
        for name in ("memory", "memory_bandwidth"):
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
        for name in ("crowding", "layer_seconds", "step_seconds", "base_bytes"):
            checks.number(name, getattr(self, name), minimum=0)
        checks.number("fragmentation", self.fragmentation, minimum=1)
        checks.number("memory_margin", self.memory_margin, minimum=0)
        checks.instance("calibrated", self.calibrated, Mapping, "a dict of what was measured")
        for name, most in self.calibrated.items():
            checks.number(f"calibrated[{name!r}]", most, minimum=0)
        checks.text("name", self.name)
        checks.text("source", self.source)
        for name in ("watts", "price"):
            checks.number(name, getattr(self, name), minimum=0, optional=True)

    @property
    def host_ports(self) -> int:
        """Ports of a host to others."""
        return self.ports or self.ranks_per_host

    def rate(self, dtype: str) -> float:
        """FLOP/s that large products reach in a dtype.

        Raises:
            ValueError: The machine does not say how fast it is in that dtype.
        """
        if dtype not in self.flops:
            raise ValueError(
                f"`flops` of {self.name} has no rate for {dtype}. Received: {', '.join(self.flops)}."
            )
        return self.flops[dtype] * self.efficiency

    def replace(self, **changes: Any) -> Machine:
        """The same with other figures."""
        return dataclasses.replace(self, **changes)


def machine(device: str, **changes: Any) -> Machine:
    """Hosts of a known device.

    Args:
        device: A name of `DEVICES`.
        **changes: Figures of the `Machine` that are other; `memory` may be a text, as "80GiB".

    Raises:
        ValueError: No such device is known, or a figure is wrong.
        TypeError: A figure has no such name.
    """
    checks.one_of("device", device, DEVICES)
    found = DEVICES[device]
    if isinstance(changes.get("memory"), str):
        changes["memory"] = read_bytes(changes["memory"])
    figures: dict[str, Any] = {
        "flops": dict(found.flops),
        "memory": float(found.memory),
        "memory_bandwidth": found.bandwidth,
        # Latencies as NCCL's own tuning assumes for its ring over NVLink and over InfiniBand, rounded
        # (nccl/src/graph/tuning.cc: 3.4 us and 14 us with its simple protocol).
        "inside": Link(3.4e-6, found.link),
        "between": Link(14e-6, found.network),
        "ranks_per_host": found.per_host,
        "watts": found.watts,
        "name": found.name,
        "source": found.source,
    }
    return Machine(**(figures | changes))
