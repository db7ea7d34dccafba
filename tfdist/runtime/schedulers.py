"""Ranks started by `mpirun`, `srun` or `torchrun`, or one on each node: their numbers, and their rendezvous.

Those launchers pass each process its rank, but not the addresses of all others. The first rank listens
at a port that all can compute, receives the host of each of the other ranks, and sends each the variables
of an engine. `tfdist.runtime.job_key` has the secret that authenticates them.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import logging
import os
import re
import socket
import time
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tfdist.runtime import AuthenticationError, Channel, Listener, bind, connect
from tfdist.runtime.channel import has_fields
from tfdist.runtime.job_key import JOB_TOKEN, job_key
from tfdist.runtime.nodes import Nodes, find_nodes
from tfdist.runtime.rendezvous import Endpoint, environments, free_ports, with_interface
from tfdist.runtime.slurm import expand_node_list
from tfdist.utils import checks

_logger = logging.getLogger("tfdist")

_PURPOSE = "rendezvous of ranks"
_MEET_SECONDS = 300.0
_RETRY_SECONDS = 0.2
#: The timeout of the first message of a connected rank.
_HELLO_SECONDS = 5.0
_PORTS = (12_000, 20_000)
#: The variables that the first rank may set in the others.
_VARIABLES = re.compile(r"HOROVOD_[A-Z_]+|TF_CONFIG|TFDIST_LOCAL_(RANK|SIZE)|NCCL_SOCKET_IFNAME")
_HOST_NAME = re.compile(r"[A-Za-z0-9_.-]{1,253}")

#: What launchers call the job, or its start.
_JOB_NAMES = (
    *("SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "PET_MASTER_ADDR"),
    *("TRAINING_JOB_NAME", "CLOUD_ML_JOB_ID"),
)

#: By launcher: the variables of the rank, of the number of ranks, and of that on this host.
_LAUNCHERS = {
    # First, because others may start it.
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    "mpiexec": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
    # Of a step: the script of a batch job has the variables of its allocation, but is not a rank.
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", ""),
}
#: Variables of torchrun that others have too; with these it is torchrun.
_OF_TORCHRUN = ("MASTER_ADDR", "MASTER_PORT")
#: Of torchrun: its agent listens at MASTER_PORT.
_HAS_AGENT = "TORCHELASTIC_USE_AGENT_STORE"


@dataclasses.dataclass(frozen=True)
class Started:
    """The launcher's data of this process; `local_size` is None if the launcher does not pass it."""

    launcher: str
    rank: int
    size: int
    local_size: int | None
    nodes: Nodes | None = None


def started_by_scheduler(environment: Mapping[str, str] = os.environ) -> Started | None:
    """The data of the launcher that started this process as one of several; else None.

    Raises:
        ValueError: A variable is malformed.
    """
    of_srun = tuple(map(environment.get, _LAUNCHERS["srun"][:2]))
    for launcher, (rank, size, local_size) in _LAUNCHERS.items():
        if launcher == "torchrun" and not all(name in environment for name in _OF_TORCHRUN):
            continue
        numbers = environment.get(rank), environment.get(size)
        # Slurm's plugin for PMI-2 sets the variables of mpiexec.
        if None in numbers or (launcher == "mpiexec" and numbers == of_srun):
            continue
        count = _number(environment, size, 1)
        own = _number(environment, rank, 0, count - 1)
        local = _number(environment, local_size, 1) if local_size in environment else None
        # A rank that is alone may be started by another launcher's rank.
        return Started(launcher, own, count, local) if count > 1 else None
    if (nodes := find_nodes(environment)) is None or nodes.count == 1:
        return None
    return Started(nodes.platform, nodes.node, nodes.count, 1, nodes)


def _number(environment: Mapping[str, str], name: str, least: int, most: int | None = None) -> int:
    text = environment[name]
    number: Any = int(text) if text.isascii() and text.isdigit() else text
    return checks.integer(name, number, minimum=least, maximum=most)


