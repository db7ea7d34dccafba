"""Ranks that `mpirun` or `srun` started: which one this is, and how they meet.

Those launchers tell each process its rank, and nothing of the others' addresses. The first rank
waits at a port that all can work out, hears from each of the others where it is, and tells each
what an engine wants to know. `tfdist.runtime.job_key` says what they know that strangers do not.
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
from tfdist.runtime.job_key import JOB_TOKEN, job_key
from tfdist.runtime.rendezvous import Endpoint, environments, free_ports, with_interface
from tfdist.runtime.slurm import expand_node_list
from tfdist.utils.checks import one_line

_logger = logging.getLogger("tfdist")

_PURPOSE = "meeting of ranks"
_MEET_SECONDS = 300.0
_RETRY_SECONDS = 0.2
#: How long a rank that has called may take to say where it is.
_HELLO_SECONDS = 5.0
_PORTS = (12_000, 20_000)
#: What the first rank may set in the others.
_VARIABLES = re.compile(r"HOROVOD_[A-Z_]+|TF_CONFIG")
_HOST_NAME = re.compile(r"[A-Za-z0-9_.-]{1,253}")

#: By launcher: the variables of the rank, of the number of ranks, and of that on this host.
_LAUNCHERS = {
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    "mpiexec": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
    # Of a step: the script of a batch job has the variables of its allocation, but is no rank.
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", ""),
}


@dataclasses.dataclass(frozen=True)
class Started:
    """How this process was started; `local_size` is None where the launcher does not tell it."""

    launcher: str
    rank: int
    size: int
    local_size: int | None


def started_by_scheduler(environment: Mapping[str, str] = os.environ) -> Started | None:
    """How `mpirun` or `srun` started this process; None where neither did, or it is alone."""
    for launcher, (rank, size, local_size) in _LAUNCHERS.items():
        if rank in environment and size in environment:
            local = environment.get(local_size)
            number, of = int(environment[rank]), int(environment[size])
            if of > 1:
                return Started(launcher, number, of, None if local is None else int(local))
    return None


def join(engine: str, started: Started) -> None:
    """Meets the other ranks, and sets the variables that an engine reads.

    Raises:
        TimeoutError: Not all ranks came.
        ValueError: Nothing says where the first rank is.
    """
    address, port = meeting_point(started, os.environ)
    own = Hello(socket.gethostname(), free_ports(1)[0])
    key = job_key(_job(started, os.environ), os.environ, is_one_host=_is_one_host(started))
    deadline = time.monotonic() + _MEET_SECONDS
    if started.rank == 0:
        found = _receive(engine, (address, port), key, started.size, own, deadline)
    else:
        found = _call((address, port), key, started.rank, own, deadline)
    os.environ.update(with_interface(found))


class Hello(NamedTuple):
    """Where a rank says that it is: its host's name, and a port that is free there."""

    host: str
    port: int

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Hello:
        """Reads what a rank sent; a `ConnectionError` where it is no hello."""
        host, port = message.get("host"), message.get("port")
        if (
            len(message) == 2
            and isinstance(host, str)
            and _HOST_NAME.fullmatch(host)
            and isinstance(port, int)
            and type(port) is not bool
            and 0 < port < 1 << 16
        ):
            return cls(host, port)
        raise ConnectionError(f"it says {one_line(message, 200)} instead of its host and port")


def meeting_point(started: Started, environment: Mapping[str, str]) -> tuple[str, int]:
    """The address and the port at which the first rank waits; a `ValueError` if nothing says where.

    `MASTER_ADDR` and `MASTER_PORT` say so where they are set, as to PyTorch's ranks.
    """
    is_one_host = started.local_size == started.size
    first, end = _PORTS
    port = first + zlib.crc32("/".join(_job(started, environment)).encode()) % (end - first)
    address = environment.get("MASTER_ADDR")
    if address is None and is_one_host:
        address = "127.0.0.1"
    if address is None and started.launcher == "srun":
        # srun puts its first task on the first node.
        address = expand_node_list(environment["SLURM_STEP_NODELIST"])[0]
    if address is None:
        raise ValueError(
            f"{started.launcher} started rank {started.rank} of {started.size} on several hosts, "
            "and does not say where rank 0 is. Set MASTER_ADDR to its host for all ranks, as in "
            "`mpirun -x MASTER_ADDR=host1 ...`, or start them with `tfdist-run`."
        )
    return address, int(environment.get("MASTER_PORT", port))


