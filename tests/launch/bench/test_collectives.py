"""The benchmark of collectives: its definitions, and that it runs on real ranks."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tfdist.launch.bench.collectives import Line, Link, ring_seconds, tree_seconds

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("operation", "bus"),
    # 4 ranks, 8 bytes in 2 s: as PERFORMANCE.md of nccl-tests has it.
    [
        ("all_reduce", 4 * 2 * 3 / 4),
        ("all_gather", 4 * 3 / 4),
        ("reduce_scatter", 4 * 3 / 4),
        ("all_to_all", 4 * 3 / 4),
        ("broadcast", 4),
    ],
)
def test_bandwidths_are_those_of_nccl_tests(operation, bus):
    line = Line(operation, 8, 4, 2.0)
    assert line.algorithm_rate == 4
    assert line.bus_rate == bus


def test_a_ring_at_the_rate_of_the_link_has_its_bus_bandwidth():
    link = Link(0.0, 5e9)
    for operation in ("all_reduce", "all_gather", "reduce_scatter", "broadcast"):
        line = Line(operation, 1 << 20, 4, 1.0)
        ideal = Line(operation, 1 << 20, 4, ring_seconds(line, link))
        assert ideal.bus_rate == pytest.approx(link.rate)


def test_costs_by_hand():
    """Of 1 MiB on 4 ranks, 10 us a hop and 5 GB/s: hops, and the bytes of each over the rate."""
    link = Link(1e-5, 5e9)

    def seconds(cost, operation):
        return cost(Line(operation, 1 << 20, 4, 1.0), link)

    assert seconds(ring_seconds, "all_reduce") == pytest.approx(3.745728e-4)
    assert seconds(ring_seconds, "all_gather") == pytest.approx(1.872864e-4)
    assert seconds(ring_seconds, "reduce_scatter") == pytest.approx(1.872864e-4)
    assert seconds(ring_seconds, "broadcast") == pytest.approx(2.397152e-4)
    assert seconds(tree_seconds, "all_reduce") == pytest.approx(8.788608e-4)
    assert seconds(tree_seconds, "broadcast") == pytest.approx(4.394304e-4)


def test_a_tree_is_better_where_messages_are_small():
    link = Link(1e-4, 1e9)
    small, large = (Line("all_reduce", size, 16, 1.0) for size in (64, 1 << 30))
    assert tree_seconds(small, link) < ring_seconds(small, link)
    assert tree_seconds(large, link) > ring_seconds(large, link)
    assert tree_seconds(Line("all_to_all", 64, 16, 1.0), link) is None


def test_on_two_ranks(tmp_path):
    runner = [Path(sysconfig.get_path("scripts")) / "tfdist-run", "-np=2", "--"]
    flags = ["--max_bytes=65536", "--seconds=0.05", "--operations=all_reduce,broadcast"]
    job = subprocess.run(
        [
            *runner,
            sys.executable,
            "-m",
            "tfdist.launch.bench.collectives",
            *flags,
            f"--json={tmp_path}/found",
        ],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
    )
    assert job.returncode == 0, job.stdout + job.stderr
    found = json.loads((tmp_path / "found").read_text())
    assert [(line["operation"], line["bytes"]) for line in found["lines"]] == [
        (operation, size) for operation in ("all_reduce", "broadcast") for size in (4096, 65536)
    ]
    assert all(line["seconds"] > 0 for line in found["lines"]) and found["link"]["rate"] > 0
    assert job.stdout.count("[0] all_reduce") == 2 and "[1] all_reduce" not in job.stdout
