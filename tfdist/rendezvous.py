"""What makes a process a rank: the environment through which ranks on this machine meet.

`horovodrun`, `srun` and `mpirun` set the same variables for whole clusters.
"""

from __future__ import annotations

import contextlib
import json
import random
import socket
from collections.abc import Iterator

__all__ = ["ENGINES", "MEANT_RANKS", "local_environments"]

#: A variable that says for how many ranks a job was meant, where they come and go.
MEANT_RANKS = "TFDIST_MEANT_RANKS"

ENGINES = ("horovod", "tensorflow", "local")

_PORTS = (20_000, 32_000)


@contextlib.contextmanager
def local_environments(engine: str, num_ranks: int) -> Iterator[list[dict[str, str]]]:
    """Yields the variables for each of `num_ranks` processes to be started on this machine.

    The meeting point (Horovod's rendezvous server, or the ports that TensorFlow's servers will
    take) stays up until the context ends, which is after the last rank has ended.

    Args:
        engine: "horovod", "tensorflow", or "local" for processes that do not meet.
        num_ranks: How many processes.

    Raises:
        ValueError: The engine is unknown or `num_ranks` is not positive.
        ImportError: `engine="horovod"` and Horovod is not installed.
    """
    if num_ranks < 1:
        raise ValueError(f"At least one rank has to start. Received: num_ranks={num_ranks}.")
    if engine == "horovod":
        with _horovod_environments(num_ranks) as environments:
            yield environments
    elif engine == "tensorflow":
        with _tensorflow_environments(num_ranks) as environments:
            yield environments
    elif engine == "local":
        yield [{} for _ in range(num_ranks)]
    else:
        raise ValueError(f"An engine is one of {ENGINES}. Received: {engine!r}.")


@contextlib.contextmanager
def _horovod_environments(num_ranks: int) -> Iterator[list[dict[str, str]]]:
    # The server that horovodrun itself starts; it has no other public door.
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.http.http_server import RendezvousServer

    slots = get_host_assignments(parse_hosts(f"localhost:{num_ranks}"), num_ranks)
    server = RendezvousServer(verbose=0)
    port = server.start()
    server.init(slots)
    try:
        yield [
            {
                "HOROVOD_HOSTNAME": "localhost",
                "HOROVOD_RANK": str(slot.rank),
                "HOROVOD_SIZE": str(slot.size),
                "HOROVOD_LOCAL_RANK": str(slot.local_rank),
                "HOROVOD_LOCAL_SIZE": str(slot.local_size),
                "HOROVOD_CROSS_RANK": str(slot.cross_rank),
                "HOROVOD_CROSS_SIZE": str(slot.cross_size),
                "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
                "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
                "HOROVOD_GLOO_IFACE": "lo",
                "HOROVOD_CONTROLLER": "gloo",
                "HOROVOD_CPU_OPERATIONS": "gloo",
            }
            for slot in slots
        ]
    finally:
        server.stop()


@contextlib.contextmanager
def _tensorflow_environments(num_ranks: int) -> Iterator[list[dict[str, str]]]:
    cluster = {"worker": [f"127.0.0.1:{port}" for port in free_ports(num_ranks)]}
    yield [
        {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}})}
        for index in range(num_ranks)
    ]


def free_ports(count: int) -> list[int]:
    """Returns ports of this machine that nothing listens on.

    They lie below the range from which the kernel gives ports to outgoing connections: a port
    that is free now is then taken only by a program that asks for that very number.
    """
    ports: list[int] = []
    for port in random.SystemRandom().sample(range(*_PORTS), _PORTS[1] - _PORTS[0]):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("0.0.0.0", port))
            ports.append(port)
        if len(ports) == count:
            return ports
    raise OSError(f"No {count} free ports between {_PORTS[0]} and {_PORTS[1]}.")
