"""`tfdist-run`: starts ranks, on this machine or on several."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import sys
from typing import NoReturn

from absl import flags

from tfdist.launch import command
from tfdist.launch.hosts import HostDiscovery, is_this_machine, parse_host
from tfdist.launch.restarts import run_with_restarts
from tfdist.launch.supervisor import Supervisor
from tfdist.rendezvous import MEANT_RANKS, local_environments

__all__ = ["run"]

_VALUES = flags.FlagValues()
_NP = flags.DEFINE_integer(
    "np", None, "How many ranks to start.", lower_bound=1, flag_values=_VALUES
)
_HOSTS = flags.DEFINE_string(
    "H",
    "",
    "Hosts and their slots, host1:2,host2:2; this machine if left out.",
    flag_values=_VALUES,
)
_ENGINE = flags.DEFINE_enum(
    "engine",
    "auto",
    ["auto", "horovod", "tensorflow"],
    "What carries the collectives; auto takes Horovod where it is installed.",
    flag_values=_VALUES,
)
_WATCHDOG = flags.DEFINE_float(
    "watchdog_seconds",
    600.0,
    "How long a rank may be frozen before the job is ended; 0 for ever.",
    lower_bound=0.0,
    flag_values=_VALUES,
)
_MAX_RESTARTS = flags.DEFINE_integer(
    "max_restarts",
    None,
    "How many failures are followed by another start [0; any, where hosts are discovered].",
    lower_bound=0,
    flag_values=_VALUES,
)
_DISCOVERY = flags.DEFINE_string(
    "host_discovery_script",
    None,
    "Prints the hosts that are there, one a line, as name:slots; the job follows them.",
    flag_values=_VALUES,
)
_MIN_NP = flags.DEFINE_integer(
    "min_np", None, "Waits for room for so many ranks [np].", lower_bound=1, flag_values=_VALUES
)
_MAX_NP = flags.DEFINE_integer(
    "max_np", None, "Takes room for no more ranks [np].", lower_bound=1, flag_values=_VALUES
)
_SAVE_SECONDS = flags.DEFINE_float(
    "save_seconds",
    30.0,
    "How long the ranks have to save after a SIGTERM.",
    lower_bound=0.0,
    flag_values=_VALUES,
)


def run() -> None:
    """The console script."""
    command.run(
        _main,
        _VALUES,
        usage="tfdist-run -np N [flags] -- command [arguments]",
        summary="Starts a command on N ranks, passes on what they print behind [rank], and ends "
        "with the exit code of the first that fails, once all have ended.",
        rest=True,
        folded={
            "of failures": [
                _MAX_RESTARTS.name,
                _SAVE_SECONDS.name,
                _WATCHDOG.name,
            ],
            "of elastic jobs": [_DISCOVERY.name, _MIN_NP.name, _MAX_NP.name],
        },
    )


def _main(words: list[str]) -> int:
    if _NP.value is None:
        raise command.UsageError("Say how many ranks to start: -np N. Received: no -np.")
    if not words:
        raise command.UsageError(
            "Say what to run: tfdist-run -np N -- command. Received: no command."
        )
    if shutil.which(words[0]) is None:
        raise command.UsageError(f"There is no command {words[0]!r} on the PATH.")
    remote = _remote_hosts(_HOSTS.value, _NP.value)
    sizes = _sizes(_NP.value)
    engine = _engine()
    if remote:
        _run_on_hosts(words, engine, remote)
    discovery = None
    if _DISCOVERY.value is not None:
        discovery = HostDiscovery(_DISCOVERY.value, _check_is_here)

    def start(num_ranks: int, should_end) -> tuple[Supervisor, int]:
        with local_environments(engine, num_ranks) as environments:
            supervisor = Supervisor(
                words,
                [{**each, MEANT_RANKS: str(_NP.value)} for each in environments],
                frozen_seconds=_WATCHDOG.value,
                save_seconds=_SAVE_SECONDS.value,
                should_end=should_end,
            )
            return supervisor, supervisor.run()

    restarts = _MAX_RESTARTS.value
    if restarts is None:
        restarts = 0 if discovery is None else sys.maxsize
    return run_with_restarts(start, *sizes, max_restarts=restarts, discovery=discovery)


def _sizes(size: int) -> tuple[int, int, int]:
    """How many ranks there are to be; at least, and at most."""
    least, most = _MIN_NP.value or size, _MAX_NP.value or size
    if (_MIN_NP.present or _MAX_NP.present) and _DISCOVERY.value is None:
        raise command.UsageError(
            "--min_np and --max_np want a --host_discovery_script. Received: none."
        )
    if not least <= size <= most:
        raise command.UsageError(
            f"-np lies between --min_np and --max_np. Received: -np {size} --min_np={least} "
            f"--max_np={most}."
        )
    return size, least, most


def _check_is_here(host: str) -> None:
    if not is_this_machine(host):
        raise command.UsageError(
            "Ranks come and go on this machine only, where it is called localhost, 127.0.0.1 or "
            f"{socket.gethostname()}. The host discovery script printed: {host}."
        )


def _engine() -> str:
    has_horovod = importlib.util.find_spec("horovod") is not None
    if _ENGINE.value == "horovod" and not has_horovod:
        raise command.UsageError(
            "--engine=horovod: Horovod is not installed. Run tfdist-install-horovod, or take "
            "--engine=tensorflow."
        )
    if _ENGINE.value != "auto":
        return _ENGINE.value
    if not has_horovod:
        command.say(
            "tfdist-run",
            "Horovod is not installed, so the ranks use TensorFlow's own collectives.",
        )
    return "horovod" if has_horovod else "tensorflow"


def _remote_hosts(hosts: str, num_ranks: int) -> list[str]:
    """The hosts of -H, [] where all of them are this machine."""
    names: list[str] = []
    slots = 0
    for part in hosts.split(",") if hosts else []:
        host = parse_host(part)
        if host is None:
            raise command.UsageError(f"-H is host:slots,host:slots. Received: {hosts!r}.")
        names.append(host.name)
        slots += host.slots
    if names and slots < num_ranks:
        raise command.UsageError(f"-np {num_ranks} wants more slots than -H {hosts} has: {slots}.")
    return [] if all(map(is_this_machine, names)) else names


def _run_on_hosts(words: list[str], engine: str, hosts: list[str]) -> NoReturn:
    """Becomes horovodrun, which reaches other hosts by ssh and gets the signals from here on."""
    if _DISCOVERY.value is not None or _MAX_RESTARTS.value:
        raise command.UsageError(
            "Ranks are started again on this machine only. Received: -H with other hosts "
            f"({', '.join(hosts)}) and --max_restarts or --host_discovery_script."
        )
    if engine != "horovod":
        raise command.UsageError(
            f"Ranks on other hosts ({', '.join(hosts)}) are started by horovodrun: take "
            "--engine=horovod, or start one process a host with TF_CONFIG set."
        )
    horovodrun = [sys.executable, "-m", "horovod.runner.launch"]
    sys.stderr.flush()
    os.execv(sys.executable, [*horovodrun, "-np", str(_NP.value), "-H", _HOSTS.value, *words])


if __name__ == "__main__":
    run()
