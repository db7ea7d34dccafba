"""How much of the communication of a step is hidden behind its computation, between two hosts.

    sudo .venv/bin/python -m tests.hosts.overlap [--trace=overlap.json]

The link's rate is chosen so that the communication of a step takes half as long as its computation.
Hidden is what a whole step does not take beyond computing, as a share of what talking alone takes.
The exit code is 1 where that is less than 0.8.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
import sysconfig
from pathlib import Path

from tests.hosts.cluster import Cluster, why_not

LEAST = 0.8
SCRIPTS = Path(sysconfig.get_path("scripts"))
PROGRAM = Path(__file__).with_name("overlap_rank.py")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trace", type=Path, help="A file for a trace of some steps")
    options = parser.parse_args()
    reason = why_not()
    if reason is not None:
        print(f"No hosts can be made here: {reason}", file=sys.stderr)
        return 2
    with Cluster(2) as cluster:
        found = measured(cluster)
        rate = found["bytes"] / (0.5 * statistics.median(found["compute"]))
        print(f"The link is set to {8e-6 * rate:.0f} Mbit/s.")
        cluster.shape(f"{8 * rate:.0f}bit")
        found = measured(cluster)
        if options.trace:
            options.trace.write_text((cluster.hosts[0].folder / "trace.json").read_text())
    shares = []
    print("compute  talk  both   ms")
    for compute, talk, both in zip(found["compute"], found["talk"], found["both"], strict=True):
        shares.append(1 - (both - compute) / talk)
        print(f"{1e3 * compute:7.0f} {1e3 * talk:5.0f} {1e3 * both:5.0f}   hidden {shares[-1]:.0%}")
    hidden = statistics.median(shares)
    print(
        f"Hidden: {hidden:.0%} [{min(shares):.0%}, {max(shares):.0%}] of the communication, at least "
        f"{LEAST:.0%}."
    )
    return int(hidden < LEAST)


def measured(cluster: Cluster) -> dict:
    """What the ranks print."""
    done = cluster.hosts[0].run(
        SCRIPTS / "tfdist-run", "--engine=horovod", "-np=2", "-H", "host1:1,host2:1", "--",
        sys.executable, PROGRAM, "trace.json",
        environment={"TF_CPP_MIN_LOG_LEVEL": "3", "PATH": f"{SCRIPTS}:{os.environ['PATH']}"},
    )  # fmt: skip
    line = re.search(r'\{"compute".*\}', done.stdout)
    if done.returncode or line is None:
        raise RuntimeError(done.stdout)
    return json.loads(line[0])


if __name__ == "__main__":
    sys.exit(main())
