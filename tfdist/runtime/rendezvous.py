"""What makes a process a rank: the environment through which ranks meet.

`horovodrun` sets the same variables.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import random
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import psutil

#: A variable that says for how many ranks a job was meant, where they come and go.
MEANT_RANKS = "TFDIST_MEANT_RANKS"

ENGINES = ("horovod", "tensorflow", "local")

_PORTS = (20_000, 32_000)


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """The host of a rank, and how it is reached; this machine, without arguments.

    Attributes:
        host: The host's name.
        address: The host's address, as the other ranks reach it.
        rendezvous_address: The address of the rendezvous server, as the host reaches it.
        interface: The network interface there that leads to the others; None where the host finds
            out for itself.
        port: A port that is free there; None for one that is looked for here.
    """

    host: str = "localhost"
    address: str = "127.0.0.1"
    rendezvous_address: str = "127.0.0.1"
    interface: str | None = "lo"
    port: int | None = None


def local_environments(
    engine: str, num_ranks: int
) -> contextlib.AbstractContextManager[list[dict[str, str]]]:
    """`environments` of `num_ranks` processes on this machine."""
    if num_ranks < 1:
        raise ValueError(f"At least one rank has to start. Received: num_ranks={num_ranks}.")
    return environments(engine, [Endpoint()] * num_ranks)


@contextlib.contextmanager
def environments(
    engine: str, endpoints: Sequence[Endpoint], servers: int = 0
) -> Iterator[list[dict[str, str]]]:
    """Yields the variables for each process that is to be started.

    The meeting point (Horovod's rendezvous server, or the ports that TensorFlow's servers will
    take) stays up until the context ends, which is after the last rank has ended.

    Args:
        engine: "horovod", "tensorflow", or "local" for processes that do not meet.
        endpoints: Where each is to run; in the order of the ranks.
        servers: How many of them, the last ones, are parameter servers.

    Raises:
        ValueError: The engine is unknown, or has no parameter servers.
        ImportError: `engine="horovod"` and Horovod is not installed.
    """
    if servers and engine != "tensorflow":
        raise ValueError(f"TensorFlow has parameter servers. Received: engine={engine!r}.")
    if engine == "horovod":
        with _horovod_environments(endpoints) as found:
            yield found
    elif engine == "tensorflow":
        yield _tensorflow_environments(endpoints, servers)
    elif engine == "local":
        yield [{} for _ in endpoints]
    else:
        raise ValueError(f"An engine is one of {ENGINES}. Received: {engine!r}.")


@contextlib.contextmanager
def _horovod_environments(endpoints: Sequence[Endpoint]) -> Iterator[list[dict[str, str]]]:
    from horovod.runner.common.util.hosts import SlotInfo

    from tfdist.runtime.horovod_rendezvous import serve_rendezvous

    slots = [SlotInfo(**slot) for slot in _slots([endpoint.host for endpoint in endpoints])]
    with serve_rendezvous([endpoint.rendezvous_address for endpoint in endpoints], slots) as port:
        yield [
            {
                "HOROVOD_HOSTNAME": endpoint.host,
                "HOROVOD_RANK": str(slot.rank),
                "HOROVOD_SIZE": str(slot.size),
                "HOROVOD_LOCAL_RANK": str(slot.local_rank),
                "HOROVOD_LOCAL_SIZE": str(slot.local_size),
                "HOROVOD_CROSS_RANK": str(slot.cross_rank),
                "HOROVOD_CROSS_SIZE": str(slot.cross_size),
                "HOROVOD_GLOO_RENDEZVOUS_ADDR": endpoint.rendezvous_address,
                "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
                **({"HOROVOD_GLOO_IFACE": endpoint.interface} if endpoint.interface else {}),
                "HOROVOD_CONTROLLER": "gloo",
                "HOROVOD_CPU_OPERATIONS": "gloo",
            }
            for slot, endpoint in zip(slots, endpoints, strict=True)
        ]


def _slots(hosts: Sequence[str]) -> list[dict[str, Any]]:
    """How Horovod numbers the ranks of some hosts: on each, and across those of one number."""
    seen: collections.Counter[str] = collections.Counter()
    crossing: collections.Counter[int] = collections.Counter()
    slots: list[dict[str, Any]] = []
    for rank, host in enumerate(hosts):
        local = seen[host]
        slots.append(
            {"hostname": host, "rank": rank, "local_rank": local, "cross_rank": crossing[local]}
        )
        seen[host] += 1
        crossing[local] += 1
    for slot in slots:
        slot["size"] = len(hosts)
        slot["local_size"] = seen[slot["hostname"]]
        slot["cross_size"] = crossing[slot["local_rank"]]
    return slots


def _tensorflow_environments(endpoints: Sequence[Endpoint], servers: int) -> list[dict[str, str]]:
    ports = iter(free_ports(sum(endpoint.port is None for endpoint in endpoints)))
    addresses = [
        f"{endpoint.address}:{next(ports) if endpoint.port is None else endpoint.port}"
        for endpoint in endpoints
    ]
    size = len(endpoints) - servers
    cluster = {"worker": addresses[:size]}
    if servers:
        cluster["ps"] = addresses[size:]
    tasks = [(job, index) for job, those in cluster.items() for index in range(len(those))]
    return [
        {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})}
        for job, index in tasks
    ]


def address_towards(address: str) -> str:
    """This machine's own address on the way to another; an `OSError` where there is no way."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # Sends nothing: the kernel only chooses the way.
        return probe.getsockname()[0]


def interface_towards(address: str) -> str:
    """The network interface of this machine that leads to an address; an `OSError` without one."""
    own = address_towards(address)
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == own for each in addresses):
            return name
    raise OSError(f"No network interface has the address {own}, which leads to {address}.")


def with_interface(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables of a rank, with the interface that Horovod takes where they do not name one."""
    meets_at = environment.get("HOROVOD_GLOO_RENDEZVOUS_ADDR")
    if not meets_at or "HOROVOD_GLOO_IFACE" in environment:
        return dict(environment)
    return {**environment, "HOROVOD_GLOO_IFACE": interface_towards(meets_at)}


def free_ports(count: int) -> list[int]:
    """Returns ports of this machine that nothing listens on.

    They lie below the range from which the kernel gives ports to outgoing connections: a port
    that is free now is then taken only by a program that asks for that very number.
    """
    ports: list[int] = []
    candidates = random.SystemRandom().sample(range(*_PORTS), _PORTS[1] - _PORTS[0])
    while len(ports) < count:
        if not candidates:
            raise OSError(f"No {count} free ports between {_PORTS[0]} and {_PORTS[1]}.")
        port = candidates.pop()
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("0.0.0.0", port))
            ports.append(port)
    return ports
