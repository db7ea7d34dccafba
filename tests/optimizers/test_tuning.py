"""How the size of buckets is found, and kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import on_ranks
from tfdist.optimizers.tuning import bucket_bytes_for

KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize(
    ("message", "rate", "expected"),
    [
        (0.0, 1e9, 1 * MIB),  # Messages for nothing: as small as buckets get.
        (1e-3, 0.35e9, 4 * MIB),  # 9 ms' worth of bytes are 3.15 MB.
        (2e-3, 0.118e9, 4 * MIB),  # A link of 1 Gbit/s.
        (5e-3, 2e9, 16 * MIB),  # No larger than that.
    ],
)
def test_messages_take_a_tenth_of_the_time(message, rate, expected):
    seconds = [message + size / rate for size in (256 * KIB, 4 * MIB)]
    assert bucket_bytes_for(*seconds) == expected


def tune_in(folder: str):
    import os

    from tfdist.optimizers.tuning import tune
    from tfdist.testing import engine

    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = folder
    try:
        found = tune(engine())
    finally:
        del os.environ["XDG_CACHE_HOME"]
        if before is not None:
            os.environ["XDG_CACHE_HOME"] = before
    return found.bucket_bytes, found.by_engine


@on_ranks(("horovod", 2), ("tensorflow", 2))
def test_it_is_measured_once(pool, tmp_path):
    first = pool.run(tune_in, str(tmp_path), timeout=60)
    assert first[0] == first[1]
    assert MIB <= first[0][0] <= 16 * MIB
    (file,) = Path(tmp_path).rglob("*.json")
    assert json.loads(file.read_text()) == {
        "bucket_bytes": first[0][0],
        "by_engine": first[0][1],
    }
    file.write_text('{"bucket_bytes": 12345, "by_engine": false}')
    assert pool.run(tune_in, str(tmp_path), timeout=60) == [(12345, False)] * 2
    file.write_text("no JSON")
    assert pool.run(tune_in, str(tmp_path), timeout=60)[0][0] != 12345


@on_ranks(("tensorflow", 2))
def test_without_a_place_for_it_it_is_measured_each_time(pool, tmp_path):
    (tmp_path / "file").write_text("")
    found = pool.run(tune_in, str(tmp_path / "file"), timeout=60)
    assert found[0] == found[1]
