"""What grows with the number of ranks: the rendezvous, and chunks of checkpoints that ranks share.

    python -m benchmarks.scale [--only=rendezvous|chunks|files] [--table=tfdist/addons/planner/README.md]

`rendezvous` counts the requests of real ranks of Horovod, and how many a second the server answers; `chunks`
has so many processes write parts of one chunk, on disk and in an object store, as ranks did before they
regrouped parts; `files` counts what a checkpoint of a 7B model under ZeRO consists of.
`benchmarks.roll_call` measures the watchdog.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import math
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from tabulate import tabulate

from benchmarks.measuring import write_between
from tfdist.checkpoint.chunks import CHUNK_BYTES, chunk_count, chunk_shape_of
from tfdist.checkpoint.storage import Storage

RANKS = (2, 4, 8, 16)
SCALES = (100, 1_000, 10_000)
WRITERS = (1, 4, 16, 64)
_RANK = """
import time
import horovod.tensorflow as hvd, psutil
imported = time.monotonic()
hvd.init()
joined = time.monotonic()
links = [c for c in psutil.Process().net_connections("tcp") if c.status == "ESTABLISHED"]
print(joined - imported, len(links), flush=True)
hvd.shutdown()
"""
_SECONDS = 5.0
_ROWS, _COLUMNS = 4096, CHUNK_BYTES // 4 // 4096


# -- the rendezvous ---------------------------------------------------------------------------


def requests_of(ranks: int) -> tuple[int, float, int]:
    """The server's requests for so many ranks of Horovod, the slowest join, and the sockets of a rank."""
    from tfdist.runtime import horovod_rendezvous as server
    from tfdist.runtime.rendezvous import Endpoint, environments

    count = 0
    original = server._Handler.parse_request

    def counted(self) -> bool:
        nonlocal count
        count += 1
        return original(self)

    server._Handler.parse_request = counted  # type: ignore[method-assign]
    try:
        with environments("horovod", [Endpoint()] * ranks) as found:
            jobs = [
                subprocess.Popen(
                    [sys.executable, "-c", _RANK],
                    env={**os.environ, **each, "TF_CPP_MIN_LOG_LEVEL": "3"},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                )
                for each in found
            ]
            said = [job.communicate(timeout=300)[0].split() for job in jobs]
    finally:
        server._Handler.parse_request = original  # type: ignore[method-assign]
    seconds, sockets = zip(*((float(joined), int(links)) for joined, links in said), strict=True)
    return count, max(seconds), max(sockets)


def _ask(address: tuple[str, int], seconds: float, pipe) -> None:
    done, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        for method, body in (("PUT", b"x" * 200), ("GET", None)):
            connection = http.client.HTTPConnection(*address, timeout=20.0)
            connection.request(method, "/some/key", body)
            connection.getresponse().read()
            connection.close()
            done += 1
    pipe.send(done)


def requests_per_second() -> float:
    """How many requests the server answers, with two callers at a time."""
    from tfdist.runtime.rendezvous import Endpoint, environments

    context = multiprocessing.get_context("fork")
    with environments("horovod", [Endpoint()] * 2) as found:
        variables = found[0]
        port = int(variables["HOROVOD_GLOO_RENDEZVOUS_PORT"])
        address = variables["HOROVOD_GLOO_RENDEZVOUS_ADDR"], port
        pipes, jobs = [], []
        for _ in range(2):
            here, there = context.Pipe()
            jobs.append(context.Process(target=_ask, args=(address, _SECONDS, there)))
            jobs[-1].start()
            pipes.append(here)
        done = sum(pipe.recv() for pipe in pipes)
        for job in jobs:
            job.join(20.0)
    return done / _SECONDS


def rendezvous() -> str:
    """Measured numbers of ranks, and what follows for more."""
    measured = {ranks: requests_of(ranks) for ranks in RANKS}
    counts = [measured[ranks][0] for ranks in RANKS]
    terms = np.array([[ranks**2, ranks, 1] for ranks in RANKS], float)
    found = np.linalg.lstsq(terms, np.array(counts, float), rcond=None)[0]
    speed = requests_per_second()
    rows = [
        (f"{ranks:,}", f"{count:,}", f"{seconds:.2f} s, measured", f"{sockets:,}")
        for ranks, (count, seconds, sockets) in measured.items()
    ]
    links = np.polyfit(RANKS, [measured[ranks][2] for ranks in RANKS], 1)
    for ranks in SCALES:
        count = float(np.array([ranks**2, ranks, 1]) @ found)
        words = f"{count / speed:,.0f} s at {speed:,.0f} requests a second"
        rows.append((f"{ranks:,}", f"{count:,.0f}", words, f"{np.polyval(links, ranks):,.0f}"))
    return _table(("ranks", "requests to the server", "joined after", "sockets of a rank"), rows)


# -- chunks that ranks share ------------------------------------------------------------------