def join(engine: str, started: Started) -> None:
    """Waits for the other ranks, and sets the variables that an engine reads.

    Raises:
        TimeoutError: Not all ranks connected.
        ValueError: The address of the first rank is unknown, or a node should have several ranks.
    """
    ranks = 1 if started.nodes is None else started.nodes.ranks or 1
    if ranks > 1:
        raise ValueError(
            f"Each node must have {ranks} ranks, as {started.launcher} says. Received: one process. Start "
            "the ranks of each node: `tfdist-run -- python train.py`."
        )
    address = meeting_point(started, os.environ)
    own = Hello(socket.gethostname(), free_ports(1)[0])
    is_one_host = started.local_size == started.size
    if started.local_size is None and started.launcher == "srun":
        nodes = os.environ.get("SLURM_STEP_NODELIST")
        is_one_host = nodes is not None and len(expand_node_list(nodes)) == 1
    key = job_key(_job(started, os.environ), os.environ, is_one_host=is_one_host)
    deadline = time.monotonic() + _MEET_SECONDS
    if started.rank == 0:
        found = _receive(engine, address, key, started.size, own, deadline)
    else:
        found = _call(address, key, started.rank, own, deadline)
    os.environ.update(with_interface(found))


class Hello(NamedTuple):
    """The first message of a rank: its host's name, and a free port of that host."""

    host: str
    port: int

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Hello:
        """Parses the message of a rank; a `ConnectionError` if it is malformed."""
        if has_fields(message, {"host": str, "port": int}):
            found = cls(**message)
            if _HOST_NAME.fullmatch(found.host) and 0 < found.port < 1 << 16:
                return found
        raise ConnectionError(f"expected its host and port, got {checks.one_line(message, 200)}")


def meeting_point(started: Started, environment: Mapping[str, str]) -> tuple[str, int]:
    """The address and port at which the first rank listens; a `ValueError` if it is unknown.

    `MASTER_PORT` overrides the port, and `MASTER_ADDR` the address unless a platform names the first node.
    """
    first, end = _PORTS
    port = first + zlib.crc32("/".join(_job(started, environment)).encode()) % (end - first)
    if started.launcher == "torchrun" and environment.get(_HAS_AGENT) == "True":
        return environment["MASTER_ADDR"], port
    address = environment.get("MASTER_ADDR")
    if started.nodes is not None:
        address, port = started.nodes.host, started.nodes.port
    if address is None and started.local_size == started.size:
        address = "127.0.0.1"
    if address is None and started.launcher == "srun":
        # srun places its first task on the first node.
        address = expand_node_list(environment["SLURM_STEP_NODELIST"])[0]
    if address is None:
        raise ValueError(
            f"{started.launcher} started rank {started.rank} of {started.size} on several hosts, "
            "but does not pass the host of rank 0. Set MASTER_ADDR to it for all ranks, as in "
            "`mpirun -x MASTER_ADDR=host1 ...`, or start them with `tfdist-run`."
        )
    if "MASTER_PORT" in environment:
        port = _number(environment, "MASTER_PORT", 1, 65_535)
    return address, port


def _job(started: Started, environment: Mapping[str, str]) -> list[str]:
    """The launcher's names of the job; the same on all ranks."""
    names = _JOB_NAMES + (_OF_TORCHRUN if started.launcher == "torchrun" else ())
    job = [environment[name] for name in names if name in environment]
    if not job and started.local_size == started.size:
        job = [str(os.getppid())]  # The launcher's process, the parent of all.
    return job


def _receive(
    engine: str, address: tuple[str, int], key: bytes, size: int, own: Hello, deadline: float
) -> dict[str, str]:
    """Waits for all other ranks and sends each its variables; returns those of this rank, the first."""
    listening = _listen(address, deadline)
    hellos, channels = {0: own}, {}
    with (
        contextlib.ExitStack() as stack,
        Listener([listening], key, _PURPOSE, identities=range(1, size)) as listener,
    ):
        silent: dict[Channel, tuple[int, float]] = {}
        while len(hellos) < size:
            for rank, sock in listener.poll(0.1):
                channel = Channel(sock, max_bytes=1 << 12)
                stack.callback(channel.close)
                silent[channel] = rank, time.monotonic()
            for channel, (rank, since) in list(silent.items()):
                hello = _hear(channel, rank, since)
                if hello is None:
                    continue
                del silent[channel]
                if not isinstance(hello, Hello) or rank in hellos:
                    channel.close()  # A rank of the job connects again.
                else:
                    hellos[rank], channels[rank] = hello, channel
            # A rank that has disconnected may connect again.
            for rank, channel in list(channels.items()):
                if _hear(channel, rank, time.monotonic()) is not None:
                    channel.close()
                    del hellos[rank], channels[rank]
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"Ranks {sorted(set(range(size)) - hellos.keys())} did not connect to rank 0 at "
                    f"port {address[1]} within {_MEET_SECONDS:.0f} s."
                )
        meeting = contextlib.ExitStack()
        found = meeting.enter_context(environments(engine, _endpoints(hellos, channels)))
        atexit.register(meeting.close)
        for rank, channel in channels.items():
            channel.send(found[rank], _HELLO_SECONDS)
    return found[0]


