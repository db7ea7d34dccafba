"""`tfdist-plan calibrate`: measure this machine, and write a file for `tfdist-plan --machine=`.

Ranks of this machine train small models, separately and together, and run all-reduces. Least squares yields
the overheads of a step and of a layer, the rates of products and of memory, the links, and the exposed time
of gradients, which includes their overlap with the backward pass.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
import os
import platform
import sys
import time
from collections.abc import Sequence

import numpy as np

from tfdist.addons.planner import Layout, Link, Machine, Transformer, estimate
from tfdist.addons.planner.calibration import write_machine
from tfdist.addons.planner.memory import kept_bytes
from tfdist.addons.planner.parts import count_parameters, forward_flops
from tfdist.launch.flags import command
from tfdist.launch.flags.options import define_flags, option
from tfdist.launch.flags.values import UsageError, output_file, refuse
from tfdist.launch.plan import trials
from tfdist.launch.run.num_ranks import count_cores
from tfdist.runtime.rendezvous import ENGINES
from tfdist.testing import RankPool
from tfdist.utils.quantities import as_bytes

_MEMORY_SHARE = 0.9

#: The models that each rank trains separately: layers, width, rows. Many small layers separate the overhead
#: of a layer from that of a step.
_ALONE = (
    (1, 128, 4),
    (2, 128, 16),
    (2, 256, 4),
    (4, 256, 4),
    (2, 256, 16),
    (2, 512, 4),
    (12, 128, 1),
)
#: Indices of the models that ranks also train together, with the same rows per rank.
_TOGETHER = (0, 5)
#: The models that are trained first in a process, to measure its memory.
_FRESH = ((4, 128, 4), (4, 512, 8))
#: Layouts of two ranks to measure the latency of messages while ranks compute, with one model.
_BUSY = (Layout(tensor=2), Layout(context=2))
_BUSY_MODEL, _BUSY_ROWS = (4, 128), 16
#: More steps than elsewhere, because the time of messages is a small difference of large times.
_BUSY_STEPS = 12
_SIZES = [4096, 1 << 20, 1 << 22]
#: The relative error margin of memory, above all errors in tfdist/addons/planner/README.md.
_MEMORY_MARGIN = 0.25


@dataclasses.dataclass(frozen=True)
class CalibrateOptions:
    """The options of `calibrate`; see the flags of the same names."""

    output: str = option("machine.json", "File to write")
    ranks: int = option(2, "Number of ranks to start", least=2, most=64)
    engine: str = option("auto", "Engine", choices=("auto", "horovod", "tensorflow"))


_FLAGS = define_flags(CalibrateOptions)


def _model(layers: int, width: int) -> Transformer:
    return Transformer(layers, width, max(width // 64, 1), 512, 128)


def fit_rates(
    models: Sequence[Transformer],
    rows: Sequence[int],
    seconds: Sequence[float],
    fastest: float = math.inf,
) -> tuple[float, float, float, float]:
    """Fit the seconds per step, layer, FLOP and byte by least squares.

    A step takes s + 2 l n + f F + b B, with n layers, F FLOPs, and B bytes that other operations and the
    optimizer move; none of the four results is negative. Residuals are relative to the step.

    Args:
        models: The trained models.
        rows: Rows of each batch.
        seconds: Seconds of each step.
        fastest: Upper bound of the memory bandwidth, in bytes per second.

    Returns:
        Seconds per step, per layer, per FLOP and per byte.
    """
    from scipy import optimize

    lines = []
    for model, batch in zip(models, rows, strict=True):
        layout = Layout()
        moved = 6 * sum(p.count * kept_bytes(p, layout, batch) for p in model.parts)
        # As in the estimate of the optimizer: state and parameters are read and written, gradients read.
        moved += count_parameters(model) * (2 * (layout.state_bytes + 4) + 4)
        layers = sum(part.count for part in model.parts)
        lines.append([1.0, 2.0 * layers, 3.0 * batch * forward_flops(model), moved])
    matrix, target = np.array(lines), np.array(seconds)
    scale = matrix.max(axis=0)
    weighed = matrix / scale / target[:, None]
    least = np.array([0.0, 0.0, 1e-15, max(1 / fastest, 1e-14)]) * scale
    found = optimize.lsq_linear(weighed, np.ones(len(target)), (least, np.inf), tol=1e-12).x
    step, layer, flop, byte = (float(each) for each in found / scale)
    return step, layer, flop, byte


def measure_machine(ranks: int, engine: str) -> Machine:
    """Measure this machine with a number of ranks; see the module.

    Args:
        ranks: Number of ranks, an even number.
        engine: "horovod" or "tensorflow".
    """
    processors = count_cores()
    # Links and rates are measured without sharing processors, if there are at least two.
    few = min(ranks, max(processors // 2 * 2, 2))
    share = max(few / processors, 1.0)
    models = [_model(layers, width) for layers, width, _ in _ALONE]
    rows = [each[2] for each in _ALONE]
    busy = _model(*_BUSY_MODEL)

    def train(
        pool: RankPool,
        model: Transformer,
        layout: Layout,
        each: int,
        size: int = few,
        steps: int = trials.STEPS,
    ) -> list[trials.Measured]:
        layout = dataclasses.replace(layout, data=size // layout.ranks)
        return pool.run(trials.trial, model, layout, each * size, steps, timeout=300)

    peaks = []
    for place, (layers, width, each) in enumerate(_FRESH):
        with RankPool(few, engine) as pool:
            found = train(pool, _model(layers, width), Layout(), each)
            peaks.append(float(max(rank.before + rank.peak for rank in found)))
            if place:
                continue
            measured = [
                _slowest(pool.run(trials.alone, model, batch, timeout=300))
                for model, batch in zip(models, rows, strict=True)
            ]
            together = [_slowest(train(pool, models[i], Layout(), rows[i])) for i in _TOGETHER]
            idle = link_of(_SIZES, pool.run(trials.collective_seconds, _SIZES, timeout=300))
            single = _slowest(pool.run(trials.alone, busy, _BUSY_ROWS, _BUSY_STEPS, timeout=300))
            longer = sum(
                _slowest(train(pool, busy, layout, _BUSY_ROWS, steps=_BUSY_STEPS)) - single
                for layout in _BUSY
            )
            fastest = min(pool.run(trials.moved_bytes_per_second, timeout=300))
    each_alone = [seconds / share for seconds in measured]
    # The bandwidth is not scaled by the share, because the fastest of short additions is not shared.
    step, layer, flop, byte = fit_rates(models, rows, each_alone, fastest)
    base, fragmentation = _memory(peaks)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    sent = [4.0 * count_parameters(models[place]) for place in _TOGETHER]
    shown = [each - measured[place] for each, place in zip(together, _TOGETHER, strict=True)]
    machine = Machine(
        flops=dict.fromkeys(("float32", "bfloat16", "float16"), 1 / flop),
        memory=_MEMORY_SHARE * memory / ranks,
        memory_bandwidth=1 / byte,
        inside=idle,
        bulk=_gradient_link(sent, shown, few, share),
        ranks_per_host=ranks,
        processors=processors,
        efficiency=1.0,
        memory_efficiency=1.0,
        # The measured time of gradients is the exposed one.
        overlap=0.0,
        algorithm="ring",
        layer_seconds=layer,
        step_seconds=step,
        base_bytes=base,
        fragmentation=fragmentation,
        memory_margin=_MEMORY_MARGIN,
        calibrated={
            "ranks": float(ranks),
            "layer FLOPs": max(
                batch * (part.flops + part.attention_flops)
                for model, batch in zip(models, rows, strict=True)
                for part in model.parts
            ),
            "message bytes": max(sent),
        },
        name=platform.node() or "this machine",
        source=f"calibrated {datetime.date.today()} with {ranks} ranks of {engine}",
    )
    machine = machine.replace(inside=_busy_link(machine, busy, few, longer, share))
    if ranks == few:
        return machine
    with RankPool(ranks, engine) as pool:
        crowded = _slowest(train(pool, busy, Layout(), _BUSY_ROWS, ranks))
    return machine.replace(crowding=_crowding(machine, busy, crowded))


def _crowding(machine: Machine, model: Transformer, seconds: float) -> float:
    """The exponent `crowding` for which the estimated step of ranks that share processors is as measured.

    The step is one of all ranks together, because their gradients keep the ranks in step, so that they
    really share the processors.
    """
    layout = Layout(data=machine.ranks_per_host)
    none, one = (
        estimate(
            model, machine.replace(crowding=c), layout, global_batch=_BUSY_ROWS * layout.data
        ).step_seconds
        for c in (0.0, 1.0)
    )
    # The part that grows with n^(1 + c) is n times its single time in `none`, and n n times in `one`.
    turns = layout.data / min(machine.processors or layout.data, layout.data)
    alone = (one - none) / (turns * turns - turns)
    grown = turns + (seconds - none) / alone
    return max(math.log(max(grown, turns)) / math.log(turns) - 1, 0.0)


def _busy_link(
    machine: Machine, model: Transformer, ranks: int, longer: float, share: float
) -> Link:
    """The link between computing ranks, with the latency for which estimates are as measured.

    A rank that waits for a message shares the processor with computing ones. Both estimates and
    measurements are differences from the model on one rank, so that errors of its estimate cancel.

    Args:
        machine: The machine, with the link between idle ranks.
        model: The model.
        ranks: Number of ranks.
        longer: Sum over `_BUSY` of the additional seconds of a step, compared with one rank.
        share: Number of ranks per processor.
    """
    machine, link = machine.replace(ranks_per_host=ranks), machine.inside
    alone = share * estimate(model, machine, Layout(), global_batch=_BUSY_ROWS).step_seconds
    layouts = [dataclasses.replace(each, data=ranks // each.ranks) for each in _BUSY]

    def predicted(latency: float) -> float:
        linked = machine.replace(inside=Link(latency, link.bandwidth))
        return sum(
            estimate(model, linked, each, global_batch=_BUSY_ROWS * ranks).step_seconds - alone
            for each in layouts
        )

    none, far = predicted(0.0), 0.1
    latency = far * (longer - none) / (predicted(far) - none)
    return Link(max(latency, link.latency), link.bandwidth)


def _slowest(found: Sequence[trials.Measured]) -> float:
    return max(each.seconds for each in found)


def _memory(peaks: Sequence[float]) -> tuple[float, float]:
    """Fit bytes of a process without a model, and the fragmentation of the allocator, to peaks."""
    plain = Machine({"float32": 1e9}, 1e15, 1e9, Link(0.0, 1e9))
    asked = [
        estimate(_model(layers, width), plain, Layout(), global_batch=rows).memory.total
        for layers, width, rows in _FRESH
    ]
    slope, base = np.polyfit(asked, peaks, 1)
    return max(float(base), 0.0), max(float(slope), 1.0)


def _gradient_link(
    sizes: Sequence[float], shown: Sequence[float], ranks: int, share: float
) -> Link:
    """Fit the link of gradients to the additional seconds of steps."""
    carried = 2 * (ranks - 1) / ranks * share
    slope, start = np.polyfit(sizes, shown, 1)
    return Link(max(float(start), 1e-7), carried / max(float(slope), 1e-13))


def link_of(sizes: Sequence[int], seconds: Sequence[Sequence[float]]) -> Link:
    """Fit a link to the times of ring all-reduces."""
    ranks = len(seconds)
    times = np.array(seconds).max(axis=0)
    hops = 2 * (ranks - 1)
    carried = np.array(sizes) / ranks
    slope, start = np.polyfit(carried, times / hops, 1, w=1 / times)
    return Link(max(float(start), 1e-7), 1 / max(float(slope), 1e-13))


def _check(_: list[str]) -> CalibrateOptions:
    options = _FLAGS.read()
    output_file("output", options.output, (".json",))
    if options.ranks % 2:
        raise refuse("ranks", options.ranks, "an even number")
    return options


def _main(options: CalibrateOptions) -> int:
    engine = options.engine
    if engine == "auto":
        engine = next(name for name in ("horovod", "tensorflow") if _is_there(name))
    if engine not in ENGINES or not _is_there(engine):
        raise UsageError(f"--engine={engine} is not installed. Run tfdist-install-horovod.")
    begin = time.perf_counter()
    machine = measure_machine(options.ranks, engine)
    write_machine(options.output, machine)
    print(
        f"{1e-9 * machine.flops['float32']:,.1f} GFLOP/s and "
        f"{1e-9 * machine.memory_bandwidth:,.2f} GB/s per rank; overheads of {1e3 * machine.step_seconds:.1f} "
        f"ms per step and {1e3 * machine.layer_seconds:.2f} ms per layer; messages "
        f"{1e6 * machine.inside.latency:.0f} us and {1e-9 * machine.inside.bandwidth:.2f} GB/s, gradients "
        f"{1e6 * machine.bulk.latency:.0f} us and {1e-9 * machine.bulk.bandwidth:.2f} GB/s; "  # type: ignore[union-attr]
        f"a process uses {as_bytes(machine.base_bytes)}, its allocator {machine.fragmentation:.2f} times "
        f"the requested bytes."
    )
    print(
        f"Written to {options.output} in {time.perf_counter() - begin:.0f} s: "
        f"tfdist-plan --machine={options.output}",
        file=sys.stderr,
    )
    return 0


def _is_there(engine: str) -> bool:
    import importlib.util

    return engine != "horovod" or importlib.util.find_spec("horovod") is not None


CALIBRATE = command.Program(
    _main,
    _FLAGS.values,
    usage="tfdist-plan calibrate [flags]",
    summary="Measures this machine in two minutes, and writes the results to a file.",
    check=_check,
)
