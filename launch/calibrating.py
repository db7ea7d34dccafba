"""`tfdist-plan calibrate`: what this machine takes, in a file that `tfdist-plan --machine=` reads.

Ranks of this machine train small models, each for itself and together, and add up tensors. From the
times follow, by least squares, what a step and a layer take beside arithmetic, the rates of products and of
memory, the links, and what gradients make a step longer; what of them the backward pass hides is in that.
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
from absl import flags

from tfdist.addons.planner import Layout, Link, Machine, Transformer, estimate
from tfdist.addons.planner.calibration import write_machine
from tfdist.addons.planner.memory import kept_bytes
from tfdist.addons.planner.parts import count_parameters, forward_flops
from tfdist.launch import command, trials
from tfdist.launch.counting import count_cores
from tfdist.launch.flag_values import FlagDefiner, UsageError, output_file, refuse
from tfdist.runtime.rendezvous import ENGINES
from tfdist.testing import RankPool
from tfdist.utils.quantities import as_bytes

_VALUES = flags.FlagValues()
_define = FlagDefiner(_VALUES)
_OUTPUT = _define.string("output", "machine.json", "File to write")
_RANKS = _define.integer("ranks", 2, "Ranks that are started", lower_bound=2, upper_bound=64)
_ENGINE = _define.enum("engine", "auto", ["auto", "horovod", "tensorflow"], "Engine")
_MEMORY_SHARE = 0.9

#: What each rank trains by itself: layers, width, rows. Many small layers tell the seconds of a layer from
#: those of a step.
_ALONE = (
    (1, 128, 4),
    (2, 128, 16),
    (2, 256, 4),
    (4, 256, 4),
    (2, 256, 16),
    (2, 512, 4),
    (12, 128, 1),
)
#: Those of them that ranks train together too, each with these rows.
_TOGETHER = (0, 5)
#: What they train first of all in a process, for its memory.
_FRESH = ((4, 128, 4), (4, 512, 8))
#: Layouts whose messages say how long one takes while ranks compute: of two ranks, and of one model.
_BUSY = (Layout(tensor=2), Layout(context=2))
_BUSY_MODEL, _BUSY_ROWS = (4, 128), 16
#: More than elsewhere: what messages take is a small difference of long times.
_BUSY_STEPS = 12
_SIZES = [4096, 1 << 20, 1 << 22]
#: By how much the bytes of a layout may be off: more than any in tfdist/addons/planner/README.md.
_MEMORY_MARGIN = 0.25


def _model(layers: int, width: int) -> Transformer:
    return Transformer(layers, width, max(width // 64, 1), 512, 128)


def fit_rates(
    models: Sequence[Transformer],
    rows: Sequence[int],
    seconds: Sequence[float],
    fastest: float = math.inf,
) -> tuple[float, float, float, float]:
    """Seconds of a step and of a layer, seconds a FLOP, and seconds a byte, by least squares.

    A step takes s + 2 l n + f F + b B, with n layers, F FLOPs, and B bytes that other operations and the
    optimizer move; none of the four is negative. Deviations count relative to the step.

    Args:
        models: What was trained.
        rows: Rows of each batch.
        seconds: Of each step.
        fastest: How many bytes memory moves in a second at most.
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
    least = np.array([0.0, 0.0, 1e-15, max(1 / fastest, 1e-14)]) * scale
    found = optimize.lsq_linear(weighed, np.ones(len(target)), (least, np.inf), tol=1e-12).x
    step, layer, flop, byte = (float(each) for each in found / scale)
    return step, layer, flop, byte


def measure_machine(ranks: int, engine: str) -> Machine:
    """Measures this machine with so many ranks; see the module."""
    processors = count_cores()
    # Links and rates are measured without ranks that share a processor, where there are two.
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
    # Not times the share: the fastest of short additions has had a processor to itself.
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
        # What shows of the gradients is measured itself.
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
    """What makes a step on ranks that share processors take what it took.

    A step of all ranks together, whose gradients keep them side by side: by themselves some would be
    through while others begin, and would not share anything.
    """
    layout = Layout(data=machine.ranks_per_host)
    none, one = (
        estimate(
            model, machine.replace(crowding=c), layout, global_batch=_BUSY_ROWS * layout.data
        ).step_seconds
        for c in (0.0, 1.0)
    )
    # What grows with n^(1 + c) is n times this in `none`, and n n times in `one`.
    turns = layout.data / min(machine.processors or layout.data, layout.data)
    alone = (one - none) / (turns * turns - turns)
    grown = turns + (seconds - none) / alone
    return max(math.log(max(grown, turns)) / math.log(turns) - 1, 0.0)


def _busy_link(
    machine: Machine, model: Transformer, ranks: int, longer: float, share: float
) -> Link:
    """The link as ranks have it that compute: its latency such that layouts take what they took.

    Whoever waits for a message shares the processor with what computes. What layouts take is compared
    with the model alone, in estimates as in measurements, so that errors of the model's estimate cancel.

    Args:
        machine: The machine, with the link as idle ranks have it.
        model: The model.
        ranks: How many ranks trained.
        longer: By how many seconds the steps of all `_BUSY` took longer than those of the model alone.
        share: How many ranks share a processor.
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
    """Bytes of a process without a model, and what its allocator keeps: a line through peaks."""
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
    """A link by which gradients take what they made steps longer: a line through two of these."""
    carried = 2 * (ranks - 1) / ranks * share
    slope, start = np.polyfit(sizes, shown, 1)
    return Link(max(float(start), 1e-7), carried / max(float(slope), 1e-13))


def link_of(sizes: Sequence[int], seconds: Sequence[Sequence[float]]) -> Link:
    """A link by which a ring takes what all-reduces took: a line through their times."""
    ranks = len(seconds)
    times = np.array(seconds).max(axis=0)
    hops = 2 * (ranks - 1)
    carried = np.array(sizes) / ranks
    slope, start = np.polyfit(carried, times / hops, 1, w=1 / times)
    return Link(max(float(start), 1e-7), 1 / max(float(slope), 1e-13))


def _check(_: list[str]) -> str:
    output_file("output", _OUTPUT.value, (".json",))
    if _RANKS.value % 2:
        raise refuse("ranks", _RANKS.value, "an even number")
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
        f"a process takes {as_bytes(machine.base_bytes)}, its allocator {machine.fragmentation:.2f} times "
        f"what it is asked for."
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
    summary="Measures this machine in two minutes, and writes what it takes to a file.",
    check=_check,
)
