"""Checks of the launcher, the cluster in environment variables, and the network."""

from __future__ import annotations

import collections
import contextlib
import errno
import functools
import os
import socket
from collections.abc import Mapping

import psutil

from tfdist.launch.doctor.findings import Finding, note, ok, problem
from tfdist.runtime.horovod_variables import started_by_horovod
from tfdist.runtime.rendezvous import free_ports
from tfdist.runtime.schedulers import Started, meeting_point, started_by_scheduler
from tfdist.runtime.tf_config import TFConfig, read_tf_config

_SECONDS = 3.0
_FIREWALL = "open TCP between the hosts for it in the firewall"


def launcher(environment: Mapping[str, str] = os.environ) -> list[Finding]:
    """Check which launcher started this process, and whether two launchers conflict."""
    found, worlds = [], {}
    try:
        world = started_by_horovod(environment)
    except ValueError as error:
        found.append(problem("Launcher", str(error), "unset HOROVOD_RANK HOROVOD_SIZE"))
    else:
        if world is not None:
            worlds["Horovod's variables"] = world
    config = _config()
    if isinstance(config, Finding):
        found.append(config)
    elif config is not None and config.job == "worker":
        worlds["TF_CONFIG"] = (config.index, len(config.workers))
    try:
        scheduled = started_by_scheduler(environment)
    except ValueError as error:
        found.append(
            problem("Launcher", f"a variable of the scheduler is not valid: {error}", "unset it")
        )
        scheduled = None
    if scheduled is not None:
        worlds[scheduled.launcher] = (scheduled.rank, scheduled.size)
    if len(set(worlds.values())) > 1:
        said = ", ".join(
            f"{who} say{'s' * (who[-1] != 's')} rank {r} of {n}" for who, (r, n) in worlds.items()
        )
        left = "TF_CONFIG" if "TF_CONFIG" in worlds else "the variables of the other launcher"
        found.append(problem("Launcher", f"two launchers conflict: {said}", f"unset {left}"))
    elif worlds:
        r, n = next(iter(worlds.values()))
        found.append(ok("Launcher", f"{' and '.join(worlds)}: rank {r} of {n}"))
    elif not found:
        found.append(ok("Launcher", "none; tfdist-run -np N -- starts ranks"))
    if scheduled is not None and "Horovod's variables" not in worlds and "TF_CONFIG" not in worlds:
        found += _meeting(scheduled, environment)
    return [*found, *_interface(environment)]


def _config() -> TFConfig | Finding | None:
    try:
        return read_tf_config()
    except ValueError as error:
        words = " ".join(str(error).split())
        return problem("TF_CONFIG", words[:400], "unset TF_CONFIG, or correct it on all ranks")


def _meeting(started: Started, environment: Mapping[str, str]) -> list[Finding]:
    """Check the rendezvous address of ranks of mpirun and srun."""
    try:
        host, port = meeting_point(started, environment)
    except ValueError as error:
        return [problem("Rendezvous", str(error), "export MASTER_ADDR= the host of rank 0")]
    return _address("Rendezvous", f"{host}:{port}", is_own=started.rank == 0)


def _interface(environment: Mapping[str, str]) -> list[Finding]:
    name = environment.get("HOROVOD_GLOO_IFACE")
    if name is None or name in psutil.net_if_addrs():
        return []
    there = ", ".join(psutil.net_if_addrs())
    text = f"HOROVOD_GLOO_IFACE={name}, but this machine has {there}"
    return [problem("Interface", text, "unset HOROVOD_GLOO_IFACE, or name one of these")]


def cluster() -> list[Finding]:
    """Check that the addresses of TF_CONFIG are correct and reachable."""
    config = _config()
    if config is None or isinstance(config, Finding):
        return []
    counts = collections.Counter((*config.workers, *config.servers))
    if twice := [address for address, count in counts.items() if count > 1]:
        text = f"two tasks have the address {twice[0]}"
        return [problem("TF_CONFIG", text, "give each task a separate port")]
    own = (config.servers if config.job == "ps" else config.workers)[config.index]
    found = []
    for address in counts:
        found += _address("TF_CONFIG", address, is_own=address == own)
    return found


