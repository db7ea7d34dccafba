"""`tfdist.benchmarks.slow_links` between two hosts of this machine, on a link of a given rate.

    sudo .venv/bin/python -m tests.hosts.slow_links --rate=1gbit [--ways=float32,bfloat16,powersgd:4]

Prints a table: seconds of a step, its speed beside the first way's, and what a rank sends in one. Means,
since DiLoCo sends once in many steps.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys

from tabulate import tabulate

from tests.hosts.cluster import SCRIPTS, Cluster, environment, why_not


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rate", default="1gbit", help="As `tc` has it; none: no limit")
    parser.add_argument("--ways", default="float32,bfloat16,powersgd:4,int8,onebit,topk:0.01")
    parser.add_argument("--engine", default="horovod", choices=["horovod", "tensorflow"])
    parser.add_argument("--size", default="large")
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    reason = why_not()
    if reason is not None:
        print(f"No hosts can be made here: {reason}", file=sys.stderr)
        return 2
    variables = environment()
    if "PYTHONPATH" in os.environ:
        variables["PYTHONPATH"] = os.environ["PYTHONPATH"]
    with Cluster(2) as cluster:
        if options.rate != "none":
            cluster.shape(options.rate)
        done = cluster.hosts[0].run(
            SCRIPTS / "tfdist-run", f"--engine={options.engine}", "-np=2", "-H", "host1:1,host2:1",
            "--", sys.executable, "-m", "tfdist.benchmarks.slow_links",
            *(f"--{name}={getattr(options, name)}" for name in ("ways", "size", "rows", "steps", "rounds")),
            environment=variables, seconds=3600,
        )  # fmt: skip
    lines = [line.partition("{") for line in done.stdout.splitlines() if '"seconds"' in line]
    if done.returncode or not lines:
        print(done.stdout[-4000:], done.stderr[-4000:], file=sys.stderr)
        return done.returncode or 1
    found = json.loads("".join(lines[0][1:]))
    base = statistics.mean(next(iter(found.values()))["seconds"])
    rows = []
    for way, taken in found.items():
        seconds = taken["seconds"]
        rows.append(
            (way, statistics.mean(seconds), min(seconds), max(seconds),
             base / statistics.mean(seconds), statistics.mean(taken["sent"]) / (1 << 20))
        )  # fmt: skip
    print(f"Two hosts, {options.rate}, {options.size}, {options.rows} rows a rank:")
    names = ("way", "step, s", "least", "most", "steps beside the first", "sent, MiB")
    print(tabulate(rows, names, floatfmt=("", ".3f", ".3f", ".3f", ".2f", ".2f")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
