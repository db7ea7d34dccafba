"""The planner's layouts between two hosts of this machine, on links of given rates.

    sudo .venv/bin/python -m tests.hosts.planning [--rates=1gbit,300mbit] [--json=planning.json]

The link is measured by all-reduces, then each layout trains in a job of its own; both are added to the file
of `benchmarks.planning`, whose report compares.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

from benchmarks.planning import add
from benchmarks.planning_cases import host_cases
from benchmarks.planning_rank import SIZES
from tests.hosts.cluster import SCRIPTS, Cluster, environment, why_not


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rates", default="1gbit,300mbit", help="As `tc` has them, with commas.")
    parser.add_argument("--engine", default="horovod", choices=["horovod", "tensorflow"])
    parser.add_argument("--json", default="planning.json")
    options = parser.parse_args()
    reason = why_not()
    if reason is not None:
        print(f"No hosts can be made here: {reason}", file=sys.stderr)
        return 2
    with Cluster(2) as cluster:
        for rate in options.rates.split(","):
            cluster.shape(rate)
            row = {
                "rate": rate,
                "sizes": SIZES,
                **run(cluster, options.engine, "links"),
                "rows": [],
            }
            for case in host_cases():
                row["rows"].append(run(cluster, options.engine, case.as_json()))
                print(f"{rate}, {case}: {row['rows'][-1]['seconds']:.3f} s", file=sys.stderr)
            add(options.json, "hosts", [row])
    return 0


def run(cluster: Cluster, engine: str, wanted: Any) -> dict[str, Any]:
    """What `planning_rank` prints, on one rank of each host."""
    variables = environment()
    if "PYTHONPATH" in os.environ:
        variables["PYTHONPATH"] = os.environ["PYTHONPATH"]
    done = cluster.hosts[0].run(
        SCRIPTS / "tfdist-run", f"--engine={engine}", "-np=2", "-H", "host1:1,host2:1", "--",
        sys.executable, "-m", "benchmarks.planning_rank", json.dumps(wanted),
        environment=variables, seconds=300,
    )  # fmt: skip
    lines = [line.partition("{") for line in done.stdout.splitlines() if "{" in line]
    if done.returncode or not lines:
        raise RuntimeError(done.stdout[-4000:])
    return json.loads("".join(lines[-1][1:]))


if __name__ == "__main__":
    sys.exit(main())
