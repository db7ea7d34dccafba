"""The environment variables that make a process a rank, and through which ranks rendezvous.

`horovodrun` sets the same variables.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import random
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import psutil

from tfdist.utils import checks

ENGINES = ("horovod", "tensorflow", "local")
#: The variables of a rank's place among those of its host, and of their number.
LOCAL_RANK, LOCAL_SIZE = "TFDIST_LOCAL_RANK", "TFDIST_LOCAL_SIZE"

_PORTS = (20_000, 32_000)


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """The host of a rank and its addresses; this machine, without arguments.

    Attributes:
        host: The host's name.
        address: The host's address for the other ranks.
        rendezvous_address: The address of the rendezvous server for the host.
        interface: The host's network interface to the other ranks; None if the host determines it.
        port: A free port of the host; None for a free port of this machine.
    """

    host: str = "localhost"
    address: str = "127.0.0.1"
    rendezvous_address: str = "127.0.0.1"
    interface: str | None = "lo"
    port: int | None = None


@contextlib.contextmanager
def environments(
    engine: str, endpoints: Sequence[Endpoint], servers: int = 0
) -> Iterator[list[dict[str, str]]]:
    """Yields the variables for each process that will be started.

    The rendezvous server of Horovod runs until the context exits, which must be after the last rank
    has ended.

    Args:
        engine: "horovod", "tensorflow", or "local" for independent processes.
        endpoints: The endpoint of each process, in the order of the ranks.
        servers: The number of parameter servers, which are the last processes.

    Raises:
        ValueError: The engine is unknown, or has no parameter servers.
        ImportError: `engine="horovod"` and Horovod is not installed.
    """
    checks.one_of("engine", engine, ENGINES)
    if servers and engine != "tensorflow":
        raise ValueError(f"Parameter servers require engine='tensorflow'. Received: {engine=!r}.")
    with contextlib.ExitStack() as stack:
        if engine == "horovod":
            found = stack.enter_context(_horovod_environments(endpoints))
        elif engine == "tensorflow":
            found = _tensorflow_environments(endpoints, servers)
        else:
            found = [{} for _ in endpoints]
        ranks = endpoints[: len(endpoints) - servers]
        slots = _slots([endpoint.host for endpoint in ranks])
        for environment, slot, endpoint in zip(found, slots, ranks, strict=False):
            environment |= {
                LOCAL_RANK: str(slot["local_rank"]),
                LOCAL_SIZE: str(slot["local_size"]),
                **_interface_for_nccl(endpoint.interface, os.environ),
            }
        yield found


@contextlib.contextmanager
def _horovod_environments(endpoints: Sequence[Endpoint]) -> Iterator[list[dict[str, str]]]:
    from horovod.runner.common.util.hosts import SlotInfo

    from tfdist.runtime.horovod_rendezvous import serve_rendezvous

    addresses = [endpoint.rendezvous_address for endpoint in endpoints]
    slots = _slots([endpoint.host for endpoint in endpoints])
    with serve_rendezvous(addresses, [SlotInfo(**slot) for slot in slots]) as port:
        yield [
            {
                **{f"HOROVOD_{name.upper()}": str(value) for name, value in slot.items()},
                "HOROVOD_GLOO_RENDEZVOUS_ADDR": endpoint.rendezvous_address,
                "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
                **({"HOROVOD_GLOO_IFACE": endpoint.interface} if endpoint.interface else {}),
                "HOROVOD_CONTROLLER": "gloo",
                "HOROVOD_CPU_OPERATIONS": "gloo",
            }
            for slot, endpoint in zip(slots, endpoints, strict=True)
        ]


def _slots(hosts: Sequence[str]) -> list[dict[str, Any]]:
    """Horovod's numbers of the ranks on some hosts: local to a host, and across hosts."""
    seen: collections.Counter[str] = collections.Counter()
    crossing: collections.Counter[int] = collections.Counter()
    slots: list[dict[str, Any]] = []
    for rank, host in enumerate(hosts):
        numbers = {"local_rank": seen[host], "cross_rank": crossing[seen[host]]}
        slots.append({"hostname": host, "rank": rank, "size": len(hosts), **numbers})
        crossing[seen[host]] += 1
        seen[host] += 1
    for slot in slots:
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
    cluster = {"worker": addresses[:size], **({"ps": addresses[size:]} if servers else {})}
    return [
        {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})}
        for job, those in cluster.items()
        for index in range(len(those))
    ]


def address_towards(address: str) -> str:
    """This machine's own address on the route to another; an `OSError` if there is no route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # Sends nothing: the kernel only selects the route.
        return probe.getsockname()[0]


def interface_towards(address: str) -> str:
    """The network interface of this machine on the route to an address; an `OSError` without one."""
    own = address_towards(address)
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == own for each in addresses):
            return name
    raise OSError(f"Could not find the network interface of {own}, on the route to {address}.")


def with_interface(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables of a rank, with the network interface for Horovod and NCCL added where it is missing."""
    found = dict(environment)
    address = found.get("HOROVOD_GLOO_RENDEZVOUS_ADDR")
    if address and "HOROVOD_GLOO_IFACE" not in found:
        found["HOROVOD_GLOO_IFACE"] = interface_towards(address)
    if found.get("TF_CONFIG") and not address:
        address = _address_of_another(json.loads(found["TF_CONFIG"]))
    if address:
        found |= _interface_for_nccl(interface_towards(address), found)
    return found


def _interface_for_nccl(interface: str | None, given: Mapping[str, str]) -> dict[str, str]:
    """NCCL's variable for a network interface, unless the user has set it: NCCL may choose that of containers."""
    if interface is None or "NCCL_SOCKET_IFNAME" in given:
        return {}
    return {"NCCL_SOCKET_IFNAME": f"={interface}"}


def _address_of_another(config: Mapping[str, Any]) -> str | None:
    """The address of a worker on another host than this one's; None if there is none."""
    task, cluster = config["task"], config["cluster"]
    own = cluster[task["type"]][task["index"]].rpartition(":")[0]
    addresses = (address.rpartition(":")[0] for address in cluster["worker"])
    return next((address for address in addresses if address != own), None)


def free_ports(count: int) -> list[int]:
    """Returns ports of this machine on which no process listens.

    They are below the range of the kernel for outgoing connections: a port that is free now can only
    be occupied by a program that requests exactly this port.
    """
    ports: list[int] = []
    for port in random.SystemRandom().sample(range(*_PORTS), _PORTS[1] - _PORTS[0]):
        if len(ports) == count:
            return ports
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("0.0.0.0", port))
            ports.append(port)
    raise OSError(f"Could not find {count} free ports between {_PORTS[0]} and {_PORTS[1]}.")
