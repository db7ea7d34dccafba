"""Where a model can be cut: the order of its calls, and the tensors that lead on behind each.

A call is known here by the numbers of the tensors that it reads and makes.

Where one tensor leads from what ran before to what runs after, there is a cut: between the layers of
a stack, and around a block with a shortcut. Where more lead on there is one too if all but one of
them are shared, and have been read. A tensor is shared if several calls read it, and if beside it
another tensor, which is not shared, leads on all the while from where it is made to where it is read
last: an encoder's output and the tokens of the decoder, a mask or a position bias and the tokens that
it is for. Until it is first read, what is yet to be made of inputs alone, as the tokens of the decoder
are, does as well. A shortcut is no such tensor: where its block begins nothing else leads on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence


@dataclasses.dataclass(frozen=True)
class Step:
    """A call: the tensors that it reads, but for inputs of the model, and those that it makes."""

    reads: tuple[int, ...]
    makes: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Place:
    """What lies between a call and the next.

    Attributes:
        live: The tensors that lead on; those that are given to all stages are left out.
        is_cut: Whether the chain can be cut here.
    """

    live: tuple[int, ...]
    is_cut: bool


def order(steps: Sequence[Step], outputs: Sequence[int]) -> list[int]:
    """An order of the calls in which few tensors wait: each is made shortly before it is read.

    Depth first from the outputs, the nearest output first, so that what leads to no other output is
    over early. Of what a call reads, the tensor with most calls before it is made first. A call whose
    arguments are there for longer anyway then waits until its result is needed.

    Args:
        steps: The calls, each behind those that make what it reads.
        outputs: What the model returns.

    Returns:
        The places in `steps` of the calls that lead to an output.
    """
    maker = {tensor: place for place, step in enumerate(steps) for tensor in step.makes}
    height: dict[int, int] = {}
    for step in steps:
        top = 1 + max((height.get(tensor, 0) for tensor in step.reads), default=0)
        height |= dict.fromkeys(step.makes, top)
    found: dict[int, None] = {}
    for output in sorted(outputs, key=lambda tensor: height.get(tensor, 0)):
        waiting = [maker[output]] if output in maker else []
        while waiting:
            place = waiting[-1]
            before = {
                maker[tensor]: height[tensor] for tensor in steps[place].reads if tensor in maker
            }
            missing = [each for each in before if each not in found]
            if place in found or not missing:
                found[place] = None
                waiting.pop()
                continue
            waiting.append(max(missing, key=lambda each: before[each]))
    return _delayed(list(found), steps, outputs)


def _delayed(sequence: list[int], steps: Sequence[Step], outputs: Collection[int]) -> list[int]:
    """The sequence with each call later that may wait without keeping its arguments alive by that."""
    readers: dict[int, set[int]] = {}
    for call in sequence:
        for tensor in steps[call].reads:
            readers.setdefault(tensor, set()).add(call)
    at = {call: place for place, call in enumerate(sequence)}
    waits_for: dict[int, int] = {}
    for call in reversed(list(sequence)):
        users = [at[user] for tensor in steps[call].makes for user in readers.get(tensor, ())]
        if not users:
            continue
        until = min(users) - 1
        if not all(
            tensor in outputs or any(at[user] > until for user in readers[tensor] - {call})
            for tensor in steps[call].reads
        ):
            continue
        user = sequence[until + 1]
        # Not behind others that wait for the same.
        while waits_for.get(sequence[until]) == user:
            until -= 1
        waits_for[call] = user
        if until > at[call]:
            sequence.remove(call)
            sequence.insert(until, call)
            at = {each: place for place, each in enumerate(sequence)}
    return sequence


def places(
    steps: Sequence[Step], outputs: Collection[int], whole: Collection[int] = ()
) -> list[Place]:
    """What lies behind each call.

    Args:
        steps: The calls in the order in which they run.
        outputs: What the model returns: it leads on to the end.
        whole: Tensors at which there is no cut.
    """
    readers: dict[int, list[int]] = {}
    made: dict[int, int] = {}
    for place, step in enumerate(steps):
        made |= dict.fromkeys(step.makes, place)
        for tensor in dict.fromkeys(step.reads):
            readers.setdefault(tensor, []).append(place)
    live: list[list[int]] = []
    before: list[int] = []
    for place, step in enumerate(steps):
        before = [
            tensor
            for tensor in dict.fromkeys([*before, *step.makes])
            if tensor in outputs or readers.get(tensor, [-1])[-1] > place
        ]
        live.append(before)
    # Of outputs, those that no call reads any more only wait for the end.
    pending = [
        [tensor for tensor in some if readers.get(tensor, [-1])[-1] > place]
        for place, some in enumerate(live)
    ]
    shared = _shared(steps, pending, readers, made)
    found = []
    for place, some in enumerate(live):
        is_cut = place == len(steps) - 1 or not any(tensor in whole for tensor in some)
        if is_cut and len(pending[place]) > 1:
            main = [tensor for tensor in pending[place] if tensor not in shared]
            others = [tensor for tensor in pending[place] if tensor in shared]
            is_cut = _is_one(main, made, readers) and all(
                readers[tensor][0] <= place or made[tensor] == made[main[0]] for tensor in others
            )
        found.append(Place(tuple(some), is_cut or place == len(steps) - 1))
    return found


def _shared(steps: Sequence[Step], pending: list[list[int]], readers: dict, made: dict) -> set[int]:
    """The tensors that blocks share: those that live longest first."""
    shared: set[int] = set()
    begins = [place for place, step in enumerate(steps) if not step.reads]
    several = [tensor for tensor in made if len(readers.get(tensor, ())) > 1]
    for tensor in sorted(several, key=lambda t: made[t] - readers[t][-1]):
        first, last = readers[tensor][0], readers[tensor][-1]
        if all(
            any(other != tensor and other not in shared for other in pending[place])
            or any(place < begin < first for begin in begins)
            for place in range(made[tensor], last)
        ):
            shared.add(tensor)
    return shared


def _is_one(tensors: list[int], made: dict, readers: dict) -> bool:
    """Whether tensors lead on as one: a single one, or what one call makes for one other."""
    if len(tensors) == 1:
        return True
    return (
        len({made[tensor] for tensor in tensors}) == 1
        and len({tuple(readers[tensor]) for tensor in tensors}) == 1
        and len(readers[tensors[0]]) == 1
    )
