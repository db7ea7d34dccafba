"""`benchmarks.slow_links` between two hosts of this machine, on a link of a given rate.

    sudo .venv/bin/python -m tests.hosts.slow_links --rate=1gbit [--ways=float32,bfloat16,powersgd:4]

Prints a table: seconds of a step, its speed beside the first way's, and what a rank sends in one. Means,
since DiLoCo sends once in many steps. With `--torch=.peers/torch/bin/python` PyTorch's
DistributedDataParallel trains the same GPT on the same link, before and after.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path

from tabulate import tabulate

from benchmarks import peers
from benchmarks.slow_links import SIZES, TOKENS
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
    parser.add_argument("--torch", default="", help="Python of an environment with PyTorch")
    parser.add_argument("--torch_ways", default="float32,powersgd:4")
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
        peer = _torch(cluster, options, 0) if options.torch else {}
        done = cluster.hosts[0].run(
            SCRIPTS / "tfdist-run", f"--engine={options.engine}", "-np=2", "-H", "host1:1,host2:1",
            "--", sys.executable, "-m", "benchmarks.slow_links",
            *(f"--{name}={getattr(options, name)}" for name in ("ways", "size", "rows", "steps", "rounds")),
            environment=variables, seconds=3600,
        )  # fmt: skip
        again = _torch(cluster, options, 1) if options.torch else {}
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
    for way, seconds in peer.items():
        taken = seconds + again[way]
        mean = statistics.mean(taken)
        rows.append((f"PyTorch, {way}", mean, min(taken), max(taken), base / mean, None))
    names = ("way", "step, s", "least", "most", "steps beside the first", "sent, MiB")
    print(tabulate(rows, names, floatfmt=("", ".3f", ".3f", ".3f", ".2f", ".2f")))
    return 0


def _torch(cluster: Cluster, options: argparse.Namespace, turn: int) -> dict[str, list[float]]:
    """The seconds of PyTorch's steps, by way."""
    sizes = dict(SIZES[options.size])
    sizes = {
        "layers": sizes["num_layers"],
        "width": sizes["width"],
        "heads": sizes["num_heads"],
        "tokens": TOKENS,
        "vocabulary": sizes["vocabulary"],
    }
    hosts = cluster.hosts[:2]
    common = {
        "MASTER_ADDR": hosts[0].address,
        "MASTER_PORT": str(29500 + turn),
        "WORLD_SIZE": str(len(hosts)),
        "GLOO_SOCKET_IFNAME": "eth0",
    }
    command = [
        os.path.abspath(options.torch), "-P", Path(peers.__file__).with_name("torch_slow_links.py"),
        json.dumps(sizes), options.torch_ways,
        *(f"--{name}={getattr(options, name)}" for name in ("rows", "steps", "rounds")),
    ]  # fmt: skip
    other = hosts[1].start(*command, environment=common | {"RANK": "1"})
    try:
        done = hosts[0].run(*command, environment=common | {"RANK": "0"}, seconds=3600)
    finally:
        other.kill()
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise RuntimeError(f"PyTorch's ranks failed:\n{done.stdout[-4000:]}")
    return json.loads(lines[-1])


if __name__ == "__main__":
    sys.exit(main())