def _listen(address: tuple[str, int], deadline: float) -> socket.socket:
    """Listens at the address of this rank, once its name resolves: new pods have a name before it does."""
    while True:
        try:
            return bind(*address)
        except socket.gaierror as error:
            if time.monotonic() + _RETRY_SECONDS > deadline:
                raise TimeoutError(
                    f"The name of rank 0's host must resolve. Received: {address[0]}, {error.strerror}, for "
                    f"{_MEET_SECONDS:.0f} s. Set MASTER_ADDR to its address."
                ) from error
            time.sleep(_RETRY_SECONDS)
        except OSError as error:
            raise OSError(
                f"Rank 0 cannot listen for the other ranks at port {address[1]}: {error.strerror}. Set "
                "MASTER_PORT to a free port for all ranks."
            ) from error


def _hear(channel: Channel, rank: int, since: float) -> Hello | OSError | None:
    """The message of a rank; None if it has not arrived yet, an error if the connection is unusable."""
    try:
        message = channel.receive_now()
        if message is not None:
            return Hello.from_message(message)
        if time.monotonic() - since > _HELLO_SECONDS:
            raise TimeoutError("it did not send its host and port")
    except OSError as error:
        _logger.warning("The connection to rank %d was closed: %s.", rank, error)
        return error
    return None


def _endpoints(hellos: Mapping[int, Hello], channels: Mapping[int, Channel]) -> Sequence[Endpoint]:
    """The endpoints of the ranks, from their messages and the addresses of their connections."""
    first = hellos[0].host
    far = [rank for rank, hello in hellos.items() if hello.host != first]
    here = channels[far[0]].own_host if far else "127.0.0.1"
    endpoints = []
    for rank, (host, port) in sorted(hellos.items()):
        address = rendezvous_address = here
        if host != first:
            address, rendezvous_address = channels[rank].other_host, channels[rank].own_host
        endpoints.append(Endpoint(host, address, rendezvous_address, None, port))
    return endpoints


def _call(
    address: tuple[str, int], key: bytes, rank: int, own: Hello, deadline: float
) -> dict[str, str]:
    """Connects to the first rank until it answers; returns the variables of this one."""
    while True:
        left = max(0.01, deadline - time.monotonic())
        try:
            sock = connect(address, key, _PURPOSE, rank, timeout=left)
            with contextlib.closing(Channel(sock)) as channel:
                channel.send(own._asdict(), left)
                return _checked(channel.receive(max(0.01, deadline - time.monotonic())))
        except AuthenticationError as error:
            raise AuthenticationError(
                f"Rank {rank} and rank 0 do not share a key: {error} Set {JOB_TOKEN} to the same "
                "secret for all ranks."
            ) from error
        except OSError as error:
            # Rank 0 has closed the connection, or has not started.
            if time.monotonic() + _RETRY_SECONDS > deadline:
                raise TimeoutError(
                    f"Rank {rank} did not reach rank 0 at {address[0]}:{address[1]} within "
                    f"{_MEET_SECONDS:.0f} s: {error}. Set MASTER_ADDR and MASTER_PORT to its address."
                ) from error
            time.sleep(_RETRY_SECONDS)


def _checked(variables: dict[str, Any]) -> dict[str, str]:
    """The variables that the first rank has sent; rejects those that a rendezvous does not set."""
    for name, value in variables.items():
        if not _VARIABLES.fullmatch(name) or not isinstance(value, str) or "\0" in value:
            raise ConnectionError(f"it must not set {checks.one_line(name, 100)}")
    return variables
