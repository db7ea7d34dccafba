"""Where a model can be split: the order of its calls, and the tensors that are live after each.

A call is represented by the numbers of the tensors that it reads and makes. A tensor is live from the
call that makes it to the last call that reads it.

A model can be split where one tensor is live: between the layers of a stack, and around a block with a
shortcut. Where more tensors are live, it can be split if all but one of them are shared and have been
read. A tensor is shared if several calls read it, and if another tensor that is not shared is live all
the time from the call that makes it to the last call that reads it. Examples are an encoder's output and
the tokens of the decoder, or a mask or a position bias and the tokens that it applies to. Until the first
call that reads it, a tensor that is still to be made of inputs alone counts as well, such as the tokens of
the decoder. A shortcut is not shared: no other tensor is live at the beginning of its block.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence


@dataclasses.dataclass(frozen=True)
class Step:
    """A call: the tensors that it reads, without inputs of the model, and those that it makes."""

    reads: tuple[int, ...]
    makes: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Place:
    """The place between a call and the next.

    Attributes:
        live: The live tensors, without the inputs of the model.
        is_cut: Whether the model can be split here.
    """

    live: tuple[int, ...]
    is_cut: bool


def order(steps: Sequence[Step], outputs: Sequence[int]) -> list[int]:
    """An order of the calls with few live tensors: each is made shortly before it is read.

    The order is depth first from the outputs. The nearest output comes first, so that calls for no other
    output end early. Of the tensors that a call reads, the one with the longest path of calls before it is
    made first. A call whose arguments are live for longer anyway is then delayed until its result is read.

    Args:
        steps: The calls, each after those that make the tensors that it reads.
        outputs: The outputs of the model.

    Returns:
        The places in `steps` of the calls that an output depends on.
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
            before = {maker[t]: height[t] for t in steps[place].reads if t in maker}
            missing = [each for each in before if each not in found]
            if place in found or not missing:
                found[place] = None
                waiting.pop()
            else:
                waiting.append(max(missing, key=before.__getitem__))
    return _delayed(list(found), steps, outputs)


def _delayed(sequence: list[int], steps: Sequence[Step], outputs: Collection[int]) -> list[int]:
    """Delays each call as far as its arguments are live anyway."""
    readers: dict[int, set[int]] = {}
    for call in sequence:
        for tensor in steps[call].reads:
            readers.setdefault(tensor, set()).add(call)
    at = {call: place for place, call in enumerate(sequence)}
    waits_for: dict[int, int] = {}
    for call in reversed(list(sequence)):
        users = [at[user] for tensor in steps[call].makes for user in readers.get(tensor, ())]
        until = min(users, default=0) - 1
        if until < 0 or not all(
            tensor in outputs or any(at[user] > until for user in readers[tensor] - {call})
            for tensor in steps[call].reads
        ):
            continue
        user = sequence[until + 1]
        # Before other calls that are delayed until the same call.
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
    """The place after each call.

    Args:
        steps: The calls, in order.
        outputs: The outputs of the model, which are live until the end.
        whole: Tensors at which the model cannot be split.
    """
    readers: dict[int, list[int]] = {}
    made: dict[int, int] = {}
    for place, step in enumerate(steps):
        made |= dict.fromkeys(step.makes, place)
        for tensor in dict.fromkeys(step.reads):
            readers.setdefault(tensor, []).append(place)
    last = {tensor: some[-1] for tensor, some in readers.items()}
    live: list[list[int]] = []
    before: list[int] = []
    for place, step in enumerate(steps):
        both = dict.fromkeys([*before, *step.makes])
        before = [t for t in both if t in outputs or last.get(t, -1) > place]
        live.append(before)
    # Without outputs that no later call reads.
    pending = [[t for t in some if last.get(t, -1) > place] for place, some in enumerate(live)]
    shared = _shared(steps, pending, readers, made)

    def is_cut(place: int) -> bool:
        if place == len(steps) - 1:
            return True
        if any(tensor in whole for tensor in live[place]):
            return False
        if len(pending[place]) <= 1:
            return True
        main = [tensor for tensor in pending[place] if tensor not in shared]
        return _is_one(main, made, readers) and all(
            readers[tensor][0] <= place or made[tensor] == made[main[0]]
            for tensor in pending[place]
            if tensor in shared
        )

    return [Place(tuple(some), is_cut(place)) for place, some in enumerate(live)]


def _shared(steps: Sequence[Step], pending: list[list[int]], readers: dict, made: dict) -> set[int]:
    """The tensors that blocks share, determined in the order of decreasing lifetime."""
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
    """Whether tensors count as one: a single one, or outputs of one call that are read by one other."""
    if len(tensors) == 1:
        return True
    made_by = {made[tensor] for tensor in tensors}
    read_by = {tuple(readers[tensor]) for tensor in tensors}
    return len(made_by) == len(read_by) == 1 and len(readers[tensors[0]]) == 1
