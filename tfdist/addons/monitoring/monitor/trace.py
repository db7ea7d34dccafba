"""One trace of all ranks, in the format that Chrome's tracing and Perfetto read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tfdist.addons.monitoring.monitor.sections import Call, Step
from tfdist.backend.clock.stamps import Timed

#: What one rank did: plain data, since it travels.
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
    """What a rank tells of some steps.

    Args:
        steps: The steps.
        timers: What timers of other threads have measured meanwhile.
        first: The number of the first step.
        offset: What makes of this rank's time the chief's.
        host: The machine.
    """
    slices: list[tuple[str, str, float, float, dict]] = []
    for number, step in enumerate(steps, first):
        slices.append(("step", f"step {number}", step.begin, step.end, {"step": number}))
        for section, begin, end in step.spans:
            if section in ("communication", "other"):
                continue  # The lanes of the transports have the former.
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

    A process stands for a rank, a thread for a lane; what overlaps on a lane, as collectives that travel
    at the same time, goes to lanes beside it. Arrows lead from a send to its receive.

    Args:
        traces: Of each rank, the first first.
        **more: What stands in the file beside the events.
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
    """Which end of a message a slice is: names are those of `tfdist.collectives.run`."""
    operation, _, rest = name.partition("/")
    if operation != "send":
        return None
    source, _, to = next(part for part in rest.split("/") if "-to-" in part).partition("-to-")
    return "send" if int(source) == rank else "receive" if int(to) == rank else None


def _arrow(number: int, send: dict, receive: dict) -> list[dict[str, Any]]:
    """An arrow; its ends lie inside of the slices that it leads from and to."""
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
    """The slices by lane, none of which has slices that overlap."""
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
    """The share of the communication of some steps that the computation hides."""
    travelling = sum(step.travelling for step in steps)
    return sum(step.hidden for step in steps) / travelling if travelling else 0.0


def write_trace(path: str, trace: dict[str, Any]) -> None:
    """Writes a trace.

    Raises:
        OSError: It cannot be written.
    """
    with open(path, "w", encoding="utf-8") as file:
        json.dump(trace, file)
