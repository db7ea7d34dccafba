"""One trace of all ranks, in the format that Chrome's tracing and Perfetto read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tfdist.addons.monitoring.monitor.sections import Call, Step
from tfdist.backend.clock.stamps import Timed

#: The trace of one rank: plain data, since it is sent.
RankTrace = dict[str, Any]

_LANES = ("step", "compute", "input", "callbacks", "checkpoint")
_LANE_OF = {
    "input": "input",
    "forward_backward": "compute",
    "optimizer": "compute",
    "checkpoint": "checkpoint",
}
_MICRO = 1e6


def trace_of(
    steps: Sequence[Step], timers: Sequence[Timed], first: int, offset: float, host: str
) -> RankTrace:
    """This rank's trace of some steps.

    Args:
        steps: The steps.
        timers: The measurements of timers in other threads.
        first: The number of the first step.
        offset: The seconds to add to this rank's time to get the chief's.
        host: The name of the machine.
    """
    slices: list[tuple[str, str, float, float, dict]] = []
    for number, step in enumerate(steps, first):
        slices.append(("step", f"step {number}", step.begin, step.end, {"step": number}))
        for section, begin, end in step.spans:
            if section in ("communication", "other"):
                continue  # Communication is on the lanes of the transports.
            lane = _LANE_OF.get(section, "callbacks")
            slices.append((lane, section, begin, end, {"step": number}))
        for call in step.calls:
            slices.append((call.lane, call.name, call.begin, call.end, _of_call(call, number)))
    for timed in timers:
        slices.append(("other threads", timed.name, timed.begin, timed.end, {}))
    slices = [(lane, name, a + offset, b + offset, more) for lane, name, a, b, more in slices]
    return {"host": host, "slices": slices}


def _of_call(call: Call, step: int) -> dict[str, Any]:
    return {
        "step": step,
        "bytes_sent": call.sent,
        "in_background": call.in_background,
        "ranks": list(call.ranks),
        "communication": True,
    }


def merged_trace(traces: Sequence[RankTrace], **more: Any) -> dict[str, Any]:
    """The traces of all ranks as one.

    A process represents a rank, a thread represents a lane. Slices that overlap on a lane, such as
    concurrent collectives, are on additional lanes. Arrows lead from a send to its receive.

    Args:
        traces: The trace of each rank.
        **more: Additional entries of the file, under "otherData".
    """
    zero = min((begin for each in traces for _, _, begin, _, _ in each["slices"]), default=0.0)
    events: list[dict[str, Any]] = []
    messages: dict[tuple, dict[str, dict[str, Any]]] = {}
    for rank, each in enumerate(traces):
        name = f"rank {rank} ({each['host']})"
        events.append({"name": "process_name", "ph": "M", "pid": rank, "args": {"name": name}})
        events.append(
            {"name": "process_sort_index", "ph": "M", "pid": rank, "args": {"sort_index": rank}}
        )
        lanes = _in_lanes(each["slices"])
        for number, (lane, slices) in enumerate(lanes):
            place = {"pid": rank, "tid": number + 1}
            events.append({"name": "thread_name", "ph": "M", **place, "args": {"name": lane}})
            events.append(
                {"name": "thread_sort_index", "ph": "M", **place, "args": {"sort_index": number}}
            )
            for _, what, begin, end, arguments in slices:
                event = {
                    "name": what,
                    "cat": "communication" if arguments.get("communication") else lane,
                    "ph": "X",
                    **place,
                    "ts": _MICRO * (begin - zero),
                    "dur": _MICRO * (end - begin),
                    "args": {key: v for key, v in arguments.items() if key != "communication"},
                }
                events.append(event)
                end_of = _end_of_message(what, rank)
                if end_of is not None:
                    key = (what, arguments["step"])
                    messages.setdefault(key, {})[end_of] = event
    for number, ends in enumerate(messages.values(), 1):
        if len(ends) == 2:
            events += _arrow(number, ends["send"], ends["receive"])
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"tfdist": more}}


def _end_of_message(name: str, rank: int) -> str | None:
    """The end of a message that a slice is; names are those of `tfdist.collectives.run`."""
    operation, _, rest = name.partition("/")
    if operation != "send":
        return None
    source, _, to = next(part for part in rest.split("/") if "-to-" in part).partition("-to-")
    return "send" if int(source) == rank else "receive" if int(to) == rank else None


def _arrow(number: int, send: dict, receive: dict) -> list[dict[str, Any]]:
    """An arrow whose ends are inside the slices from and to which it leads."""
    common = {"name": "message", "cat": "message", "id": number}
    return [
        {"ph": "s", **common, "pid": send["pid"], "tid": send["tid"], "ts": send["ts"]},
        {
            "ph": "f",
            "bp": "e",
            **common,
            "pid": receive["pid"],
            "tid": receive["tid"],
            "ts": receive["ts"] + receive["dur"],
        },
    ]


def _in_lanes(slices: Sequence[tuple]) -> list[tuple[str, list[tuple]]]:
    """The slices by lane, so that no lane has slices that overlap."""
    by_lane: dict[str, list[tuple]] = {}
    for each in slices:
        by_lane.setdefault(each[0], []).append(each)
    order = sorted(by_lane, key=lambda lane: (_LANES.index(lane) if lane in _LANES else 99, lane))
    found: list[tuple[str, list[tuple]]] = []
    for lane in order:
        beside: list[list[tuple]] = []
        for each in sorted(by_lane[lane], key=lambda each: (each[2], each[3])):
            free = next((one for one in beside if one[-1][3] <= each[2]), None)
            if free is None:
                beside.append([each])
            else:
                free.append(each)
        for number, one in enumerate(beside):
            found.append((lane if number == 0 else f"{lane} {number + 1}", one))
    return found


def hidden_share(steps: Sequence[Step]) -> float:
    """The fraction of the communication of some steps that is hidden by computation."""
    communicating = sum(step.communicating for step in steps)
    return sum(step.hidden for step in steps) / communicating if communicating else 0.0


def write_trace(path: str, trace: dict[str, Any]) -> None:
    """Writes a trace to a file.

    Raises:
        OSError: It cannot be written.
    """
    with open(path, "w", encoding="utf-8") as file:
        json.dump(trace, file)