def _job(started: Started, environment: Mapping[str, str]) -> list[str]:
    """What the launcher calls the job; the same on all ranks."""
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
    job = [environment[name] for name in names if name in environment]
    if not job and started.local_size == started.size:
        job = [str(os.getppid())]  # The launcher's process, the parent of all.
    return job


def _is_one_host(started: Started) -> bool:
    """Whether all ranks are on this host."""
    if started.local_size is None and started.launcher == "srun":
        nodes = os.environ.get("SLURM_STEP_NODELIST")
        return nodes is not None and len(expand_node_list(nodes)) == 1
    return started.local_size == started.size


def _receive(
    engine: str, address: tuple[str, int], key: bytes, size: int, own: Hello, deadline: float
) -> dict[str, str]:
    """Hears all other ranks and tells each its variables; returns those of this rank, the first."""
    try:
        listening = bind(*address)
    except OSError as error:
        raise OSError(
            f"Rank 0 cannot wait for the others at port {address[1]}: {error.strerror}. Set "
            "MASTER_PORT to a free port for all ranks."
        ) from error
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
                    channel.close()  # An honest rank calls again.
                else:
                    hellos[rank], channels[rank] = hello, channel
            # A rank that has gone may come again.
            for rank, channel in list(channels.items()):
                if _hear(channel, rank, time.monotonic()) is not None:
                    channel.close()
                    del hellos[rank], channels[rank]
            if time.monotonic() > deadline:
                missing = sorted(set(range(size)) - hellos.keys())
                raise TimeoutError(
                    f"Ranks {missing} did not call rank 0 at port {address[1]} within "
                    f"{_MEET_SECONDS:.0f} s."
                )
        meeting = contextlib.ExitStack()
        found = meeting.enter_context(environments(engine, _endpoints(hellos, channels)))
        atexit.register(meeting.close)
        for rank, channel in channels.items():
            channel.send(found[rank], _HELLO_SECONDS)
    return found[0]


def _hear(channel: Channel, rank: int, since: float) -> Hello | OSError | None:
    """What a rank says of itself; None where it has not spoken yet, an error if it will not."""
    try:
        message = channel.receive_now()
        if message is not None:
            return Hello.from_message(message)
        if time.monotonic() - since > _HELLO_SECONDS:
            raise TimeoutError("it does not say where it is")
    except OSError as error:
        _logger.warning("The call of rank %d was ended: %s.", rank, error)
        return error
    return None


def _endpoints(hellos: Mapping[int, Hello], channels: Mapping[int, Channel]) -> Sequence[Endpoint]:
    """Where the ranks are, from what each said and how it came."""
    first = hellos[0].host
    far = [rank for rank, hello in hellos.items() if hello.host != first]
    here = channels[far[0]].own_host if far else "127.0.0.1"
    endpoints = []
    for rank, hello in sorted(hellos.items()):
        is_near = hello.host == first
        address = here if is_near else channels[rank].other_host
        rendezvous_address = here if is_near else channels[rank].own_host
        endpoints.append(Endpoint(hello.host, address, rendezvous_address, None, hello.port))
    return endpoints


def _call(
    address: tuple[str, int], key: bytes, rank: int, own: Hello, deadline: float
) -> dict[str, str]:
    """Calls the first rank until it answers; returns the variables of this one."""
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
            # Rank 0 has ended the call, or is not there.
            if time.monotonic() + _RETRY_SECONDS > deadline:
                raise TimeoutError(
                    f"Rank {rank} did not reach rank 0 at {address[0]}:{address[1]} within "
                    f"{_MEET_SECONDS:.0f} s: {error}. MASTER_ADDR and MASTER_PORT say where it is."
                ) from error
            time.sleep(_RETRY_SECONDS)


def _checked(variables: dict[str, Any]) -> dict[str, str]:
    """The variables that the first rank has sent; refuses what a meeting does not set."""
    for name, value in variables.items():
        if not _VARIABLES.fullmatch(name) or not isinstance(value, str) or "\0" in value:
            raise ConnectionError(f"it sets {one_line(name, 100)}, which is not for it to set")
    return variables
