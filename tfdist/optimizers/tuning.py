"""How gradients travel fastest here: measured once in a second or two, and kept in a file.

The time of a sum of s bytes is close to a + s b (Hockney 1994): a for each message, b for each byte.
A bucket is as small as it can be while messages take no more than a tenth of the time: the smaller
the buckets, the earlier the first leaves, and the less is left to wait for when the backward pass
is over.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import logging
import os
import socket
import statistics
import tempfile
import time
from pathlib import Path

import tensorflow as tf

from tfdist.collectives import Engine, Group, all_reduce
from tfdist.collectives.objects import all_gather_object, broadcast_object
from tfdist.optimizers.buckets import BUCKET_BYTES

__all__ = ["Tuning", "bucket_bytes_for", "tune"]

_logger = logging.getLogger("tfdist")

#: A tenth of the time for messages is nine times as much for bytes.
_BYTES_TO_MESSAGES = 9
_SMALL, _LARGE = 1 << 18, 1 << 22
_LEAST, _MOST = 1 << 20, 16 << 20
_REPEATS, _CALLS = 4, 5
#: What share of the time of direct messages the engine's ring must take to be chosen.
_CLEARLY = 0.9
#: What takes longer is the same each time.
_LONG_SECONDS = 0.3


@dataclasses.dataclass(frozen=True)
class Tuning:
    """How gradients travel.

    Attributes:
        bucket_bytes: The size at which a bucket is full.
        by_engine: Whether buckets go by the engine's own ring, not from rank to rank directly; as
            far as there is a choice.
    """

    bucket_bytes: int = BUCKET_BYTES
    by_engine: bool = True


def tune(engine: Engine) -> Tuning:
    """What is fastest along the data axis; called by all ranks at once, eagerly.

    What was found before for as many ranks on as many hosts is taken from a file, which
    `XDG_CACHE_HOME` may move.

    Returns:
        The same on all ranks.
    """
    group, world = engine.group("data"), engine.group()
    if group.size == 1:
        return Tuning()
    hosts = all_gather_object(socket.gethostname(), group, name="tuning/hosts")
    file = _file(group, hosts)
    known = broadcast_object(_read(file) if engine.rank == 0 else None, world, name="tuning/known")
    if known is not None:
        return known
    found = broadcast_object(_measure(group), world, name="tuning/found")
    if engine.rank == 0:
        _write(file, found)
    return found


def bucket_bytes_for(small_seconds: float, large_seconds: float) -> int:
    """The size of buckets, from the times of sums of 256 KiB and of 4 MiB."""
    a_byte = max(large_seconds - small_seconds, 1e-9) / (_LARGE - _SMALL)
    a_message = max(small_seconds - _SMALL * a_byte, 0.0)
    size = _LEAST
    while size < min(_BYTES_TO_MESSAGES * a_message / a_byte, _MOST):
        size *= 2
    return size


def _measure(group: Group) -> Tuning:
    found: dict[bool, tuple[float, float]] = {}
    # Where the engine has no faster way beside it, both ways are the same.
    for by_engine in (False, True) if group.engine.direct is not None else (True,):
        small, large = (_seconds(size, by_engine, group) for size in (_SMALL, _LARGE))
        found[by_engine] = small, large
    # Two measurements of one speed differ by chance; direct messages then begin sooner.
    by_engine = False not in found or found[True][1] < _CLEARLY * found[False][1]
    return Tuning(bucket_bytes_for(*found[by_engine]), by_engine)


def _seconds(size: int, by_engine: bool, group: Group) -> float:
    """The time of a sum on the slowest member; several follow each other at once."""
    name = f"tuning/{'engine' if by_engine else 'direct'}/{size}"

    @tf.function
    def sums(x):
        return [
            all_reduce(x, group, bulk=by_engine, name=f"{name}/{number}")
            for number in range(_REPEATS)
        ]

    x = tf.zeros([size // 4])

    def call() -> float:
        begun = time.perf_counter()
        for result in sums(x):
            result[0].numpy()
        return (time.perf_counter() - begun) / _REPEATS

    def slowest(seconds: float) -> float:
        own = tf.constant(seconds, tf.float64)
        return float(all_reduce(own, group, "max", name=f"{name}/slowest"))

    call()
    first = slowest(call())
    if first * _REPEATS > _LONG_SECONDS:
        return first
    return slowest(statistics.median(call() for _ in range(_CALLS)))


def _file(group: Group, hosts: list[str]) -> Path:
    counts = "-".join(str(count) for count in sorted(collections.Counter(hosts).values()))
    way = "direct" if group.engine.direct is not None else "engine"
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return folder / "tfdist" / "tuning" / f"{hosts[0]}_{group.engine.name}_{way}_{counts}.json"


def _read(file: Path) -> Tuning | None:
    try:
        return Tuning(**json.loads(file.read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        _logger.warning("%s cannot be read, so it is measured anew: %s", file, error)
        return None


def _write(file: Path, found: Tuning) -> None:
    """Writes the file in one step: other jobs may read or write it."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as part:
            json.dump(dataclasses.asdict(found), part)
        os.replace(part.name, file)
    except OSError as error:
        _logger.warning("%s cannot be written; the next job measures again: %s", file, error)
