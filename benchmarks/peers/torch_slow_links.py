"""Steps of a large GPT under PyTorch's DistributedDataParallel, with gradients whole or by PowerSGD.

A rank of two or more, which finds the others by MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE:

    python -P torch_slow_links.py '{"layers": 12, ...}' float32,powersgd:4 --rows=2 --steps=4 --rounds=2

Rank 0 prints a line of JSON: for each way the seconds of each step. It does what
`benchmarks.slow_links` does, with the same sizes.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from torch import distributed
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

#: Steps before those that are timed: buckets are laid out anew after the first.
_WARM = 4
#: From this step on gradients are compressed; PyTorch wants the first two whole.
_START = 2


def main() -> None:
    """The program."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("sizes", type=json.loads)
    parser.add_argument("ways")
    parser.add_argument("--rows", type=int, default=2, help="The rows of each rank")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    # By its place: this folder holds programs of environments without tfdist.
    sys.path.insert(0, str(Path(__file__).parent))
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # As TensorFlow's threads do.
    distributed.init_process_group("gloo")
    found: dict[str, list[float]] = {way: [] for way in options.ways.split(",")}
    for _ in range(options.rounds):
        for way, seconds in found.items():
            seconds += _measure(way, options)
    if distributed.get_rank() == 0:
        print(json.dumps(found), flush=True)
    distributed.destroy_process_group()


def _measure(way: str, options) -> list[float]:
    from torch_models import GPT, loss_of

    torch.manual_seed(0)
    kind, _, rank = way.partition(":")
    # The hook of each bucket makes three all-reduces, each when the one before is over. Gloo matches them
    # by their order, and those of several buckets come in another order on each rank: it aborts. So there
    # is one bucket, of more MiB than the model has.
    options_of_buckets = {"bucket_cap_mb": 4096} if kind == "powersgd" else {}
    model = DistributedDataParallel(
        GPT(options.sizes), gradient_as_bucket_view=True, **options_of_buckets
    )
    if kind == "powersgd":
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=int(rank), start_powerSGD_iter=_START
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, eps=1e-7, fused=True)
    shape = (options.rows, options.sizes["tokens"] + 1)
    text = torch.randint(options.sizes["vocabulary"], shape)
    marks = []
    for _ in range(_WARM + options.steps):
        optimizer.zero_grad(set_to_none=True)
        loss_of(model(text[:, :-1]), text[:, 1:]).backward()
        optimizer.step()
        marks.append(time.perf_counter())
    return [b - a for a, b in zip(marks[_WARM - 1 :], marks[_WARM:], strict=False)]


if __name__ == "__main__":
    main()
