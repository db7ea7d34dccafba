"""Which runs of a chain's parts a training step recomputes."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import keras

from tfdist.pipeline.chain import Chain
from tfdist.pipeline.costs import bytes_of, kept_bytes, segment_costs, training_graph

POLICIES = ("every_layer", "sqrt", "selective", "budget", "optimal")
#: The costs that "budget" supports, in addition to numbers.
COSTS = ("flops", "seconds")

#: The number of ways to a place of the chain that are followed, and of peaks that are tried.
_WAYS, _PEAKS = 64, 64

#: Begin and end of consecutive parts of a chain.
Run = tuple[int, int]


class Costs(NamedTuple):
    """The costs of the parts of a chain.

    Attributes:
        inputs: The bytes of the inputs of each part.
        inside: The bytes that the backward pass reads from each part's forward pass.
        forward: The cost of each part's forward pass, in any unit.
    """

    inputs: Sequence[float]
    inside: Sequence[float]
    forward: Sequence[float]


def choose_runs(
    model: keras.Model,
    policy: str,
    budget: float | None,
    costs: str | Sequence[float],
    rows: int,
    input_shape: Sequence | Mapping | None,
) -> list[tuple[keras.layers.Layer, keras.layers.Layer]]:
    """The first and the last layer of each run that is recomputed.

    Raises:
        ValueError: The policy is unknown, or no choice is within the budget.
    """
    if (policy == "budget") != (budget is not None):
        raise ValueError(
            "`budget` and policy='budget' require each other. Received: "
            f"budget={budget}, policy={policy!r}."
        )
    chain = Chain(model, input_shape)
    count = len(chain)
    if policy in ("every_layer", "sqrt"):
        length = 1 if policy == "every_layer" else math.ceil(math.sqrt(count))
        runs = [(begin, min(begin + length, count)) for begin in range(0, count, length)]
    else:
        known = _costs_of(chain, costs, rows)
        runs = smallest(known)[1] if budget is None else cheapest_within(known, budget)
    # The last run is not recomputed: the backward pass begins while all its activations exist. A run
    # begins and ends with layers that are called once.
    uses = Counter(map(id, chain.executed))
    found = []
    for begin, end in runs:
        layers = {id(layer) for segment in chain.segments[begin:end] for layer in segment.layers}
        places = [p for p, layer in enumerate(chain.executed) if id(layer) in layers]
        # The model may call other layers in between, if its branches are executed in turns.
        alone = bool(places) and places[-1] - places[0] + 1 == len(places)
        once = [chain.executed[place] for place in places if uses[id(chain.executed[place])] == 1]
        if end < count and once and alone:
            found.append((once[0], once[-1]))
    return found


def smallest(costs: Costs) -> tuple[float, list[Run]]:
    """Splits a chain into runs, all of them recomputed, so that the peak of memory is minimal.

    At the peak, the inputs of all runs and the inside of one run are in memory. For each possible peak of
    insides, dynamic programming finds the runs with the smallest inputs.

    Returns:
        The bytes at the peak, and begin and end of each run.
    """
    best: tuple[float, list[Run]] = (math.inf, [])
    for peak in _peaks(costs.inside):
        kept, runs = _fewest_kept(costs, peak)
        if kept + peak < best[0]:
            best = kept + peak, runs
    return best


def cheapest_within(costs: Costs, budget: float) -> list[Run]:
    """The runs to recompute in the least time within a number of bytes; the rest is kept.

    Dynamic programming over the chain and the bytes kept so far, for each possible peak of the inside of a
    recomputed run.

    Returns:
        Begin and end of each run that is recomputed.

    Raises:
        ValueError: There are none.
    """
    if sum(costs.inside) <= budget:
        return []
    ways = (_least_time(costs, budget - peak, peak) for peak in _peaks(costs.inside))
    time, found = min(ways, key=lambda way: way[0], default=(math.inf, []))
    if time == math.inf:
        raise ValueError(
            f"Recomputation cannot keep activations within budget={budget:,.0f} bytes: the least is "
            f"{smallest(costs)[0]:,.0f}. Use fewer rows, or a larger budget."
        )
    return found


def _peaks(inside: Sequence[float]) -> list[float]:
    """Sums of the insides of runs; of too many an evenly spaced selection."""
    ends = range(len(inside) + 1)
    sums = {sum(inside[begin:end]) for begin, end in itertools.combinations(ends, 2)}
    found = sorted(total for total in sums if total >= max(inside))
    return found[:: max(1, len(found) // _PEAKS)]


def _fewest_kept(costs: Costs, peak: float) -> tuple[float, list[Run]]:
    """The minimal bytes of inputs of runs with insides of at most `peak` bytes, and the runs."""
    count = len(costs.inside)
    best: list[tuple[float, list[Run]]] = [(math.inf, [])] * (count + 1)
    best[0] = (0.0, [])
    for end in range(1, count + 1):
        inside = 0.0
        for begin in range(end - 1, -1, -1):
            inside += costs.inside[begin]
            if inside > peak:
                break
            before, runs = best[begin]
            if before + costs.inputs[begin] <= best[end][0]:
                best[end] = before + costs.inputs[begin], [*runs, (begin, end)]
    return best[count]


def _least_time(costs: Costs, kept: float, peak: float) -> tuple[float, list[Run]]:
    """The minimal time of recomputed runs with insides of at most `peak` that keep `kept` bytes."""
    # For each place the ways to it, of which none is better in both bytes and time than another.
    ways: list[list[_Way]] = [[_Way(0.0, 0.0, None, None)]]
    for end in range(1, len(costs.inside) + 1):
        found = [
            _Way(way.kept + costs.inside[end - 1], way.time, way, None) for way in ways[end - 1]
        ]
        inside, time = 0.0, 0.0
        for begin in range(end - 1, -1, -1):
            inside += costs.inside[begin]
            time += costs.forward[begin]
            if inside > peak:
                break
            found += [
                _Way(way.kept + costs.inputs[begin], way.time + time, way, (begin, end))
                for way in ways[begin]
            ]
        ways.append(_undominated([way for way in found if way.kept <= kept]))
    way: _Way | None = min(ways[-1], key=lambda way: way.time, default=None)
    least = math.inf if way is None else way.time
    runs = []
    while way is not None:
        if way.run is not None:
            runs.append(way.run)
        way = way.before
    return least, runs[::-1]


class _Way(NamedTuple):
    """A way to a place of the chain: bytes kept, time, the way before, the last run."""

    kept: float
    time: float
    before: Any
    run: Run | None


def _undominated(ways: list[_Way]) -> list[_Way]:
    """The ways than which no other keeps less in less time; of too many an evenly spaced selection."""
    found: list[_Way] = []
    for way in sorted(ways, key=lambda way: (way.kept, way.time)):
        if not found or way.time < found[-1].time:
            found.append(way)
    if len(found) <= _WAYS:
        return found
    step = (len(found) - 1) / (_WAYS - 1)
    return [found[round(place * step)] for place in range(_WAYS)]


def _costs_of(chain: Chain, costs: str | Sequence[float], rows: int) -> Costs:
    forward = segment_costs(chain, "costs", costs, COSTS)
    chain.check_known_shapes("the size of activations")
    inputs, inside = [], []
    specs = chain.specs(rows)
    for place, segment in enumerate(chain.segments):
        graph, read, backward = training_graph(segment, segment.arguments(specs))
        # The inputs of the model are in memory anyway.
        inputs.append(
            sum(
                float(bytes_of(tensor))
                for number, tensor in zip(segment.reads, read, strict=True)
                if number not in chain.inputs or not place
            )
        )
        inside.append(float(kept_bytes(graph, backward)))
    return Costs(inputs, inside, forward)