def _address(what: str, address: str, *, is_own: bool) -> list[Finding]:
    """Check that the address "host:port" of this process is free, or that another's is reachable."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        return [problem(what, f"{address} is not host:port", "write it as host:port")]
    host = host.strip("[]")
    try:
        there = addresses_of(host)
    except OSError as error:
        text = f"the name {host} does not resolve: {error.strerror}"
        return [problem(what, text, f"add {host} to the name server or to /etc/hosts")]
    if is_own:
        return _own_port(what, host, int(port), there)
    return _others_port(what, host, int(port))


@functools.cache
def addresses_of(host: str) -> frozenset[str]:
    """The addresses of a host.

    Raises:
        OSError: The name does not resolve.
    """
    return frozenset(str(info[4][0]) for info in socket.getaddrinfo(host, None))


def _own_port(what: str, host: str, port: int, there: frozenset[str]) -> list[Finding]:
    here = {
        each.address.partition("%")[0] for some in psutil.net_if_addrs().values() for each in some
    }
    if not there & here and not any(address.startswith("127.") for address in there):
        text = f"{host}:{port} must be this process, but {host} ({', '.join(sorted(there))}) is another machine"
        return [problem(what, text, "correct the task's index, or the address")]
    if (taken := _why_not_bound(port)) is not None:
        text = f"port {port} is blocked: {taken}{_holder(port)}"
        return [problem(what, text, "use another port on all ranks, or end that program")]
    return [ok(what, f"{host}:{port} is this process, and the port is free")]


def _why_not_bound(port: int) -> str | None:
    """The reason why a port of this machine cannot be bound; None if it can."""
    with socket.socket() as probe:
        # As in servers, so that closed connections do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))
            probe.listen(1)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return "another program listens there"
            return str(error.strerror)
    return None


def _holder(port: int) -> str:
    """The program that listens at a port, if visible to this user."""
    with contextlib.suppress(psutil.Error):
        for each in psutil.net_connections("tcp"):
            if each.status == psutil.CONN_LISTEN and each.laddr.port == port and each.pid:
                return f", {psutil.Process(each.pid).name()} with process id {each.pid}"
    return ""


def _others_port(what: str, host: str, port: int) -> list[Finding]:
    try:
        with socket.create_connection((host, port), timeout=_SECONDS):
            return [ok(what, f"{host}:{port} answers")]
    except ConnectionRefusedError:
        return [ok(what, f"{host} can be reached; nothing listens at port {port} yet")]
    except TimeoutError:
        text = f"port {port} of {host} is blocked, or the host is down: no answer in {_SECONDS:g} s"
        return [problem(what, text, f"start the host; {_FIREWALL}: port {port}")]
    except OSError as error:
        text = f"{host} cannot be reached: {error.strerror}"
        return [problem(what, text, "check the network between the hosts")]


def links() -> list[Finding]:
    """Check the active network interfaces, and the name of this machine."""
    found = []
    states = psutil.net_if_stats()
    for name, some in psutil.net_if_addrs().items():
        own = [each.address for each in some if each.family == socket.AF_INET]
        if own and name in states and states[name].isup:
            speed = states[name].speed
            shown = f", {speed / 1000:g} Gbit/s" if speed else ""
            found.append(ok("Link", f"{name}, {own[0]}{shown}"))
    host = socket.gethostname()
    try:
        addresses_of(host)
    except OSError as error:
        text = f"{host} does not resolve: {error.strerror}"
        found.append(note("Own name", text, f"add {host} to /etc/hosts for jobs on several hosts"))
    return found


def loopback() -> list[Finding]:
    """Check whether ranks of this machine can connect to each other."""
    try:
        (port,) = free_ports(1)
        with socket.create_server(("127.0.0.1", port)) as server:
            server.settimeout(_SECONDS)
            with socket.create_connection(("127.0.0.1", port), _SECONDS) as one:
                other, _ = server.accept()
                with other:
                    one.sendall(b"!")
                    other.settimeout(_SECONDS)
                    heard = other.recv(1)
    except OSError as error:
        text = f"ranks of this machine cannot connect to each other: {error}"
        return [problem("Ports", text, "allow TCP on the interface lo in the firewall")]
    if heard != b"!":
        text = "a message over the interface lo was lost"
        return [problem("Ports", text, "check the firewall of this machine")]
    return [ok("Ports", f"ranks of this machine can connect to each other (tested port {port})")]
