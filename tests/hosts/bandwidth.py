"""`tfdist-bench collectives` between two hosts of this machine, on a link of a given rate.

    sudo .venv/bin/python -m tests.hosts.bandwidth --rate=1gbit [--ranks=2] [--engine=tensorflow]

Prints its table. The exit code is 1 where an all-reduce of 16 MiB has less than 0.9 of the link's
rate, as that was measured from rank to rank, as its bus bandwidth.
"""

from __future__ import annotations

import argparse
import json
import sys

from tests.hosts.cluster import SCRIPTS, Cluster, environment, why_not

LEAST, BYTES = 0.9, 16 << 20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rate", default="1gbit", help="As `tc` has it")
    parser.add_argument("--ranks", type=int, default=1, help="On each host")
    parser.add_argument("--engine", default="horovod", choices=["horovod", "tensorflow"])
    options = parser.parse_args()
    reason = why_not()
    if reason is not None:
        print(f"No hosts can be made here: {reason}", file=sys.stderr)
        return 2
    with Cluster(2) as cluster:
        cluster.shape(options.rate)
        first = cluster.hosts[0]
        done = first.run(
            SCRIPTS / "tfdist-run", f"--engine={options.engine}", f"-np={2 * options.ranks}",
            "-H", f"host1:{options.ranks},host2:{options.ranks}", "--",
            SCRIPTS / "tfdist-bench", "collectives", "--operations=all_reduce", "--seconds=3",
            f"--min_bytes={BYTES >> 8}", f"--max_bytes={BYTES}", "--json=found.json",
            environment=environment(),
        )  # fmt: skip
        print(done.stdout)
        if done.returncode:
            return done.returncode
        found = json.loads((first.folder / "found.json").read_text())
    (line,) = [line for line in found["lines"] if line["bytes"] == BYTES]
    n = line["ranks"]
    share = line["bytes"] / line["seconds"] * 2 * (n - 1) / n / found["link"]["rate"]
    print(f"All-reduce of {BYTES:,} bytes: {share:.2f} of the link, at least {LEAST:g}.")
    return int(share < LEAST)


if __name__ == "__main__":
    sys.exit(main())