def write_part(place: int, writers: int, folder: str) -> None:
    """Writes the own rows of an array of one chunk, once all writers are there."""
    storage = Storage(folder)
    array = storage.create("kernel", (_ROWS, _COLUMNS), "float32")
    share = _ROWS // writers
    rows = slice(place * share, (place + 1) * share)
    value = np.full((share, _COLUMNS), place, np.float32)
    print("ready", flush=True)
    sys.stdin.readline()
    begun = time.monotonic()
    storage.write(array, [((rows, slice(0, _COLUMNS)), value)])
    print(time.monotonic() - begun, flush=True)


def chunk_seconds(writers: int, folder: str, variables: dict[str, str]) -> float:
    """Seconds until all writers have written their parts of a chunk."""
    jobs = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.scale", f"--part={place},{writers}", folder],
            env={**os.environ, **variables, "TF_CPP_MIN_LOG_LEVEL": "3"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for place in range(writers)
    ]
    pipes = [(job.stdin, job.stdout) for job in jobs]
    for _, out in pipes:
        assert_line(out, "ready")
    for into, _ in pipes:
        if into is not None:
            into.write("\n")
            into.flush()
    found = [float(out.readline()) if out is not None else math.nan for _, out in pipes]
    for job in jobs:
        job.wait(60.0)
    return max(found)


def assert_line(out, expected: str) -> None:
    """Reads a line of a process.

    Raises:
        RuntimeError: It is another one.
    """
    line = out.readline().strip()
    if line != expected:
        raise RuntimeError(f"Expected {expected!r} of a writer. Received: {line!r}.")


@contextlib.contextmanager
def _stores() -> Iterator[list[tuple[str, str, dict[str, str], list]]]:
    """Where to write: a name, an address, variables and the list of requests."""
    from tests.checkpoint import stores

    with tempfile.TemporaryDirectory() as folder, stores.s3() as server:
        yield [
            ("disk", folder, {}, []),
            (
                "object store",
                f"s3://{stores.BUCKET}/scale",
                server.variables,
                server.proxy.requests,
            ),
        ]


def chunks() -> str:
    """Seconds for a chunk of 16 MiB, by the number of its writers."""
    rows: list[list[str]] = [[str(writers)] for writers in WRITERS]
    with _stores() as places:
        for name, address, variables, requests in places:
            for row, writers in zip(rows, WRITERS, strict=True):
                requests.clear()
                if name != "disk" and writers > 16:
                    row += ["not run", ""]
                    continue
                seconds = chunk_seconds(writers, f"{address}/{writers}", variables)
                row.append(f"{seconds:.2f} s")
                if name != "disk":
                    puts = sum(method == "PUT" and "/c/" in path for method, path in requests)
                    row.append(str(puts))
    return _table(("writers", "disk", "object store", "attempts to write it there"), rows)


# -- the files of a checkpoint ----------------------------------------------------------------


def shapes_of_7b() -> list[tuple[int, ...]]:
    """The parameters of a Llama with 7 billion."""
    width, hidden, vocabulary, layers = 4096, 11_008, 32_000, 32
    block = [(width, width)] * 4 + [(width, hidden)] * 2 + [(hidden, width), (width,), (width,)]
    return [(vocabulary, width), *block * layers, (width,), (width, vocabulary)]


def files() -> str:
    """Files and chunks, and what a rank writes and receives for it, by the number of ranks under ZeRO-3."""
    arrays = shapes_of_7b() * 3  # And Adam's two moments.
    chunks = [chunk_count(shape, chunk_shape_of(shape, "float32")) for shape in arrays]
    size = 4 * sum(map(math.prod, arrays))
    rows = []
    for ranks in (8, *SCALES):
        holders = [
            min(
                ranks, math.ceil(math.prod(chunk_shape_of(shape, "float32")) * ranks / elements) + 1
            )
            for shape in arrays
            if (elements := math.prod(shape))
        ]
        most = math.ceil(sum(chunks) / ranks)
        rows.append(
            (
                f"{ranks:,}",
                f"{sum(chunks) + len(arrays):,}",
                f"{max(holders):,}",
                f"{most:,}: {most * CHUNK_BYTES / 1e9:.2f} GB of {size / 1e9:.0f} GB",
                f"{ranks:,}",
            )
        )
    head = (
        "ranks",
        "files",
        "ranks that hold parts of a chunk",
        "chunks that a rank writes, at most",
        "small files until the manifest is written",
    )
    return _table(head, rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return tabulate(rows, head, tablefmt="github", disable_numparse=True)


PARTS = {"rendezvous": rendezvous, "chunks": chunks, "files": files}


def main() -> int:
    """Measures and writes the tables."""
    found = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    found.add_argument("--only", choices=list(PARTS))
    found.add_argument("--table", help="A document for the tables.")
    found.add_argument("--part", help=argparse.SUPPRESS)
    found.add_argument("folder", nargs="?", help=argparse.SUPPRESS)
    options = found.parse_args()
    if options.part:
        place, writers = map(int, options.part.split(","))
        write_part(place, writers, options.folder)
        return 0
    for name in PARTS if options.only is None else [options.only]:
        table = PARTS[name]()
        print(table, flush=True)
        if options.table:
            write_between(Path(options.table), f"benchmarks.scale: {name}", table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
