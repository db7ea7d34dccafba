"""Which runs of a chain's parts a training step recomputes."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import keras

from tfdist.pipeline.chain import Chain
from tfdist.pipeline.costs import bytes_of, kept_bytes, link_costs, training_graph
from tfdist.utils import checks

#: How `recompute` chooses.
POLICIES = ("every_layer", "sqrt", "selective", "budget", "optimal")
#: What "budget" goes by, unless by numbers.
_COSTS = ("flops", "seconds")

#: How many ways to a place of the chain are followed, and how many peaks are tried.
_WAYS, _PEAKS = 64, 64


class Costs(NamedTuple):
    """What the parts of a chain cost.

    Attributes:
        inputs: Bytes of what each part begins with.
        inside: Bytes of what the backward pass takes of each part's forward pass.
        forward: What each part's forward pass costs, in any unit.
    """

    inputs: Sequence[float]
    inside: Sequence[float]
    forward: Sequence[float]


def check_costs(costs: str | Sequence[float]) -> None:
    """Checks the argument of `recompute`, as far as no model is needed for it.

    Raises:
        ValueError: It is neither a word that is known nor numbers.
    """
    if isinstance(costs, str) and costs in _COSTS:
        return
    try:
        checks.numbers_of("costs", costs, minimum=0)
    except ValueError:
        meaning = f"{', '.join(map(repr, _COSTS))}, or a number of at least 0 for each part"
        raise checks.refuse("costs", costs, meaning) from None


def choose_segments(
    model: keras.Model,
    policy: str,
    budget: float | None,
    costs: str | Sequence[float],
    rows: int,
    input_shape: Sequence | Mapping | None,
) -> list[tuple[keras.layers.Layer, keras.layers.Layer]]:
    """The first and the last layer of each run that is recomputed.

    Raises:
        ValueError: The policy is unknown, or nothing is within the budget.
    """
    if (policy == "budget") != (budget is not None):
        raise ValueError(
            f"`budget` is for policy='budget'. Received: budget={budget}, policy={policy!r}."
        )
    chain = Chain(model, input_shape)
    count = len(chain)
    if policy in ("every_layer", "sqrt"):
        length = 1 if policy == "every_layer" else math.ceil(math.sqrt(count))
        runs = [(begin, min(begin + length, count)) for begin in range(0, count, length)]
    else:
        known = _costs_of(chain, costs, rows)
        runs = smallest(known) if budget is None else cheapest_within(known, budget)
    # The backward pass begins in the last run, whose activations are all there then. A run begins
    # and ends with layers that are called once.
    uses = Counter(map(id, chain.executed))
    found = []
    for begin, end in runs:
        layers = {id(layer) for link in chain.links[begin:end] for layer in link.layers}
        places = [p for p, layer in enumerate(chain.executed) if id(layer) in layers]
        # The model may call others in between, where its branches run side by side.
        alone = places == list(range(places[0], places[-1] + 1)) if places else False
        once = [chain.executed[place] for place in places if uses[id(chain.executed[place])] == 1]
        if end < count and once and alone:
            found.append((once[0], once[-1]))
    return found


def smallest(costs: Costs) -> list[tuple[int, int]]:
    """Cuts a chain into runs, each recomputed, so that the fewest bytes stand at the peak.

    At the peak there stand what every run begins with and the inside of one run. For each peak of
    insides that is allowed, dynamic programming finds the runs that keep least.

    Returns:
        Begin and end of each run.
    """
    best, found = math.inf, []
    for peak in _peaks(costs.inside):
        kept, runs = _fewest_kept(costs, peak)
        if kept + peak < best:
            best, found = kept + peak, runs
    return found


def cheapest_within(costs: Costs, budget: float) -> list[tuple[int, int]]:
    """The runs to recompute, the rest being kept, that cost least time within so many bytes.

    Dynamic programming over the chain and the bytes kept so far, for each allowed peak of the
    insides of a recomputed run.

    Returns:
        Begin and end of each run that is recomputed.

    Raises:
        ValueError: There are none.
    """
    if sum(costs.inside) <= budget:
        return []
    best, found = math.inf, None
    for peak in _peaks(costs.inside):
        time, runs = _least_time(costs, budget - peak, peak)
        if time < best:
            best, found = time, runs
    if found is None:
        kept, _ = min(
            ((_fewest_kept(costs, peak)[0] + peak, peak) for peak in _peaks(costs.inside)),
            default=(0.0, 0.0),
        )
        raise ValueError(
            f"No way of recomputing keeps activations within budget={budget:,.0f} bytes: the least "
            f"is {kept:,.0f}. Take fewer rows, or a larger budget."
        )
    return found


def _peaks(inside: Sequence[float]) -> list[float]:
    """Sums of the insides of runs: all, or evenly chosen ones of too many."""
    sums = {
        sum(inside[begin:end]) for begin, end in itertools.combinations(range(len(inside) + 1), 2)
    }
    found = sorted(total for total in sums if total >= max(inside))
    step = max(1, len(found) // _PEAKS)
    return found[::step]


def _fewest_kept(costs: Costs, peak: float) -> tuple[float, list[tuple[int, int]]]:
    """The runs with insides of at most `peak` bytes that begin with the fewest bytes in all."""
    count = len(costs.inside)
    best: list[tuple[float, int]] = [(0.0, 0)] + [(math.inf, 0)] * count
    for end in range(1, count + 1):
        inside = 0.0
        for begin in range(end - 1, -1, -1):
            inside += costs.inside[begin]
            if inside > peak:
                break
            best[end] = min(best[end], (best[begin][0] + costs.inputs[begin], begin))
    runs = []
    end = count
    while end and best[end][0] < math.inf:
        runs.append((best[end][1], end))
        end = best[end][1]
    return best[count][0], runs[::-1]


def _least_time(costs: Costs, kept: float, peak: float) -> tuple[float, list[tuple[int, int]]]:
    """The recomputed runs with insides of at most `peak` that keep `kept` bytes, in least time."""
    count = len(costs.inside)
    # By place: ways to get there, none of which is better in both bytes and time than another.
    ways: list[list[_Way]] = [[_Way(0.0, 0.0, None, None)]]
    for end in range(1, count + 1):
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
    if not ways[count]:
        return math.inf, []
    best = min(ways[count], key=lambda way: way.time)
    runs = []
    way: _Way | None = best
    while way is not None:
        if way.run is not None:
            runs.append(way.run)
        way = way.before
    return best.time, runs[::-1]


class _Way(NamedTuple):
    """A way to get to a place of the chain: bytes kept, time, the way before, the last run."""

    kept: float
    time: float
    before: Any
    run: tuple[int, int] | None


def _undominated(ways: list[_Way]) -> list[_Way]:
    """Those than which no other keeps less in less time; evenly chosen ones of too many."""
    found: list[_Way] = []
    for way in sorted(ways, key=lambda way: (way.kept, way.time)):
        if not found or way.time < found[-1].time:
            found.append(way)
    if len(found) <= _WAYS:
        return found
    step = (len(found) - 1) / (_WAYS - 1)
    return [found[round(place * step)] for place in range(_WAYS)]


def _costs_of(chain: Chain, costs: str | Sequence[float], rows: int) -> Costs:
    forward = link_costs(chain, "costs", costs, ("flops", "seconds"))
    chain.check_known_shapes("activations can be counted")
    inputs, inside = [], []
    specs = chain.specs(rows)
    for link in chain.links:
        graph, read, backward = training_graph(link, link.arguments(specs))
        # What the model was given stands anyway.
        own = [
            tensor
            for number, tensor in zip(link.reads, read, strict=True)
            if number not in chain.inputs or link is chain.links[0]
        ]
        inputs.append(float(sum(map(bytes_of, own))))
        inside.append(float(kept_bytes(graph, backward)))
    return Costs(inputs, inside, forward)
