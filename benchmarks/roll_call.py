"""The watchdog's server with thousands of members: start-up, processor time, and how a death is told.

    python -m benchmarks.roll_call [--members=250,500,1000,2000]

Members are connections of a few light processes. Each says what a rank says that waits in a collective
of all, as often as the server asks. Exit code 1 where a death is told too late, or the server takes
too much of a core.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import selectors
import sys
import time

from tabulate import tabulate

from benchmarks.measuring import write_between
from tfdist.runtime import Channel, connect
from tfdist.watchdog.heartbeat import HeartbeatServer
from tfdist.watchdog.report import Report

KEY = b"k" * 32
PURPOSE = "heartbeat server"
TOLD_LIMIT, CORE_LIMIT = 5.0, 0.05
_PROCESSES = 2
_SECONDS = 20.0


def members(port: int, ranks: range, size: int, pipe) -> None:
    """A process of members: joins, reports, and says when each has heard the verdict."""
    channels = {}
    with selectors.DefaultSelector() as selector:
        for rank in ranks:
            channel = Channel(connect(("127.0.0.1", port), KEY, PURPOSE, rank, timeout=120.0))
            channels[rank] = channel
            selector.register(channel, selectors.EVENT_READ, rank)
            channel.offer(_report(rank, size, 0.0))
        pipe.send("joined")
        begun = time.monotonic()
        every, told = 1.0, 0
        # Reports are spread over their period, as those of ranks are.
        due = {rank: begun + every * (rank % 997) / 997 for rank in ranks}
        dead: int | None = None
        while told < len(ranks) - (dead is not None):
            if pipe.poll():
                dead = pipe.recv()
                if dead is None:
                    break
                if dead in channels:
                    selector.unregister(channels[dead])
                    channels.pop(dead).close()
                    due.pop(dead)
                else:
                    dead = None
            for key, _ in selector.select(0.05):
                while (message := key.fileobj.receive_now()) is not None:  # type: ignore[union-attr]
                    every = message.get("every", every)
                    if "verdict" in message:
                        told += 1
                        selector.unregister(key.fileobj)
                        due.pop(key.data)
                        break
            now = time.monotonic()
            for rank in [rank for rank, at in due.items() if at <= now]:
                channels[rank].offer(_report(rank, size, now - begun))
                due[rank] = now + every
        pipe.send(time.monotonic())
        pipe.recv()


def _report(rank: int, size: int, seconds: float) -> dict:
    """What a rank says; of what each makes for itself on its own machine most is made once here."""
    message = _reports(size)
    return {**message, "rank": rank, "waiting": [{**message["waiting"][0], "seconds": seconds}]}


@functools.cache
def _reports(size: int) -> dict:
    wait = {"name": "gradients/0", "ranks": list(range(size)), "occurrence": 7, "seconds": 0.0}
    return Report(0, waiting=[wait], doing="train.py, line 12").to_message()


def measure(size: int) -> tuple[float, float, float]:
    """Seconds until all have joined, the share of a core, and seconds until all know of a death."""
    server = HeartbeatServer(size, KEY, timeout=120.0)
    context = multiprocessing.get_context("fork")
    share = -(-size // _PROCESSES)
    begun = time.monotonic()
    pipes, processes = [], []
    for place in range(_PROCESSES):
        ranks = range(place * share, min((place + 1) * share, size))
        here, there = context.Pipe()
        process = context.Process(target=members, args=(server.port, ranks, size, there))
        process.start()
        pipes.append(here)
        processes.append(process)
    for pipe in pipes:
        pipe.recv()
    joined = time.monotonic() - begun
    time.sleep(3.0)
    before, clock = time.process_time(), time.monotonic()
    time.sleep(_SECONDS)
    core = (time.process_time() - before) / (time.monotonic() - clock)
    died = time.monotonic()
    for pipe in pipes:
        pipe.send(size - 1)
    told = max(pipe.recv() for pipe in pipes) - died
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send(None)
        process.join(20.0)
    server.close()
    return joined, core, told


def main() -> int:
    flags = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    flags.add_argument(
        "--members", default="250,500,1000,2000", help="Numbers of members, with commas."
    )
    flags.add_argument("--table", help="A document for the table.")
    options = flags.parse_args()
    rows, good = [], True
    for size in map(int, options.members.split(",")):
        joined, core, told = measure(size)
        good &= told <= TOLD_LIMIT and core <= CORE_LIMIT
        rows.append(
            (size, f"{joined:.2f}", f"{1e3 * joined / size:.2f}", f"{core:.1%}", f"{told:.1f}")
        )
        print(rows[-1], file=sys.stderr, flush=True)
    head = ("members", "joined, s", "ms a member", "of a core", "death told, s")
    table = tabulate(rows, head, tablefmt="github", disable_numparse=True)
    print(table)
    if options.table:
        write_between(options.table, "benchmarks.roll_call", table)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
