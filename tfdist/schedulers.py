"""Ranks that `mpirun` or `srun` started: which one this is, and how they meet.

Those launchers tell each process its rank, and nothing of the others' addresses. The first rank
waits at a port that all can work out, hears from each of the others where it is, and tells each
what an engine wants to know.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import json
import os
import socket
import time
import zlib
from collections.abc import Mapping, Sequence

from tfdist.rendezvous import Place, environments, free_ports, with_interface
from tfdist.slurm import expand_node_list

__all__ = ["Started", "join", "started_by_scheduler"]

_MEET_SECONDS = 300.0
_RETRY_SECONDS = 0.2
_PORTS = (12_000, 20_000)

#: By launcher: the variables of the rank, of the number of ranks, and of that on this host.
_LAUNCHERS = {
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    "mpiexec": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
    # Of a step: the script of a batch job has the variables of its allocation, but is no rank.
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", ""),
}


@dataclasses.dataclass(frozen=True)
class Started:
    """How this process was started.

    Attributes:
        launcher: By what.
        rank: The rank.
        size: How many ranks there are.
        local_size: How many of them on this host; None where that is not told.
    """

    launcher: str
    rank: int
    size: int
    local_size: int | None


def started_by_scheduler(environment: Mapping[str, str] | None = None) -> Started | None:
    """How `mpirun` or `srun` started this process; None where neither did, or it is alone."""
    environment = os.environ if environment is None else environment
    for launcher, (rank, size, local_size) in _LAUNCHERS.items():
        if rank in environment and size in environment:
            local = environment.get(local_size)
            number, of = int(environment[rank]), int(environment[size])
            if of > 1:
                return Started(launcher, number, of, None if local is None else int(local))
    return None


def join(engine: str, started: Started) -> None:
    """Meets the other ranks, and sets the variables that an engine reads.

    Args:
        engine: "horovod" or "tensorflow".
        started: This rank.

    Raises:
        TimeoutError: Not all ranks came.
        ValueError: Nothing says where the first rank is.
    """
    address, port = meeting_point(started, os.environ)
    own = {"rank": started.rank, "host": socket.gethostname(), "port": free_ports(1)[0]}
    deadline = time.monotonic() + _MEET_SECONDS
    if started.rank == 0:
        found = _receive(engine, port, started.size, own, deadline)
    else:
        found = _call(address, port, own, deadline)
    os.environ.update(with_interface(found))


def meeting_point(started: Started, environment: Mapping[str, str]) -> tuple[str, int]:
    """The address and the port at which the first rank waits.

    `MASTER_ADDR` and `MASTER_PORT` say so where they are set, as to PyTorch's ranks.

    Raises:
        ValueError: Nothing says where the first rank is.
    """
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
    job = [environment[name] for name in names if name in environment]
    is_one_host = started.local_size == started.size
    if is_one_host and not job:
        job = [str(os.getppid())]  # The launcher's process, the parent of all.
    first, end = _PORTS
    port = first + zlib.crc32("/".join(job).encode()) % (end - first)
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


def _receive(engine: str, port: int, size: int, own: dict, deadline: float) -> dict[str, str]:
    """Hears all other ranks and tells each its variables; returns those of this rank, the first."""
    try:
        listener = socket.create_server(("", port), backlog=size)
    except OSError as error:
        raise OSError(
            f"Rank 0 cannot wait for the others at port {port}: {error.strerror}. Set MASTER_PORT "
            "to a free port for all ranks."
        ) from error
    cards, lines = {0: own}, {}
    with listener, contextlib.ExitStack() as open_lines:
        while len(cards) < size:
            listener.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                line = open_lines.enter_context(listener.accept()[0])
            except TimeoutError:
                missing = sorted(set(range(size)) - cards.keys())
                raise TimeoutError(
                    f"Ranks {missing} did not call rank 0 at port {port} within "
                    f"{_MEET_SECONDS:.0f} s."
                ) from None
            line.settimeout(max(0.01, deadline - time.monotonic()))
            card = json.loads(line.makefile().readline())
            cards[card["rank"]], lines[card["rank"]] = card, line
        meeting = contextlib.ExitStack()
        found = meeting.enter_context(environments(engine, _places(cards, lines)))
        atexit.register(meeting.close)
        for rank, line in lines.items():
            line.sendall(json.dumps(found[rank]).encode() + b"\n")
    return found[0]


def _places(cards: Mapping[int, dict], lines: Mapping[int, socket.socket]) -> Sequence[Place]:
    """Where the ranks are, from what each said and how it came."""
    first = cards[0]["host"]
    far = [rank for rank, card in cards.items() if card["host"] != first]
    here = lines[far[0]].getsockname()[0] if far else "127.0.0.1"
    places = []
    for rank, card in sorted(cards.items()):
        is_near = card["host"] == first
        address = here if is_near else lines[rank].getpeername()[0]
        meeting_address = here if is_near else lines[rank].getsockname()[0]
        places.append(Place(card["host"], address, meeting_address, None, card["port"]))
    return places


def _call(address: str, port: int, own: dict, deadline: float) -> dict[str, str]:
    """Calls the first rank until it answers; returns the variables of this one."""
    while True:
        left = deadline - time.monotonic()
        try:
            with socket.create_connection((address, port), timeout=max(0.01, left)) as line:
                line.sendall(json.dumps(own).encode() + b"\n")
                return json.loads(line.makefile().readline())
        except (ConnectionError, json.JSONDecodeError) as error:
            # Rank 0 is not there yet, or another program had its port.
            if left < 0:
                raise TimeoutError(
                    f"Rank {own['rank']} did not reach rank 0 at {address}:{port} within "
                    f"{_MEET_SECONDS:.0f} s: {error}. MASTER_ADDR and MASTER_PORT say where it is."
                ) from error
            time.sleep(_RETRY_SECONDS)
