"""How much of the communication of a step is hidden behind its computation, between two hosts.

    sudo .venv/bin/python -m tests.hosts.overlap [--trace=overlap.json] [--picture=overlap.png]

The link's rate is chosen so that the communication of a step takes half as long as its computation.
Hidden is what a whole step does not take beyond computing, as a share of what talking alone takes.
The exit code is 1 where that is less than 0.8.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from pathlib import Path

from tests.hosts.cluster import SCRIPTS, Cluster, environment, why_not

LEAST = 0.8
PROGRAM = Path(__file__).with_name("overlap_rank.py")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trace", type=Path, help="A file for a trace of some steps")
    parser.add_argument("--picture", type=Path, help="A file for a picture of that trace")
    options = parser.parse_args()
    reason = why_not()
    if reason is not None:
        print(f"No hosts can be made here: {reason}", file=sys.stderr)
        return 2
    with Cluster(2) as cluster:
        found = measured(cluster, "at-full-rate")
        rate = found["bytes"] / (0.5 * statistics.median(found["compute"]))
        print(f"The link is set to {8e-6 * rate:.0f} Mbit/s.")
        cluster.shape(f"{8 * rate:.0f}bit")
        found = measured(cluster, "shaped")
        trace = (cluster.hosts[0].folder / "trace.json").read_text()
    if options.trace:
        options.trace.write_text(trace)
    if options.picture:
        draw(options.picture, json.loads(trace)["traceEvents"], statistics.median(found["compute"]))
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


def draw(path: Path, events: list[dict], compute: float) -> None:
    """What has come over the link by when, and how long steps and their computation take."""
    from matplotlib.figure import Figure

    steps = [event for event in events if event["ph"] == "X"]
    begin = min(event["ts"] for event in steps)
    ranks = sorted({event["pid"] for event in events})
    figure = Figure(figsize=(8, 2 * len(ranks) + 0.6), layout="constrained")
    rows = figure.subplots(len(ranks), 1, sharex=True)
    for rank, axes in zip(ranks, rows, strict=True):
        for step in (event for event in steps if event["pid"] == rank):
            start, length = 1e-3 * (step["ts"] - begin), 1e-3 * step["dur"]
            middle, end = start + min(1e3 * compute, length), start + length
            axes.axvspan(start, middle, color="tab:blue", alpha=0.2, linewidth=0)
            axes.axvspan(middle, end, color="tab:red", alpha=0.15, linewidth=0)
            axes.axvline(start, color="black", linewidth=0.5)
        came = [event for event in events if event["ph"] == "C" and event["pid"] == rank]
        times = [1e-3 * (event["ts"] - begin) for event in came]
        axes.plot(times, [event["args"]["bytes"] / 2**20 for event in came], color="black")
        axes.set_ylabel(f"rank {rank}: MiB received")
    rows[-1].set_xlabel("ms; blue: as long as computing alone takes, red: the rest of a step")
    figure.savefig(path, dpi=120)


def measured(cluster: Cluster, link: str) -> dict:
    """What the ranks print, who choose the size of buckets for this link."""
    cache = cluster.hosts[0].folder / link
    done = cluster.hosts[0].run(
        SCRIPTS / "tfdist-run", "--engine=horovod", "-np=2", "-H", "host1:1,host2:1", "--",
        sys.executable, PROGRAM, "trace.json",
        environment={**environment(), "XDG_CACHE_HOME": str(cache)},
    )  # fmt: skip
    line = re.search(r'\{"compute".*\}', done.stdout)
    if done.returncode or line is None:
        raise RuntimeError(done.stdout)
    return json.loads(line[0])


if __name__ == "__main__":
    sys.exit(main())
