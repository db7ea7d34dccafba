"""What strangers at the ports of a job cost its steps.

    python -m benchmarks.strangers [--engine=horovod|tensorflow] [--rounds=3] [--attacks NAME ...]

Two ranks with 1 thread each train under `tfdist-run`. In turn, for some seconds each, every port of
the job is attacked, and as many ports of a decoy, a process beside the job that drops its callers the
same way. A ratio is that of the median step under an attack and of the median steps while the decoy
is attacked, before and after it: the attackers and their network traffic share the cores with the
job either way, so what remains is what the job itself does about them. Attackers and decoy run at the
lowest priority. The ratio to steps without any attack stands beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from benchmarks import attacks
from tfdist.runtime.listener import Listener, bind

LIMIT = 1.05
_WINDOW_SECONDS = 5.0
#: After how long a stranger that was hung up on calls again. Without a pause it is a flood, which
#: costs TensorFlow's engine a third of its speed: its gRPC servers deal with each caller.
_AGAIN_SECONDS = 0.05
_WIDTH = 1024
_START_SECONDS = 180.0


def main() -> int:
    """Prints the ratios; exit code 1 where the median of one attack is above the limit."""
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument("--engine", default="horovod", choices=["horovod", "tensorflow"])
    flags.add_argument("--rounds", type=int, default=3)
    names = [attack.__name__ for attack in attacks.ATTACKS]
    flags.add_argument("--attacks", nargs="+", default=names, choices=names)
    options = flags.parse_args()
    # Without this the job and the attackers would go on after a SIGTERM.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with tempfile.TemporaryDirectory() as name:
        windows, code = measure(Path(name), options.engine, options.attacks, options.rounds)
        steps = json.loads((Path(name) / "times.json").read_text())
    if code:
        print(f"The job ended with exit code {code}.")
        return 1
    over = False
    for attack, pairs in windows.items():
        taken = [[median_step(steps, *each) for each in windows] for windows in pairs]
        ratios = [2 * hit / (before + after) for _, before, hit, after in taken]
        ratio = statistics.median(ratios)
        over |= ratio > LIMIT
        shown = " ".join(f"{each:.3f}" for each in ratios)
        quiet = statistics.median(each[0] for each in taken)
        to_quiet = statistics.median(hit / alone for alone, _, hit, _ in taken)
        print(
            f"{attack:<20} {ratio:.3f}  at most {LIMIT}  ({shown})   "
            f"to {1000 * quiet:.1f} ms a step without attack: {to_quiet:.3f}"
        )
    return int(over)


def measure(folder: Path, engine: str, names: list[str], rounds: int) -> tuple[dict, int]:
    """Runs the job; returns the quiet and the attacked times by attack, and the exit code."""
    program = Path(__file__).with_name("attacked_job.py")
    command = [
        os.path.join(os.path.dirname(sys.executable), "tfdist-run"),
        *["-np=2", f"--engine={engine}", "--", sys.executable, str(program)],
        *[str(folder), str(_WIDTH)],
    ]
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "TF_NUM_INTRAOP_THREADS": "1"}
    strikes = [attack for attack in attacks.ATTACKS if attack.__name__ in names]
    windows: dict[str, list] = {attack.__name__: [] for attack in strikes}
    with open(folder / "log", "wb") as log:
        job = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            deadline = time.monotonic() + _START_SECONDS
            while not (folder / "under way").exists():
                if job.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"The job did not start:\n{(folder / 'log').read_text()}")
                time.sleep(0.1)
            addresses = attacks.listening_addresses(psutil.Process(job.pid))
            print(f"{engine}: {len(addresses)} ports", flush=True)
            with decoy(len(addresses)) as decoys:
                for _ in range(rounds):
                    for attack in strikes:
                        turns = [
                            (None, []),
                            (attack, decoys),
                            (attack, addresses),
                            (attack, decoys),
                        ]
                        windows[attack.__name__].append([window(*turn) for turn in turns])
            (folder / "stop").touch()
            return windows, job.wait(_START_SECONDS)
        finally:
            job.kill()
            job.wait()


@contextlib.contextmanager
def decoy(num_ports: int) -> Iterator[list[attacks.Address]]:
    """A process that listens as a job does, and is none."""
    context = multiprocessing.get_context("spawn")
    ports = context.Queue()
    process = context.Process(target=take_calls, args=(num_ports, ports), daemon=True)
    process.start()
    try:
        yield ports.get(timeout=_START_SECONDS)
    finally:
        process.kill()
        process.join()


def take_calls(num_ports: int, ports) -> None:
    """Hangs up on everybody, until the process is killed."""
    os.nice(19)
    with Listener([bind() for _ in range(num_ports)], os.urandom(32), "decoy") as listener:
        ports.put(listener.addresses)
        while True:
            listener.poll(1.0)


def window(attack, addresses) -> tuple[float, float]:
    """Lets some seconds pass, in quiet or under an attack; returns when they began and ended."""
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    attacker = context.Process(target=repeat, args=(attack, addresses, ready), daemon=True)
    attacker.start()
    if not ready.wait(_START_SECONDS):
        raise RuntimeError("The attacker did not start.")
    time.sleep(0.5)
    began = time.monotonic()
    time.sleep(_WINDOW_SECONDS)
    ended = time.monotonic()
    attacker.kill()
    attacker.join()
    return began, ended


def repeat(attack, addresses, ready) -> None:
    """Attacks again and again, until the process is killed."""
    os.nice(19)
    ready.set()
    while True:
        if attack is None:
            time.sleep(1.0)
        else:
            attacks.attack(addresses, [attack])
            time.sleep(_AGAIN_SECONDS)


def median_step(ends: list[float], began: float, ended: float) -> float:
    """The median time of a step, in seconds."""
    inside = [end for end in ends if began <= end <= ended]
    return statistics.median(b - a for a, b in itertools.pairwise(inside))


if __name__ == "__main__":
    sys.exit(main())
