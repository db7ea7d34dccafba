"""`tfdist-plan calibrate`: what this machine takes, in a file that `tfdist-plan --machine=` reads.

Ranks of this machine train small models, each for itself and together, and add up tensors. From the
times follow, by least squares, what a step and a layer take beside arithmetic, the rates of products and of
memory, the links, and how much of the gradients' way is hidden.
"""

from __future__ import annotations

import datetime
import os
import platform
import sys
import time
from collections.abc import Sequence

import numpy as np
from absl import flags

from tfdist.launch import command
from tfdist.launch.counting import count_cores
from tfdist.launch.flag_values import FlagDefiner, UsageError, output_file
from tfdist.planner import Layout, Link, Machine, Transformer, estimate
from tfdist.planner.calibration import write_machine
from tfdist.planner.memory import kept_bytes
from tfdist.planner.parts import count_parameters, forward_flops
from tfdist.runtime.rendezvous import ENGINES

__all__ = ["CALIBRATE", "fit_rates", "link_of", "measure_machine"]

_VALUES = flags.FlagValues()
_define = FlagDefiner(_VALUES)
_OUTPUT = _define.string("output", "machine.json", "File to write")
_RANKS = _define.integer("ranks", 2, "Ranks that are started", lower_bound=2, upper_bound=64)
_ENGINE = _define.enum("engine", "auto", ["auto", "horovod", "tensorflow"], "Engine")
_MEMORY_SHARE = 0.9

#: What each rank trains: layers, width, rows. The first warms up.
_ALONE = ((1, 128, 4), (2, 128, 16), (2, 256, 4), (4, 256, 4), (2, 256, 16), (2, 512, 4))
#: What is trained in a process of its own, for its memory.
_FRESH = ((1, 128, 4), (2, 512, 8), (4, 512, 4))
_SIZES = [4096, 1 << 20, 1 << 24]
#: Bytes of an engine's bulk operations: a few buckets' worth at least.
_BULK_SIZES = [1 << 20, 1 << 22, 1 << 26]
#: By how much the bytes of a layout may be off: twice the mean error of docs/planning.md.
_MEMORY_MARGIN = 0.15


def _model(layers: int, width: int) -> Transformer:
    return Transformer(layers, width, max(width // 64, 1), 512, 128)


def fit_rates(
    models: Sequence[Transformer], rows: Sequence[int], seconds: Sequence[float]
) -> tuple[float, float, float, float]:
    """Seconds of a step and of a layer, seconds a FLOP, and seconds a byte, by least squares.

    A step takes s + 2 l n + f F + b B, with n layers, F FLOPs, and B bytes that other operations and the
    optimizer move; none of the four is negative. Deviations count relative to the step.

    Args:
        models: What was trained.
        rows: Rows of each batch.
        seconds: Of each step.
    """
    from scipy import optimize

    lines = []
    for model, batch in zip(models, rows, strict=True):
        layout = Layout()
        moved = 6 * sum(p.count * kept_bytes(p, layout, batch) for p in model.parts)
        # As in the estimate of the optimizer: state and parameters both ways, gradients once.
        moved += count_parameters(model) * (2 * (layout.state_bytes + 4) + 4)
        layers = sum(part.count for part in model.parts)
        lines.append([1.0, 2.0 * layers, 3.0 * batch * forward_flops(model), moved])
    matrix, target = np.array(lines), np.array(seconds)
    scale = matrix.max(axis=0)
    weighed = matrix / scale / target[:, None]
    found, _ = optimize.nnls(weighed, np.ones(len(target)))
    step, layer, flop, byte = (float(each) for each in found / scale)
    return step, layer, max(flop, 1e-15), max(byte, 1e-14)


def measure_machine(ranks: int, engine: str) -> Machine:
    """Measures this machine with so many ranks; see the module."""
    from tfdist.launch import trials
    from tfdist.testing import RankPool

    processors = count_cores()
    base, fragmentation = _measure_memory()
    models = [_model(layers, width) for layers, width, _ in _ALONE]
    rows = [each[2] for each in _ALONE]
    with RankPool(ranks, engine) as pool:
        pool.run(trials.alone, models[0], rows[0], timeout=300)
        measured = [
            max(each.seconds for each in pool.run(trials.alone, model, batch, timeout=300))
            for model, batch in zip(models, rows, strict=True)
        ]
        last = models[-1], rows[-1]
        one = pool.run(trials.alone, *last, only=0, timeout=300)[0].seconds
        inside = link_of(_SIZES, pool.run(trials.collective_seconds, _SIZES, False, timeout=300))
        bulk = link_of(
            _BULK_SIZES, pool.run(trials.collective_seconds, _BULK_SIZES, True, timeout=300)
        )
        together = _model(2, 256), Layout(data=ranks), 8 * ranks
        seen = pool.run(trials.trial, *together, timeout=300)
    share = max(ranks / processors, 1.0)
    step, layer, flop, byte = fit_rates(models, rows, [each / share for each in measured])
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    found = Machine(
        flops=dict.fromkeys(("float32", "bfloat16", "float16"), 1 / flop),
        memory=_MEMORY_SHARE * memory / ranks,
        memory_bandwidth=1 / byte,
        inside=inside,
        bulk=bulk,
        ranks_per_host=ranks,
        processors=processors,
        efficiency=1.0,
        memory_efficiency=1.0,
        overlap=0.0,
        algorithm="ring",
        layer_seconds=layer,
        step_seconds=step,
        base_bytes=base,
        fragmentation=fragmentation,
        memory_margin=_MEMORY_MARGIN,
        solo=max(measured[-1] / share / one, 1.0),
        calibrated={
            "ranks": float(ranks),
            "layer FLOPs": max(
                batch * (part.flops + part.attention_flops)
                for model, batch in zip(models, rows, strict=True)
                for part in model.parts
            ),
            "message bytes": float(_BULK_SIZES[-1]),
        },
        name=platform.node() or "this machine",
        source=f"calibrated {datetime.date.today()} with {ranks} ranks of {engine}",
    )
    return found.replace(overlap=_overlap(found, *together, max(each.seconds for each in seen)))


def _measure_memory() -> tuple[float, float]:
    """Bytes of a process without a model, and what its allocator keeps: a line through some peaks."""
    from tfdist.launch import trials
    from tfdist.testing import RankPool

    asked, peaks = [], []
    plain = Machine({"float32": 1e9}, 1e15, 1e9, Link(0.0, 1e9), fragmentation=1.0, base_bytes=0.0)
    for layers, width, batch in _FRESH:
        model = _model(layers, width)
        with RankPool(1, "local") as pool:
            found = pool.run(trials.alone, model, batch, 2, timeout=300)[0]
        peaks.append(float(found.before + found.peak))
        asked.append(estimate(model, plain, Layout(), global_batch=batch).memory.total)
    slope, base = np.polyfit(asked, peaks, 1)
    return max(float(base), 0.0), max(float(slope), 1.0)


def link_of(sizes: Sequence[int], seconds: Sequence[Sequence[float]]) -> Link:
    """A link by which a ring takes what all-reduces took: a line through their times."""
    ranks = len(seconds)
    times = np.array(seconds).max(axis=0)
    hops = 2 * (ranks - 1)
    carried = np.array(sizes) / ranks
    slope, start = np.polyfit(carried, times / hops, 1, w=1 / times)
    return Link(max(float(start), 1e-7), 1 / max(float(slope), 1e-13))


def _overlap(
    machine: Machine, model: Transformer, layout: Layout, batch: int, seconds: float
) -> float:
    """By how much of the shorter of messages and backward pass a step is shorter than their sum."""
    none = estimate(model, machine, layout, global_batch=batch).step_seconds
    all_hidden = estimate(model, machine.replace(overlap=1.0), layout, global_batch=batch)
    hidden = none - all_hidden.step_seconds
    return min(max((none - seconds) / hidden, 0.0), 1.0) if hidden > 0 else 0.0


def _check(_: list[str]) -> str:
    output_file("output", _OUTPUT.value, (".json",))
    return _ENGINE.value


def _main(engine: str) -> int:
    if engine == "auto":
        engine = next(name for name in ("horovod", "tensorflow") if _is_there(name))
    if engine not in ENGINES or not _is_there(engine):
        raise UsageError(f"--engine={engine} is not installed: tfdist-install-horovod builds it.")
    begin = time.perf_counter()
    machine = measure_machine(_RANKS.value, engine)
    write_machine(_OUTPUT.value, machine)
    print(
        f"{1e-9 * machine.flops['float32']:,.1f} GFLOP/s and "
        f"{1e-9 * machine.memory_bandwidth:,.2f} GB/s a rank; {1e3 * machine.step_seconds:.1f} ms a step "
        f"and {1e3 * machine.layer_seconds:.2f} ms a layer beside; messages "
        f"{1e6 * machine.inside.latency:.0f} us and {1e-9 * machine.inside.bandwidth:.2f} GB/s, gradients "
        f"{1e6 * machine.bulk.latency:.0f} us and {1e-9 * machine.bulk.bandwidth:.2f} GB/s; "  # type: ignore[union-attr]
        f"{machine.overlap:.0%} of them hidden; the allocator keeps {machine.fragmentation:.2f} times "
        f"what it is asked for; a rank alone is {machine.solo:.2f} times as fast."
    )
    print(
        f"Written to {_OUTPUT.value} in {time.perf_counter() - begin:.0f} s: "
        f"tfdist-plan --machine={_OUTPUT.value}",
        file=sys.stderr,
    )
    return 0


def _is_there(engine: str) -> bool:
    import importlib.util

    return engine != "horovod" or importlib.util.find_spec("horovod") is not None


CALIBRATE = command.Program(
    _main,
    _VALUES,
    usage="tfdist-plan calibrate [flags]",
    summary="Measures this machine in about a minute, and writes what it takes to a file.",
    check=_check,
)
